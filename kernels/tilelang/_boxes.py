"""TMA loads that ``T.tma_copy`` does not offer: a box into part of a swizzled tile, issued by one thread of
the caller's choice, with a hint for L2."""

from typing import Any

import tilelang.language as T
from tilelang import tvm

#: columns of 2 bytes in one row of a 128-byte swizzle atom
ATOM = 64
#: the driver's numbers of the element types
_KIND = {"float16": 6, "bfloat16": 9}
#: TileLang's numbers of the L2 hints
NORMAL, FIRST, LAST = 0, 1, 2


def load(
    tensor: Any,
    shape: tuple[Any, ...],
    box: tuple[int, ...],
    dtype: str,
    barrier: Any,
    at: Any,
    xy: Any,
    hint: int = NORMAL,
) -> Any:
    """The call that loads a box of ``tensor`` (``shape``, row-major, 2-byte elements) to ``at`` in shared
    memory, swizzled by 128 bytes, and counts its bytes at ``barrier``. ``box`` and the coordinates ``xy`` are
    in the order of ``shape``; the box's last extent is at most ``ATOM``. Beyond the tensor there are
    zeros."""
    sizes = [T.cast(n, "int64") for n in reversed(shape)]
    strides = [T.int64(2)]
    for size in sizes[:-1]:
        strides.append(strides[-1] * size)
    ones = (1,) * len(box)
    desc = T.create_tma_descriptor(
        _KIND[dtype], len(box), tensor.data, *sizes, *strides, *reversed(box), *ones, 0, 3, 2, 0
    )
    op = tvm.tirx.op.Op.get("tl.tma_load")
    return T.call_intrin("handle", op, desc, barrier, at, *reversed(xy), hint)
