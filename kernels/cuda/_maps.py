"""Tensor maps of any rank, for copies that gather what lies apart: a page's rows of some heads, say."""

import ctypes
from collections.abc import Sequence
from typing import Any

from dsl_bench.kernels.cuda._tma import MAP_BYTES

from dsl_bench.plugin import KernelFault

#: bytes that L2 fetches around a miss at least; 0 leaves it to itself
FETCHES = (256, 128, 0)


def tiled_map(
    address: int, dtype: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], fetch: int
) -> bytes:
    """The tensor map of 2-byte elements at ``address``, in the 128-byte swizzle, innermost dimension first.

    ``sizes`` and ``box`` count elements, at most 64 of the innermost dimension in a box. ``strides`` are
    bytes, of all dimensions but the innermost, whose elements are adjacent; they need not ascend. ``address``
    and ``strides`` must be multiples of 16. ``fetch`` is one of FETCHES. What lies outside reads as zero.
    Raises KernelFault where the driver refuses."""
    from cuda.bindings import driver as d

    types = {
        "bf16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }
    promotions = {
        256: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        128: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        0: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
    }
    status, made = d.cuTensorMapEncodeTiled(
        types[dtype],
        len(sizes),
        address,
        [d.cuuint64_t(n) for n in sizes],
        [d.cuuint64_t(n) for n in strides],
        [d.cuuint32_t(n) for n in box],
        [d.cuuint32_t(1) for _ in box],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions[fetch],
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise KernelFault("launch_error", f"cuTensorMapEncodeTiled: {status} for {list(sizes)}", "bind")
    return ctypes.string_at(int(made.getPtr()), MAP_BYTES)


def device_ints(values: Sequence[int] | bytes, like: Any) -> Any:
    """int32 numbers, or the bytes of them, as a tensor on the device of ``like``."""
    import torch

    if isinstance(values, bytes):
        return torch.frombuffer(bytearray(values), dtype=torch.int32).to(like.device)
    return torch.tensor(list(values), dtype=torch.int32).to(like.device)
