"""What warps share: tensor maps, shared memory with its barriers; and bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

#: where shared memory starts: not at 0, so that an offset is not taken for an address
SMEM_BASE = 1024
PARAM_BASE = 0x7000_0000
U32 = np.uint32


@dataclass
class TensorMap:
    """A tensor map over 16-bit elements: sizes, strides (elements) and box, the innermost last. ``swizzle``:
    bytes of its pattern, by which rows lie apart in shared memory; 0 for as many as a box's row has."""

    data: np.ndarray
    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0

    def cells(self, at: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of a box's elements [rows, columns], and which of them lie inside."""
        x, y, z = at
        columns, rows = np.arange(self.box[2]) + x, np.arange(self.box[1]) + y
        inside = (rows >= 0) & (rows < self.shape[1]) & (0 <= z < self.shape[0])
        inside = inside[:, None] & ((columns >= 0) & (columns < self.shape[2]))[None, :]
        return z * self.strides[0] + rows[:, None] * self.strides[1] + columns[None, :], inside

    def places(self, start: int) -> np.ndarray:
        """Shared-memory addresses of a box's elements, swizzled."""
        width = self.swizzle or self.box[2] * 2
        at = start + np.arange(self.box[1])[:, None] * width + np.arange(self.box[2])[None, :] * 2
        return at ^ (at >> 3 & {128: 0x70, 64: 0x30, 32: 0x10}[width])


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


@dataclass
class Block:
    rank: int
    index: int
    smem: np.ndarray
    dirty: np.ndarray
    barriers: dict[int, Barrier] = field(default_factory=dict)
    #: threads that have arrived at a numbered barrier, and how often it has opened
    named: dict[int, list[int]] = field(default_factory=dict)

    def arrive(self, at: int) -> None:
        bar = self.barriers[at]
        bar.pending -= 1
        assert bar.pending >= 0, f"more arrivals than barrier {at} of block {self.rank} counts"
        bar.settle()

    def complete(self, at: int, count: int) -> None:
        self.barriers[at].bytes -= count
        self.barriers[at].settle()


def bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(U32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def fp32(bits: np.ndarray) -> np.ndarray:
    """The bits of bf16 as fp32."""
    return (bits.astype(U32) << 16).view(np.float32)
