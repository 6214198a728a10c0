"""Strategies that walk a space under a budget, behind one ask/tell interface.

A strategy sees candidates as opaque, in the order in which the planner ranked them (the author's default,
then seeds, then the rest of the space, each by estimated time where there is an estimate). It never sees a
GPU: the tuner compiles, checks and times what is asked for and tells the result. A budget counts configs;
timing one of them again costs none.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from dsl_bench.errors import UsageError, unknown
from dsl_bench.jobs import Candidate
from dsl_bench.records import Choice, ConfigDict

#: relative distance to the best median within which a trial counts as a near-tie: quick trials of one
#: kernel scatter by about one per cent
NEAR = 0.02
#: points that a strategy which learns asks for at a time
ROUND = 6
#: relative distance to the best median within which a trial may still win: a quick trial meets the chip at
#: its highest clocks, and under load configs of one kernel change places by some per cent
REACH = 0.05
#: what medians of a final's cold race scatter by
SCATTER = 0.003
#: how many of them race each other for the place, and how many near-ties the record keeps
FINALISTS, KEPT = 8, 5

#: a kernel's id and a config as text: what makes two points the same
Label = tuple[str, str]


def config_text(config: ConfigDict) -> str:
    """A config as text that does not depend on the order of its axes."""
    return json.dumps(config, sort_keys=True)


@dataclass(frozen=True)
class Point:
    """One candidate of one kernel. ``effort`` is the share of a trial's usual time that its timing gets."""

    kernel: str
    candidate: Candidate
    effort: float = 1.0

    @cached_property
    def label(self) -> Label:
        """What identifies the point whatever the effort."""
        return self.kernel, config_text(self.candidate.config)


@dataclass
class Result:
    """What a trial told: nanoseconds, or None where the point failed."""

    point: Point
    median_ns: float | None


class Strategy(Protocol):
    """ask() gives the next points to try (empty: finished); tell() gives back what they did."""

    def ask(self, n: int) -> list[Point]:
        """Up to ``n`` points that were not asked for before, or points to time again with another effort;
        an empty list ends the search."""
        ...

    def tell(self, results: Sequence[Result]) -> None:
        """The outcome of points that were asked for."""
        ...

    def prefer(self, labels: Sequence[Label]) -> None:
        """What did best on other cases, best first: to be tried right after the defaults."""
        ...


@dataclass
class Listed:
    """Goes through a fixed list: what exhaustive and random search have in common."""

    points: list[Point]
    results: list[Result] = field(default_factory=list)
    _asked: set[Label] = field(default_factory=set)

    def ask(self, n: int) -> list[Point]:
        """The next ``n`` of the list."""
        chunk = [p for p in self.points if p.label not in self._asked][:n]
        self._asked |= {p.label for p in chunk}
        return chunk

    def tell(self, results: Sequence[Result]) -> None:
        """Kept, though a fixed list learns nothing."""
        self.results += results

    def prefer(self, labels: Sequence[Label]) -> None:
        """Move the points with these labels up, right behind the defaults."""
        self.points = preferred(self.points, labels)


@dataclass
class Local:
    """Defaults, what did best on other cases, and seeds first; then one-axis neighbours of the best so far.

    Each round asks for at most ``ROUND`` points, so that the next learns from it. Where no neighbour is
    left it goes on with the smallest estimated time, or at random where nothing is estimated."""

    points: list[Point]
    seed: int
    results: list[Result] = field(default_factory=list)
    _asked: set[Label] = field(default_factory=set)
    _preferred: list[Label] = field(default_factory=list)

    def ask(self, n: int) -> list[Point]:
        """Seeds while there are any, then neighbours, then the likeliest of the rest."""
        fresh = [p for p in self.points if p.label not in self._asked]
        if self.results:
            chosen = self._next(fresh)[: min(n, ROUND)]
        else:
            wanted = set(self._preferred)
            first = [p for p in fresh if p.candidate.rank < 2 or p.label in wanted]
            chosen = preferred(first or fresh[:1], self._preferred)[:n]
        self._asked |= {p.label for p in chosen}
        return chosen

    def tell(self, results: Sequence[Result]) -> None:
        """Remember what was seen."""
        self.results += results

    def prefer(self, labels: Sequence[Label]) -> None:
        """Two of these at most are tried before the neighbours, in every round."""
        self._preferred = list(labels)

    def _next(self, fresh: Sequence[Point]) -> list[Point]:
        """Seeds that are left, hints from other cases, then neighbours."""
        by_label = {p.label: p for p in fresh}
        hints = [by_label[x] for x in self._preferred if x in by_label][:2]
        seeds = [p for p in fresh if p.candidate.rank < 2]
        return list({p.label: p for p in (*hints, *seeds, *self._neighbours(fresh))}.values())

    def _neighbours(self, fresh: Sequence[Point]) -> list[Point]:
        good = sorted((r for r in self.results if r.median_ns is not None), key=lambda r: r.median_ns or 0.0)
        shuffled = list(fresh)
        random.Random(self.seed + len(self.results)).shuffle(shuffled)
        shuffled.sort(key=_likeliness)
        order = {p.label: (len(good), 9, k) for k, p in enumerate(shuffled)}
        for place, result in enumerate(good[:3]):
            for k, point in enumerate(shuffled):
                steps = distance(result.point, point)
                if steps <= 2:
                    # a step away from the second best comes before two steps away from the best
                    order[point.label] = min(order[point.label], (place + 3 * (steps - 1), steps, k))
        return sorted(shuffled, key=lambda p: order[p.label])


def _likeliness(point: Point) -> float:
    """The estimated time; what nothing is known of comes last."""
    return point.candidate.estimate or float("inf")


def distance(one: Point, other: Point) -> int:
    """On how many axes two points of one kernel differ; a large number for two kernels."""
    if one.kernel != other.kernel:
        return 99
    a, b = one.candidate.config, other.candidate.config
    return sum(a[name] != b.get(name) for name in a)


def by_rank(points: Sequence[Point]) -> list[Point]:
    """Kernels take turns within a rank, each by estimated time, so that a small budget sees the default of
    each. Seeds keep their author's order."""
    position: dict[tuple[str, int], int] = {}
    keyed = []
    rest = sorted((p for p in points if p.candidate.rank >= 2), key=_likeliness)
    for index, point in enumerate([*(p for p in points if p.candidate.rank < 2), *rest]):
        slot = (point.kernel, point.candidate.rank)
        turn = position[slot] = position.get(slot, -1) + 1
        keyed.append((point.candidate.rank, turn, index, point))
    return [point for *_, point in sorted(keyed, key=lambda k: k[:3])]


def preferred(points: Sequence[Point], labels: Iterable[Label]) -> list[Point]:
    """``points`` with those that have these labels right behind the defaults."""
    order = {label: place for place, label in enumerate(labels)}
    defaults = [p for p in points if p.candidate.rank == 0]
    others = [p for p in points if p.candidate.rank != 0]
    hinted = sorted((p for p in others if p.label in order), key=lambda p: order[p.label])
    return [*defaults, *hinted, *(p for p in others if p.label not in order)]


def exhaustive(points: Sequence[Point], seed: int, trials: int) -> Strategy:
    """every config, the likeliest first"""
    return Listed(by_rank(points))


def random_search(points: Sequence[Point], seed: int, trials: int) -> Strategy:
    """defaults and seeds first, then the rest in a random order"""
    ordered = by_rank(points)
    known = [p for p in ordered if p.candidate.rank < 2]
    rest = [p for p in ordered if p.candidate.rank >= 2]
    random.Random(seed).shuffle(rest)
    return Listed(known + rest)


def local_search(points: Sequence[Point], seed: int, trials: int) -> Strategy:
    """defaults and seeds, then neighbours of the best"""
    return Local(by_rank(points), seed)


def halving(points: Sequence[Point], seed: int, trials: int) -> Strategy:
    """the whole budget timed shortly, the better third of it longer, and so on"""
    from dsl_bench.halving import Halving

    return Halving(by_rank(points), trials)


def optuna_search(points: Sequence[Point], seed: int, trials: int) -> Strategy:
    """Optuna's TPE sampler (needs the extra `optuna`)"""
    from dsl_bench.optuna_search import OptunaSearch

    return OptunaSearch(by_rank(points), seed)


class Maker(Protocol):
    """Makes a strategy over points for a budget of ``trials`` configs; its docstring is what --help says."""

    def __call__(self, points: Sequence[Point], seed: int, trials: int) -> Strategy:
        """The strategy."""
        ...


STRATEGIES: dict[str, Maker] = {
    "exhaustive": exhaustive,
    "random": random_search,
    "local": local_search,
    "halving": halving,
    "optuna": optuna_search,
}
#: strategies that need a package of their own
NEEDS = {"optuna": "optuna"}


def describe() -> str:
    """Every strategy with what it does, for ``--help``."""
    return "; ".join(f"{name}: {make.__doc__}" for name, make in STRATEGIES.items())


def available() -> list[str]:
    """The strategies whose packages are installed."""
    return [n for n in STRATEGIES if n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None]


def require(name: str) -> None:
    """Raises UsageError for a strategy that does not exist or lacks its package."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        others = ", ".join(n for n in STRATEGIES if n not in NEEDS)
        raise UsageError(
            f"strategy {name} needs the package {NEEDS[name]}: pip install 'dsl-bench[{name}]' "
            f"(without it: {others})"
        )


def make_strategy(name: str, points: Sequence[Point], seed: int, trials: int = 1 << 30) -> Strategy:
    """The strategy called ``name`` for a budget of ``trials`` configs; raises UsageError as
    :func:`require` does."""
    require(name)
    return STRATEGIES[name](points, seed, trials)


def best_results(results: Iterable[Result]) -> list[Result]:
    """One result a point, that of the longest timing (the latest of equals), in the order of first sight."""
    held: dict[Label, Result] = {}
    for result in results:
        known = held.get(result.point.label)
        if known is None or result.point.effort >= known.point.effort:
            held[result.point.label] = result
    return list(held.values())


def near_ties(results: Sequence[Result], limit: int = KEPT, within: float = NEAR) -> list[Result]:
    """The results within ``within`` of the best, best first, at most ``limit``."""
    good = [r for r in best_results(results) if r.median_ns is not None]
    good.sort(key=lambda r: r.median_ns or 0.0)
    if not good:
        return []
    best = good[0].median_ns or 0.0
    return [r for r in good if (r.median_ns or 0.0) <= best * (1 + within)][:limit]


def finalists(results: Sequence[Result]) -> list[Result]:
    """The results that race each other for the place, best first."""
    return near_ties(results, FINALISTS, REACH)


def final_order(colds: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Finalists' numbers, best first, by the worse of what each loses to the fastest of the cold and of the
    sustained race: a report counts a case at its lower regime. SCATTER of a cold loss is free. ``colds`` and
    ``loads`` are medians in one unit; equal losses are ordered by the load."""
    fastest, steadiest = min(colds), min(loads)

    def loss(number: int) -> tuple[float, float]:
        cold, load = colds[number] / fastest - 1 - SCATTER, loads[number] / steadiest - 1
        return max(cold, load), load

    return sorted(range(len(loads)), key=loss)


def kept(choices: Sequence[Choice]) -> list[Choice]:
    """Of choices in their final order, best first: the winner and its near-ties."""
    best = choices[0].median_ns or 0.0
    return [c for c in choices if (c.median_ns or 0.0) <= best * (1 + NEAR)][:KEPT]
