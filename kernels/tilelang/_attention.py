"""What the attention kernels share on the host: work lists, split plans, and the tables that carry them.

Touches no GPU and imports no DSL.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsl_bench.plugin import Case, int_list

#: SMs of an H200; estimates use it, grids the device's own number
SMS = 132
#: shared memory of an SM, and what the system keeps of it for every block
SM_SMEM, RESERVED = 233472, 1024
#: shared memory that one block may have
BLOCK_SMEM = 232448
#: integers of a piece in the table of ``piece_rows``
PIECE = 8
#: integers of a unit in the table of ``schedule``
UNIT = 4
#: below any score: rows that see no token keep it, and stay free of NaN
LOWEST = -1e30
#: what a maximum may grow by, in powers of two, before the sums of its row are rescaled: weights up to 256
#: lose nothing in any of the types
SLACK = 8.0
#: hand-specialised kernels with barriers of their own: no second specialisation, no inserted barrier
BY_HAND = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def lengths(case: Case) -> tuple[int, ...]:
    """The sequences' lengths in order."""
    return int_list(str(case.params["lens"]))


def log2_scale(d: int) -> float:
    """1/√d for scores that go into powers of two."""
    return math.log2(math.e) / math.sqrt(d)


@dataclass(frozen=True)
class Piece:
    """A run of KV tiles of one unit, which one block does.

    ``slot`` numbers its partial result; those of a unit follow one another from ``base``. A unit of one part
    has no partial: its block writes the output."""

    unit: int
    first: int
    tiles: int
    slot: int
    parts: int
    base: int


@dataclass(frozen=True)
class Split:
    """Pieces in the order of the blocks, and where each block's start: block i has
    ``pieces[bounds[i]:bounds[i + 1]]``. ``slots``: partial results in all."""

    pieces: tuple[Piece, ...]
    bounds: tuple[int, ...]
    slots: int


def _cut(tiles: Sequence[int], blocks: int, extra: int, load: int) -> list[list[tuple[int, int, int]]] | None:
    """Consecutive pieces (unit, first tile, tiles) block by block, none above ``load``, or None where they
    do not fit. A piece costs its tiles and ``extra``."""
    found: list[list[tuple[int, int, int]]] = [[]]
    room = load
    for unit, count in enumerate(tiles):
        first = 0
        while True:
            take = min(count - first, room - extra)
            if take > 0 or (count == 0 and take == 0):
                found[-1].append((unit, first, take))
                room -= take + extra
                first += take
                if first == count:
                    break
            if len(found) == blocks:
                return None
            found.append([])
            room = load
    return found


def split(tiles: Sequence[int], blocks: int, extra: int = 1) -> Split:
    """Units of ``tiles`` KV tiles each over ``blocks``, so that the busiest block has as little as possible.

    Blocks take consecutive tiles of the units in order and cut a unit wherever they are full. ``extra`` is
    what a piece costs beside its tiles, in tiles. A unit without tiles is one piece: its rows become
    zeros."""
    low, high = extra + min(1, max(tiles)), sum(tiles) + extra * len(tiles)
    while low < high:
        middle = (low + high) // 2
        if _cut(tiles, blocks, extra, middle) is None:
            low = middle + 1
        else:
            high = middle
    cut = _cut(tiles, blocks, extra, low)
    assert cut is not None, "the load of everything in one block always fits"
    parts = [0] * len(tiles)
    for unit, _, _ in (piece for block in cut for piece in block):
        parts[unit] += 1
    base, slots = [0] * len(tiles), 0
    for unit, count in enumerate(parts):
        base[unit] = slots
        slots += count if count > 1 else 0
    taken = [0] * len(tiles)
    pieces: list[Piece] = []
    bounds = [0]
    for block in cut:
        for unit, first, count in block:
            pieces.append(Piece(unit, first, count, base[unit] + taken[unit], parts[unit], base[unit]))
            taken[unit] += 1
        bounds.append(len(pieces))
    return Split(tuple(pieces), tuple(bounds), slots)


def piece_rows(plan: Split, units: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """The pieces as rows of ``PIECE`` integers: sequence, second index (head or block of rows), first tile,
    tiles, tokens of the sequence, slot, parts, base. ``units``: (sequence, second index, tokens)."""
    return [
        [*units[p.unit][:2], p.first, p.tiles, units[p.unit][2], p.slot, p.parts, p.base] for p in plan.pieces
    ]


@dataclass(frozen=True)
class Tile:
    """A tile of queries of one head: the sequence's first token and length, the tile's first query in it."""

    start: int
    length: int
    query: int
    head: int
    cost: int


def query_tiles(lens: Sequence[int], heads: int, bm: int, bn: int, causal: bool) -> list[Tile]:
    """All tiles of ``bm`` queries; ``cost`` is the KV tiles of ``bn`` that they read, and one besides."""
    found, start = [], 0
    for length in lens:
        for query in range(0, length, bm):
            seen = min(length, query + bm) if causal else length
            found += [Tile(start, length, query, head, cdiv(seen, bn) + 1) for head in range(heads)]
        start += length
    return found


def schedule(tiles: Sequence[Tile], blocks: int, section: int) -> list[list[Tile]]:
    """Tiles block by block: the longest first, each to the block that is free first.

    ``section`` query heads are done before the next ones, all sequences together, so that the keys and values
    of those in work stay in L2."""
    ordered = sorted(tiles, key=lambda t: (t.head // section, -t.cost, t.start, t.query, t.head))
    free = [(0, block) for block in range(blocks)]
    found: list[list[Tile]] = [[] for _ in range(blocks)]
    for tile in ordered:
        load, block = heapq.heappop(free)
        found[block].append(tile)
        heapq.heappush(free, (load + tile.cost, block))
    return found


def device_table(rows: Sequence[Sequence[int]] | Sequence[int], like: Any) -> Any:
    """An int32 tensor on the device of ``like``."""
    import torch

    return torch.tensor(rows, dtype=torch.int32).to(like.device)
