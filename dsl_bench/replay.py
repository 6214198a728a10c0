"""Strategies against recorded trials: how much of the budget a search needs, without a GPU.

The space of a replay is what was recorded: the configs that one contender tried on one case, with the times
they took. A strategy is told a recorded time instead of a measured one. So a replay shows in what order a
strategy finds what was recorded, not what it would have found beyond; and since a search chose what was
recorded, good configs are more frequent there than in the whole space. ``chance`` says what that alone is
worth: the share of the trials that a blind order needs.

Trials of several runs count as one space where GPU, case and kernel source are the same; a config that was
timed several times has the median. What earlier records do not say is taken for nothing: the first config of
each kernel counts as its default, the others come in a random order.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dsl_bench import frames, strategies
from dsl_bench.jobs import Candidate
from dsl_bench.records import CaseRef, Record, RunHeader, Trial
from dsl_bench.strategies import Label, Point, Result
from dsl_bench.transfer import Lessons

#: shares of the recorded trials at which the quality is shown
SHARES = (0.10, 0.25, 0.50, 1.0)
#: what counts as found
GOOD = 0.98
#: fewer recorded configs than this make no search
LEAST = 4
#: orders and samplers differ by seed: medians over these
SEEDS = tuple(range(5))


@dataclass(frozen=True)
class Space:
    """All recorded trials of one contender on one case: ``times`` in ns by label, None for failed ones."""

    case: CaseRef
    contender: str
    points: list[Point]
    times: dict[Label, float | None]
    vendor: bool = False

    @property
    def best(self) -> float:
        """The best recorded time, ns."""
        return min(t for t in self.times.values() if t is not None)

    @property
    def chance(self) -> float:
        """The share of the trials after which a blind order is expected to have met a good one."""
        good = sum(t is not None and t * GOOD <= self.best for t in self.times.values())
        return (len(self.times) + 1) / (good + 1) / len(self.times)


@dataclass(frozen=True)
class Walk:
    """One strategy's way through one space. ``quality[i]`` is best recorded over best found time after i + 1
    configs, 0 before the first that held; ``reached`` is the share of the configs at which it is
    ``GOOD``."""

    space: Space
    strategy: str
    seed: int
    quality: list[float]

    @property
    def reached(self) -> float:
        """Share of the recorded configs until ``GOOD``; 1 where the budget ended before."""
        for index, quality in enumerate(self.quality):
            if quality >= GOOD:
                return (index + 1) / len(self.space.times)
        return 1.0

    def at(self, share: float) -> float:
        """The quality after ``share`` of the recorded configs, at least one."""
        index = max(1, int(share * len(self.space.times))) - 1
        return self.quality[min(index, len(self.quality) - 1)] if self.quality else 0.0


def spaces(found: Iterable[Record], gpu: str = "") -> list[Space]:
    """The recorded trials as spaces, in the order of their cases; those of vendor kernels among them.

    Where a kernel's source changed between runs, the later source's trials count alone. With ``gpu`` only
    those of that GPU, else of the GPU with the most trials."""
    records = list(found)
    gpus = {r.run_id: str(r.environment.get("gpu", "")) for r in records if isinstance(r, RunHeader)}
    trials = [r for r in records if isinstance(r, Trial)]
    counts: dict[str, int] = defaultdict(int)
    for trial in trials:
        counts[gpus.get(trial.run_id, "")] += 1
    chosen = gpu or max(counts, key=lambda name: counts[name], default="")
    trials = [t for t in trials if gpus.get(t.run_id, "") == chosen]
    latest = {t.kernel: t.kernel_hash for t in trials}
    libraries = frames.libraries(records)
    table: dict[tuple[str, str, str, bool], list[Trial]] = {}
    for trial in trials:
        if latest[trial.kernel] == trial.kernel_hash:
            backend = trial.kernel.partition("/")[0]
            contender = trial.kernel if backend in libraries else backend
            slot = (trial.case.workload, trial.case.name, contender, backend in libraries)
            table.setdefault(slot, []).append(trial)
    made = [_space(rows, contender, vendor) for (*_, contender, vendor), rows in table.items()]
    return [s for s in made if len(s.points) >= LEAST and any(t is not None for t in s.times.values())]


def _space(rows: Sequence[Trial], contender: str, vendor: bool) -> Space:
    longest: dict[Label, list[Trial]] = {}
    for trial in rows:
        label = (trial.kernel, strategies.config_text(trial.config))
        held = longest.setdefault(label, [])
        if held and trial.effort > held[0].effort:
            held.clear()
        if not held or trial.effort == held[0].effort:
            held.append(trial)
    times: dict[Label, float | None] = {}
    points = []
    seen: set[str] = set()
    for label, trials in longest.items():
        held_times = [t.median_ns for t in trials if t.status == "ok"]
        times[label] = statistics.median(held_times) if 2 * len(held_times) > len(trials) else None
        first = trials[0]
        rank = first.rank if first.rank >= 0 else 2 if first.kernel in seen else 0
        seen.add(first.kernel)
        points.append(Point(first.kernel, Candidate(first.config, first.key, {}, rank, first.estimate)))
    return Space(rows[0].case, contender, points, times, vendor)


def walk(
    space: Space, name: str, seed: int = 0, trials: int = 0, hints: Sequence[Label] = ()
) -> tuple[Walk, Label | None]:
    """Let a strategy search a space with a budget of ``trials`` configs (0: all). Also returns the best
    label found. Ranks and estimates are as recorded; what is of one rank and not estimated comes in a random
    order."""
    points = list(space.points)
    random.Random(seed).shuffle(points)
    budget = min(trials or len(points), len(points))
    strategy = strategies.make_strategy(name, points, seed, budget)
    strategy.prefer(hints)
    quality: list[float] = []
    seen: set[Label] = set()
    best: tuple[float, Label] | None = None
    while asked := strategy.ask(budget - len(seen)):
        told = [Result(p, space.times[p.label]) for p in asked]
        for result in told:
            label = result.point.label
            if label in seen:
                continue
            seen.add(label)
            if result.median_ns is not None and (best is None or result.median_ns < best[0]):
                best = (result.median_ns, label)
            quality.append(space.best / best[0] if best else 0.0)
        strategy.tell(told)
    return Walk(space, name, seed, quality), best[1] if best else None


def run(
    found: Sequence[Space],
    names: Sequence[str],
    trials: int = 0,
    seeds: Sequence[int] = SEEDS,
    transfer: bool = True,
) -> list[Walk]:
    """Every strategy on every space with every seed, the cases in their order: with ``transfer`` each search
    is told what did best on the cases before."""
    walks = []
    for name in names:
        for seed in seeds:
            lessons = Lessons()
            for space in found:
                hints = lessons.hints(space.contender, space.case) if transfer else []
                done, best = walk(space, name, seed, trials, hints)
                walks.append(done)
                if best is not None:
                    lessons.learn(space.contender, space.case, best)
    return walks


def rows(walks: Sequence[Walk]) -> list[dict[str, Any]]:
    """A row for every workload, group, contender and strategy, and one for all of a strategy's.

    ``reached`` is the median share of the recorded configs until 98 % of the best, ``within`` the share of
    the searches that were there after a quarter; ``q10`` … the median quality at that share; ``chance``
    what a blind order needs."""
    table: dict[tuple[str, str, str, str], list[Walk]] = {}
    for done in walks:
        case = done.space.case
        for group in [g for g in case.groups if g != "quick"] or ["-"]:
            table.setdefault((case.workload, group, done.space.contender, done.strategy), []).append(done)
    for done in walks:
        table.setdefault(("all", "-", "-", done.strategy), []).append(done)
    return [_row(*key, members) for key, members in table.items()]


def _row(workload: str, group: str, contender: str, strategy: str, walks: Sequence[Walk]) -> dict[str, Any]:
    found = {id(w.space): w.space for w in walks}.values()
    reached = [w.reached for w in walks]
    row: dict[str, Any] = {
        "workload": workload,
        "group": group,
        "contender": contender,
        "strategy": strategy,
        "cases": len(found),
        "configs": round(statistics.median(len(s.times) for s in found)),
        "reached": round(statistics.median(reached), 3),
        "within": round(sum(r <= 0.25 for r in reached) / len(reached), 3),
        "chance": round(statistics.median(s.chance for s in found), 3),
    }
    for share in SHARES:
        row[f"q{share * 100:.0f}"] = round(statistics.median(w.at(share) for w in walks), 3)
    return row
