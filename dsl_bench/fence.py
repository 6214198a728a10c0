"""Tensors between two fences: memory on both sides whose content is known, so that a write beyond shows.

The fences are NaN in every floating-point type (as an int32, an index far out of range), so that what a
kernel reads there shows in its outputs too. Imported in workers only; torch is imported inside the functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsl_bench.errors import KernelFault

#: 0x7FED: a NaN in bfloat16 and float16, two of them a NaN in float32; not the poison of the outputs
CANARY = 0x7FED
#: bytes of a fence on the host, and on a device beside small and large tensors. As large as a page of the
#: device's memory where it matters, so that a tensor lies on pages as it would without fences
HOST_BYTES = 4 << 10
SMALL_BYTES, LARGE_BYTES = 64 << 10, 2 << 20


@dataclass(frozen=True)
class Fenced:
    """A tensor, and the memory before and after it as 16-bit integers."""

    name: str
    tensor: Any
    before: Any
    after: Any


def allocate(name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Fenced:
    """A contiguous tensor, uninitialised, between two fences."""
    import torch

    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type == "cpu":
        width = HOST_BYTES
    else:
        width = SMALL_BYTES if size < LARGE_BYTES else LARGE_BYTES
    whole = torch.empty(2 * width + size + size % 2, dtype=torch.uint8, device=device)
    made = Fenced(
        name,
        whole[width : width + size].view(dtype).view(shape),
        whole[:width].view(torch.int16),
        whole[width + size + size % 2 :].view(torch.int16),
    )
    _repair(made)
    return made


def _repair(fenced: Fenced) -> None:
    fenced.before.fill_(CANARY)
    fenced.after.fill_(CANARY)


def assert_whole(fences: Iterable[Fenced]) -> None:
    """KernelFault ``illegal_access`` where something was written beyond a tensor; the fences are mended, so
    that the next kernel is not blamed. Waits for the device once."""
    import torch

    known = list(fences)
    counts = [(zone != CANARY).sum() for f in known for zone in (f.before, f.after)]
    broken = torch.stack(counts).tolist() if counts else []
    found = []
    for number, fenced in enumerate(known):
        for where, count in zip(("before", "after"), broken[2 * number : 2 * number + 2], strict=True):
            if count:
                found.append(f"{2 * count} bytes {where} {fenced.name}")
                _repair(fenced)
    if found:
        more = f" and in {len(found) - 3} places more" if len(found) > 3 else ""
        raise KernelFault("illegal_access", f"written out of bounds: {', '.join(found[:3])}{more}", "canary")
