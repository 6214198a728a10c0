"""A simple cost model of waves and roofline, to say what to try first. It never says what is fast.

Knows no language: a config whose specialisation names a tile (``bm`` and ``bn``, or a text like ``128x256``)
of a matrix-shaped output gets an estimate from the workload's FLOPs and bytes. A kernel that knows better
gives its own (``Kernel.cost``). Only the order within one case matters; constants are those of an H200.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: SMs, and of each: FLOP a clock (dense bf16, fp16), bytes a clock from L2
SMS, FLOP_CLOCK, L2_CLOCK = 132, 4096, 64
#: clocks a µs under load, bytes a µs from memory
CLOCKS, MEMORY = 1500.0, 4.3e6
#: µs of a launch and of a tile's start and end
LAUNCH, TILE = 3.0, 1.0

_TEXT = re.compile(r"^(\d+)x(\d+)\b")


@dataclass(frozen=True)
class Work:
    """A case as the model sees it: FLOPs, least bytes, and the shape of the largest output."""

    flops: float
    bytes: float
    shape: tuple[int, ...]


def tile_of(static: Mapping[str, Any]) -> tuple[int, int] | None:
    """The output tile that a specialisation names, if it does."""
    if isinstance(static.get("bm"), int) and isinstance(static.get("bn"), int):
        return int(static["bm"]), int(static["bn"])
    for value in static.values():
        found = _TEXT.match(value) if isinstance(value, str) else None
        if found:
            return int(found[1]), int(found[2])
    return None


def estimate(work: Work, static: Mapping[str, Any]) -> float:
    """Estimated µs of a config; 0 where nothing can be said.

    Every SM does whole tiles: a last wave that is not full costs as much as a full one. A tile computes at
    the tensor cores' rate or as fast as L2 delivers its operands, whichever is slower."""
    tile = tile_of(static)
    if tile is None or len(work.shape) != 2 or min(tile) < 1 or not work.flops:
        return 0.0
    rows, cols = work.shape
    bm, bn = tile
    tiles = -(-rows // bm) * -(-cols // bn)
    waves = -(-tiles // SMS)
    depth = work.flops / (2.0 * rows * cols)
    compute = 2.0 * bm * bn * depth / FLOP_CLOCK
    loads = (bm + bn) * depth * 2.0 / L2_CLOCK
    time = waves * (max(compute, loads) / CLOCKS + TILE)
    return max(time, work.bytes / MEMORY) + LAUNCH


def shape_of(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of the largest output."""
    sizes = []
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        sizes.append(size)
    return tuple(shapes[sizes.index(max(sizes))]) if sizes else ()
