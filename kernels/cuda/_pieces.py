"""How the decode kernels share out ragged work: pieces of sequences, lists of them, places for results.

A *job* is one sequence (of one group of heads) that takes a number of equal *units*, the smallest amount that
is worth cutting off (a stage of the ring, a block of tokens). A *worker* is what walks a list of pieces: a
thread block, or several that do the same pieces for different heads. No GPU and no tensor here.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

#: ways to cut: `stream` runs all jobs end to end and cuts where a worker is full; `even` into equal parts
PLANS = ("stream", "even")


class Piece(NamedTuple):
    """Units [begin, end) of a job."""

    job: int
    begin: int
    end: int


Lists = list[list[Piece]]


class Item(NamedTuple):
    """A piece, the place of its result, and how many parts its job has: what decode.cuh's Item holds."""

    job: int
    begin: int
    end: int
    slot: int
    first: int
    parts: int


def plan(units: Sequence[int], workers: int, overhead: float, way: str, join: float = 0.0) -> Lists:
    """Lists of pieces for at most ``workers`` workers, which together cover every job; a job of no units is
    one empty piece. ``overhead`` is what a piece costs beside its units, and ``join`` what a piece of a cut
    job costs on top, both in units. ``way`` is one of PLANS."""
    lists = _stream(units, workers, overhead) if way == "stream" else _even(units, workers, overhead, join)
    return [pieces for pieces in lists if pieces]


def makespan(units: Sequence[int], lists: Lists, overhead: float, join: float = 0.0) -> float:
    """What the busiest worker has to do, in units."""

    def cost(piece: Piece) -> float:
        whole = piece.end - piece.begin == units[piece.job]
        return piece.end - piece.begin + overhead + (0.0 if whole else join)

    return max(sum(map(cost, pieces)) for pieces in lists)


def items(lists: Lists) -> tuple[list[Item], list[int], int]:
    """All pieces with places for their results, where each worker's begin (and the end), the number of slots.

    The pieces of a cut job have consecutive slots in the order of their units; an uncut job has none (0)."""
    parts: dict[int, list[Piece]] = {}
    for piece in sorted(p for pieces in lists for p in pieces):
        parts.setdefault(piece.job, []).append(piece)
    first, slots = {}, 0
    for job, pieces in parts.items():
        first[job] = slots if len(pieces) > 1 else 0
        slots += len(pieces) if len(pieces) > 1 else 0
    number = {piece: i for pieces in parts.values() for i, piece in enumerate(pieces)}
    found, starts = [], [0]
    for worker in lists:
        for piece in worker:
            begin = first[piece.job]
            found.append(Item(*piece, begin + number[piece], begin, len(parts[piece.job])))
        starts.append(len(found))
    return found, starts, slots


def _stream(units: Sequence[int], workers: int, overhead: float) -> Lists:
    """The smallest capacity for which filling one worker after the other uses no more than there are."""
    low, high = 1, sum(units) + math.ceil(overhead) * len(units) + 1
    while low < high:
        middle = (low + high) // 2
        if _fill(units, workers, middle, overhead) is None:
            low = middle + 1
        else:
            high = middle
    found = _fill(units, workers, low, overhead)
    assert found is not None, "one worker holds everything"
    return found


def _fill(units: Sequence[int], workers: int, capacity: int, overhead: float) -> Lists | None:
    lists: Lists = [[]]
    left = float(capacity)
    for job, count in enumerate(units):
        at = 0
        while at < count or not count:
            room = math.floor(left - overhead)
            if room < min(1, count) and lists[-1]:
                if len(lists) == workers:
                    return None
                lists.append([])
                left = float(capacity)
                continue
            take = min(count - at, max(1, room))
            lists[-1].append(Piece(job, at, at + take))
            left -= take + overhead
            at += take
            if not count:
                break
    return lists


def _even(units: Sequence[int], workers: int, overhead: float, join: float) -> Lists:
    """Equal parts of at most so many units, longest first to the least busy worker; the best such limit."""
    longest, total = max(1, *units), sum(units)
    target = max(1, math.ceil(total / workers))
    limits = {math.ceil(longest / n) for n in range(1, min(longest, 2 * workers) + 1)}
    limits = {limit for limit in limits if limit >= target / 4} or {longest}
    wanted = sorted(limits, key=lambda limit: abs(math.log(limit / target)))[:24] + [longest]
    return min(
        (_deal(units, workers, limit, overhead, join) for limit in wanted),
        key=lambda lists: (makespan(units, lists, overhead, join), sum(map(len, lists))),
    )


def _deal(units: Sequence[int], workers: int, limit: int, overhead: float, join: float) -> Lists:
    pieces = [piece for job, count in enumerate(units) for piece in _parts(job, count, limit)]
    pieces.sort(key=lambda p: (p.begin - p.end, p))
    busy = [(0.0, worker) for worker in range(workers)]
    heapify(busy)
    lists: Lists = [[] for _ in range(workers)]
    for piece in pieces:
        done, worker = busy[0]
        lists[worker].append(piece)
        size = piece.end - piece.begin
        cost = size + overhead + (0.0 if size == units[piece.job] else join)
        heapreplace(busy, (done + cost, worker))
    return lists


def _parts(job: int, count: int, limit: int) -> Iterable[Piece]:
    parts = max(1, math.ceil(count / limit))
    edges = [count * i // parts for i in range(parts + 1)]
    return [Piece(job, begin, end) for begin, end in pairwise(edges)]


@dataclass(frozen=True)
class Span:
    """What a job is: sequence ``row`` of ``tokens`` tokens, from ``head`` on; ``size`` is its length in
    tokens (or in blocks of them), cut at multiples of ``unit``."""

    row: int
    head: int
    tokens: int
    size: int
    unit: int = 1

    @property
    def units(self) -> int:
        """Units, the last one perhaps not whole."""
        return -(-self.size // self.unit)


def pack_items(spans: Sequence[Span], found: Sequence[Item]) -> bytes:
    """The items as decode.cuh reads them: eight int32 each."""
    rows = []
    for item in found:
        span = spans[item.job]
        begin, end = item.begin * span.unit, min(item.end * span.unit, span.size)
        rows.append(
            struct.pack(
                "<8i", span.row, span.head, begin, end, item.slot, item.first, item.parts, span.tokens
            )
        )
    return b"".join(rows)
