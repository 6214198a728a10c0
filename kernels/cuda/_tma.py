"""Tensor maps, made on the host and passed to kernels by value."""

import ctypes
from typing import Any

from dsl_bench.plugin import KernelFault

#: bytes of a CUtensorMap
MAP_BYTES = 128
ELEMENT = 2


def tensor_map(
    address: int,
    dtype: str,
    shape: tuple[int, int],
    pitch: int,
    box: tuple[int, int],
    swizzle: int = 128,
) -> bytes:
    """The tensor map of a matrix of ``shape`` (rows, columns) of 2-byte elements, ``pitch`` bytes a row.

    ``box`` (rows, columns) is what one copy moves, in the ``swizzle``-byte pattern (128, 64 or 32). What lies
    outside the shape reads as zero and is not written. ``address`` and ``pitch`` must be multiples of 16.
    Raises KernelFault where the driver refuses."""
    from cuda.bindings import driver as d

    types = {
        "bf16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }
    patterns = {
        128: d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        64: d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        32: d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    }
    status, made = d.cuTensorMapEncodeTiled(
        types[dtype],
        2,
        address,
        [d.cuuint64_t(shape[1]), d.cuuint64_t(shape[0])],
        [d.cuuint64_t(pitch)],
        [d.cuuint32_t(box[1]), d.cuuint32_t(box[0])],
        [d.cuuint32_t(1), d.cuuint32_t(1)],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        patterns[swizzle],
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise KernelFault(
            "launch_error", f"cuTensorMapEncodeTiled: {status} for {shape}, pitch {pitch}", "bind"
        )
    return ctypes.string_at(int(made.getPtr()), MAP_BYTES)


def matrix_map(tensor: Any, dtype: str, box: tuple[int, int], swizzle: int = 128) -> bytes:
    """The tensor map of a row-major matrix whose rows start on 16 bytes."""
    return rows_map(tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride(0), box, swizzle)


def rows_map(
    address: int, dtype: str, shape: tuple[int, int], pitch: int, box: tuple[int, int], swizzle: int = 128
) -> bytes:
    """The tensor map of ``shape`` elements at ``address``, rows ``pitch`` elements apart."""
    # a single row has any pitch; the driver wants one that could be
    return tensor_map(address, dtype, shape, max(pitch * ELEMENT, 16), box, swizzle)
