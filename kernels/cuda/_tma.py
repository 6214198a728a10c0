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
    rows, columns = tensor.shape
    pitch = tensor.stride(0) * ELEMENT
    # a single row has any pitch; the driver wants one that could be
    return tensor_map(tensor.data_ptr(), dtype, (rows, columns), max(pitch, 16), box, swizzle)


def residue_maps(tensor: Any, dtype: str, box: tuple[int, int]) -> tuple[bytes, list[int]]:
    """Eight tensor maps, one for the rows r, r + 8, r + 16, … of a row-major matrix, one after the other, and
    the columns that each is shifted by.

    Eight rows are a multiple of 16 bytes apart whatever their length. Map r begins at the 16 bytes that hold
    the first element of row r, so that element (8·i + r, x) is at (i, x + shift[r]); a copy that starts at
    shift[r] never touches what lies before. A residue without rows gets the map of row 0: the kernel reads
    it for rows of the tile that do not exist, and does not store those."""
    rows, columns = tensor.shape
    pitch = tensor.stride(0) * ELEMENT
    maps, shifts = [], []
    for residue in range(8):
        first = residue if residue < rows else 0
        at = tensor.data_ptr() + first * pitch
        shift = at % 16 // ELEMENT
        shape = ((rows - first + 7) // 8, columns + shift)
        maps.append(tensor_map(at - at % 16, dtype, shape, 8 * pitch, box))
        shifts.append(shift)
    return b"".join(maps), shifts
