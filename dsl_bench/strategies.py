"""Strategies that walk a space under a budget, behind one ask/tell interface.

A strategy sees candidates as opaque, in the order in which the planner ranked them (the author's default,
then seeds, then the rest of the space). It never sees a GPU: the runner compiles, checks and times what is
asked for and tells the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsl_bench.errors import unknown
from dsl_bench.jobs import Candidate

#: relative distance to the best median within which a trial counts as a near-tie: quick trials of one
#: kernel scatter by about one per cent
NEAR = 0.02
#: points that local search asks for at a time
ROUND = 6
#: how many near-ties race each other for the place
FINALISTS = 4


@dataclass(frozen=True)
class Point:
    """One candidate of one kernel."""

    kernel: str
    candidate: Candidate


@dataclass
class Result:
    """What a trial told: nanoseconds, or None where the point failed."""

    point: Point
    median_ns: float | None


class Strategy(Protocol):
    """ask() gives the next points to try (empty: finished); tell() gives back what they did."""

    def ask(self, n: int) -> list[Point]:
        """Up to ``n`` further points; an empty list ends the search."""
        ...

    def tell(self, results: Sequence[Result]) -> None:
        """The outcome of points that were asked for."""
        ...


@dataclass
class Listed:
    """Goes through a fixed list: what exhaustive and random search have in common."""

    points: list[Point]
    results: list[Result] = field(default_factory=list)
    _next: int = 0

    def ask(self, n: int) -> list[Point]:
        """The next ``n`` of the list."""
        chunk = self.points[self._next : self._next + n]
        self._next += len(chunk)
        return chunk

    def tell(self, results: Sequence[Result]) -> None:
        """Kept, though a fixed list learns nothing."""
        self.results += results


def exhaustive(points: Sequence[Point], seed: int) -> Strategy:
    """Every point, in the planner's order."""
    return Listed(by_rank(points))


def random_search(points: Sequence[Point], seed: int) -> Strategy:
    """Defaults and seeds first, then the rest in a seeded random order."""
    ordered = by_rank(points)
    known = [p for p in ordered if p.candidate.rank < 2]
    rest = [p for p in ordered if p.candidate.rank >= 2]
    random.Random(seed).shuffle(rest)
    return Listed(known + rest)


@dataclass
class Local:
    """Defaults and seeds first, then one-axis neighbours of the best so far, best kernel first.

    Each round asks for at most ``ROUND`` points, so that the next learns from it."""

    points: list[Point]
    seed: int
    results: list[Result] = field(default_factory=list)
    _asked: set[int] = field(default_factory=set)

    def ask(self, n: int) -> list[Point]:
        """Seeds while there are any, then neighbours; a random point where no neighbour is left."""
        fresh = [p for p in self.points if id(p) not in self._asked]
        known = [p for p in fresh if p.candidate.rank < 2]
        chosen = known[:n] if not self.results else self._neighbours(fresh)[: min(n, ROUND)]
        self._asked |= {id(p) for p in chosen}
        return chosen

    def tell(self, results: Sequence[Result]) -> None:
        """Remember what was seen."""
        self.results += results

    def _neighbours(self, fresh: Sequence[Point]) -> list[Point]:
        good = sorted((r for r in self.results if r.median_ns is not None), key=lambda r: r.median_ns or 0.0)
        shuffled = list(fresh)
        random.Random(self.seed + len(self.results)).shuffle(shuffled)
        order = {id(p): (len(good), 9, k) for k, p in enumerate(shuffled)}
        for place, result in enumerate(good[:3]):
            for k, point in enumerate(shuffled):
                steps = distance(result.point, point)
                if steps <= 2:
                    # a step away from the second best comes before two steps away from the best
                    order[id(point)] = min(order[id(point)], (place + 3 * (steps - 1), steps, k))
        return sorted(shuffled, key=lambda p: order[id(p)])


def distance(one: Point, other: Point) -> int:
    """On how many axes two points of one kernel differ; a large number for two kernels."""
    if one.kernel != other.kernel:
        return 99
    a, b = one.candidate.config, other.candidate.config
    return sum(a[name] != b.get(name) for name in a)


def local_search(points: Sequence[Point], seed: int) -> Strategy:
    """Seeds, then neighbours of the best."""
    return Local(by_rank(points), seed)


def by_rank(points: Sequence[Point]) -> list[Point]:
    """Kernels take turns within a rank, so that a small budget sees the default of each."""
    position: dict[tuple[str, int], int] = {}
    keyed = []
    for index, point in enumerate(points):
        slot = (point.kernel, point.candidate.rank)
        turn = position[slot] = position.get(slot, -1) + 1
        keyed.append((point.candidate.rank, turn, index, point))
    return [point for *_, point in sorted(keyed, key=lambda k: k[:3])]


STRATEGIES: dict[str, Callable[[Sequence[Point], int], Strategy]] = {
    "exhaustive": exhaustive,
    "random": random_search,
    "local": local_search,
}


def make_strategy(name: str, points: Sequence[Point], seed: int) -> Strategy:
    """The strategy called ``name``; raises UsageError for an unknown one."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name](points, seed)


def near_ties(results: Sequence[Result], limit: int = FINALISTS) -> list[Result]:
    """The results within ``NEAR`` of the best, best first, at most ``limit``."""
    good = sorted((r for r in results if r.median_ns is not None), key=lambda r: r.median_ns or 0.0)
    if not good:
        return []
    best = good[0].median_ns or 0.0
    return [r for r in good if (r.median_ns or 0.0) <= best * (1 + NEAR)][:limit]
