"""Runs the PTX of a Hopper GEMM on the CPU, a cluster at a time, for kernels that no interpreter runs.

It knows the instructions that Gluon's ring kernels are made of, and nothing more: an unknown one raises. What
is asynchronous on the device is done late and in random order here, so that a missing wait shows: loads land
when a seeded scheduler says so, stores read shared memory when their group is waited for, operands of a
``wgmma`` must still hold the same bytes when it is waited for. A cluster in which no warp can go on raises
Deadlock.

Not modelled: registers (a ``wgmma``'s sums are there at once), the order of memory between threads beyond the
barriers, time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .memory import SMEM_BASE, Block, TensorMap, bf16, fp32
from .program import Program
from .warp import Warp

__all__ = ["Cluster", "Deadlock", "Program", "TensorMap", "bf16", "fp32"]


class Deadlock(AssertionError):
    """No warp of the cluster can go on."""


class Cluster:
    """Blocks that run together. ``params`` are the kernel's parameters: numbers, or TensorMaps."""

    def __init__(
        self, program: Program, params: Sequence[Any], first: int, blocks: int, grid: int, seed: int = 0
    ) -> None:
        self.program, self.params, self.grid = program, params, grid
        self.random = random.Random(seed)
        size = SMEM_BASE + 232448
        self.blocks = [
            Block(r, first + r, np.zeros(size, np.uint8), np.zeros(size, np.uint8)) for r in range(blocks)
        ]
        self.flying: list[Callable[[], None]] = []
        self.met = [0, 0]
        self.moved = True

    def run(self) -> None:
        """All warps to their end."""
        warps = [Warp(self, b, w).run() for b in self.blocks for w in range(self.program.threads // 32)]
        while warps:
            self.moved = False
            left = []
            for warp in warps:
                if next(warp, None) is None:
                    self.moved = True
                else:
                    left.append(warp)
            while self.flying and (self.random.random() < 0.5 or not self.moved):
                self.flying.pop(self.random.randrange(len(self.flying)))()
                self.moved = True
            if not self.moved:
                raise Deadlock(f"{len(left)} of {self.program.threads // 32 * len(self.blocks)} warps wait")
            warps = left
            self.random.shuffle(warps)
        assert not self.flying, "loads are under way when the last warp ends"
