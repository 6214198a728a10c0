"""Searches winners: compiles ahead in the pool, tries on the device, lets near-ties race for the place.

Every case goes at its own pace: the device takes whichever has all its artifacts ready, so that a compiler
that hangs holds up one contender on one case.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from dsl_bench import jobs, strategies
from dsl_bench.contest import Contender, Contest, Memory, TrialKey
from dsl_bench.jobs import Built
from dsl_bench.records import CaseRef, Choice, Failure, Trial, Tuned
from dsl_bench.session import Session, done_value
from dsl_bench.strategies import Label, Listed, Point, Result, Strategy
from dsl_bench.transfer import Lessons
from dsl_bench.trials import Bench

#: seconds that the device idles before it goes over to a case of which not all is ready: its buffers and the
#: reference will have to be made again for the others
PATIENCE = 0.5


@dataclass
class _Search:
    """One contender's search on one case. ``asked`` is what it waits for, ``told`` what is known of the same
    round already, ``round`` their order."""

    case: CaseRef
    rival: Contender
    strategy: Strategy
    space: int
    budget: int
    #: the place of its case: earlier ones are compiled first
    turn: int
    asked: list[Point] = field(default_factory=list)
    told: list[Result] = field(default_factory=list)
    round: dict[Label, int] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    retimed: int = 0
    compile_seconds: dict[str, float] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    gpu_seconds: float = 0.0
    revisits: str = ""
    settled: bool = False

    @property
    def tried(self) -> int:
        """How many configs."""
        return len(self.results) - self.retimed

    def book(self, point: Point, trial: Trial) -> Result:
        """The result of a trial, its cost booked."""
        self.gpu_seconds += trial.seconds
        if trial.status != "ok":
            self.failures[trial.status] += 1
        return Result(point, trial.median_ns if trial.status == "ok" else None)

    def tell(self) -> None:
        """Hand a whole round to the strategy, in the order in which it was asked for."""
        results, self.told = sorted(self.told, key=lambda r: self.round[r.point.label]), []
        seen = {r.point.label for r in self.results}
        self.retimed += sum(r.point.label in seen for r in results)
        self.results += results
        self.strategy.tell(results)


class Tuner:
    """One search over the cases of one workload; winners go to ``memory``."""

    def __init__(
        self,
        session: Session,
        contest: Contest,
        memory: Memory,
        workload: str,
        gpu: str,
        driver: str = "",
    ) -> None:
        self.session = session
        self.contest = contest
        self.memory = memory
        self.workload = workload
        self.gpu = gpu
        self.driver = driver
        self.bench = Bench(session, workload)
        self.lessons = Lessons()
        self.unfinished: list[str] = []
        self.failed = 0
        self._idle_since = time.monotonic()
        #: the case whose buffers the device holds
        self._held = ""

    def search(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], trials: int, again: bool = False
    ) -> None:
        """Find a winner for every case and contender that has none (or for all, with ``again``)."""
        for tuned in self.memory.tuned.values():
            head = tuned.near[0]
            self.lessons.learn(
                tuned.contender, tuned.case, (head.kernel, strategies.config_text(head.config))
            )
        active = list(self._searches(cases, rivals, trials, again))
        total = len(active)
        for search in active:
            self._ask(search)
        self._idle_since = time.monotonic()
        while active := self._unsettled(active, trials):
            self.session.show.advance("tuned", max(0, total - len(active)), total)
            if self.session.clock.over():
                self._out_of_time(active)
                return
            batch = self._batch(active)
            if batch:
                self._try(batch)
                self._idle_since = time.monotonic()
            else:
                self._wait()
        self.session.show.advance("tuned", total, total)

    # -- which searches there are ---------------------------------------------------------------------

    def _searches(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], trials: int, again: bool
    ) -> Iterator[_Search]:
        for turn, case in enumerate(cases):
            for rival in rivals:
                slot = (case.name, rival.name)
                held = self.memory.tuned.get(slot)
                # what was found without pruning may be no candidate with it
                if held and not again and self.contest.point_of(case, rival, held.near[0]):
                    continue
                if slot not in self.memory.pruned:
                    self.contest.record_pruned(case, rival)
                self.session.purse.of(rival.backend).pruned += self.contest.pruned(case, rival)
                revisit = None if again else self._revisit(case, rival, turn)
                if revisit is not None:
                    yield revisit
                elif self.contest.points(case, rival):
                    yield self._full(case, rival, trials, turn)
                else:
                    self.contest.refuse(case, rival)

    def _full(self, case: CaseRef, rival: Contender, trials: int, turn: int) -> _Search:
        points = self.contest.points(case, rival)
        settings = self.session.settings
        strategy = strategies.make_strategy(settings.strategy, points, settings.seed, trials)
        return _Search(case, rival, strategy, len(points), trials, turn)

    def _revisit(self, case: CaseRef, rival: Contender, turn: int) -> _Search | None:
        """The near-ties of a winner that was found under other conditions, in place of the whole space."""
        held = self.memory.stale.get((case.name, rival.name))
        if held is None:
            return None
        tuned, differs = held
        found = [self.contest.point_of(case, rival, c) for c in tuned.near[: strategies.KEPT]]
        points = [p for p in found if p is not None]
        if not points:
            return None
        text = f"recorded winner is not of here ({differs}): its {len(points)} near-ties raced again"
        return _Search(case, rival, Listed(points), len(points), len(points), turn, revisits=text)

    # -- asking and waiting ---------------------------------------------------------------------------

    def _ask(self, search: _Search) -> None:
        """Ask for the next round and have it compiled; what a resumed run knows already is told at once."""
        while True:
            search.strategy.prefer(self.lessons.hints(search.rival.name, search.case))
            asked = search.strategy.ask(max(0, search.budget - search.tried))
            known = [(p, self.memory.trials.get(_key(search.case, p))) for p in asked]
            search.round = {p.label: place for place, p in enumerate(asked)}
            search.told = [search.book(p, trial) for p, trial in known if trial is not None]
            search.asked = [p for p, trial in known if trial is None]
            if search.asked or not asked:
                break
            search.tell()
        for point in search.asked:
            self.session.compile(point.kernel, point.candidate, search.turn)

    def _unsettled(self, searches: Sequence[_Search], trials: int) -> list[_Search]:
        """Settles what has nothing more to ask, and returns the rest; a revisit in vain becomes a search."""
        left = []
        for search in searches:
            if search.asked:
                left.append(search)
                continue
            self._settle(search)
            if search.revisits and (search.case.name, search.rival.name) not in self.memory.tuned:
                full = self._full(search.case, search.rival, trials, search.turn)
                self._ask(full)
                left.append(full)
        return left

    def _ready(self, search: _Search) -> list[Point]:
        return [p for p in search.asked if self.session.built(p.candidate.key) is not None]

    def _batch(self, active: Sequence[_Search]) -> list[_Search]:
        """The searches of one case that the device can take now, as far as they are ready: of the case that
        it is at, else of one that is ready as a whole, or, rather than idle on, of one that is in part."""
        groups: dict[str, list[_Search]] = {}
        for search in active:
            groups.setdefault(search.case.name, []).append(search)
        ready = {name: [s for s in group if self._ready(s)] for name, group in groups.items()}
        if ready.get(self._held):
            return ready[self._held]
        for name, group in groups.items():
            if all(len(self._ready(s)) == len(s.asked) for s in group):
                return ready[name]
        if len(groups) > 1 and time.monotonic() - self._idle_since <= PATIENCE:
            return []
        return next((found for found in ready.values() if found), [])

    def _wait(self) -> None:
        done, asked = self.session.progress()
        self.session.show.advance("compiled", done, asked)
        self.session.wait_built(lambda: False, 0.2)

    # -- trying and settling --------------------------------------------------------------------------

    def _try(self, searches: Sequence[_Search]) -> None:
        """What is ready of one case's searches on the device; a round that is complete is followed by the
        next."""
        owners = [(s, p) for s in searches for p in self._ready(s)]
        choices = [(p, self.contest.choice(p)) for _, p in owners]
        self._held = searches[0].case.name
        for (search, point), trial in zip(owners, self.bench.run(searches[0].case, choices), strict=True):
            built = self.session.built(point.candidate.key)
            if isinstance(built, Built):
                search.compile_seconds[built.key] = built.seconds
            search.asked.remove(point)
            if trial is not None:
                search.told.append(search.book(point, trial))
        for search in searches:
            if search.asked:
                continue
            search.tell()
            near = strategies.near_ties(search.results, 1)
            if near:
                self.lessons.learn(search.rival.name, search.case, near[0].point.label)
            if not self.session.clock.over():
                self._ask(search)

    def _out_of_time(self, searches: Sequence[_Search]) -> None:
        self.unfinished += dict.fromkeys(f"tune {s.case.name}" for s in searches)
        for search in searches:
            search.tell()
            if search.results:
                self._settle(search, "seconds")

    def _settle(self, search: _Search, bound: str = "") -> None:
        search.settled = True
        near = strategies.finalists(search.results)
        if not bound:
            bound = "trials" if search.tried >= search.budget else "strategy"
            bound = "space" if search.tried >= search.space else bound
        self.session.purse.bounds[bound] += 1
        if not near:
            self._all_failed(search)
            return
        choices = [self.contest.choice(r.point, r.median_ns or 0.0) for r in near]
        regret = 0.0
        if len(choices) > 1 and self._built(near):
            choices, regret = self._finals(search.case, choices)
        choices = strategies.kept(choices)
        built = self.session.built(choices[0].key)
        tuned = Tuned(
            run_id=self.session.run_id,
            case=search.case,
            contender=search.rival.name,
            strategy="recorded" if search.revisits else self.session.settings.strategy,
            near=choices,
            trials=search.tried,
            failed=sum(r.median_ns is None for r in strategies.best_results(search.results)),
            pruned=self.contest.pruned(search.case, search.rival),
            compile_seconds=sum(search.compile_seconds.values()),
            gpu_seconds=search.gpu_seconds,
            bound=bound,
            gpu=self.gpu,
            regret=regret,
            driver=self.driver,
            toolchain=built.toolchain if isinstance(built, Built) else "",
            retimed=search.retimed,
            failures=dict(search.failures),
            revisits=search.revisits,
        )
        self.session.sink.write(tuned)
        self.memory.tuned[search.case.name, search.rival.name] = tuned
        self.lessons.learn(search.rival.name, search.case, near[0].point.label)

    def _built(self, near: Sequence[Result]) -> bool:
        """Wait for the near-ties' artifacts, which a resumed run may not have asked for; False when out of
        time."""
        for result in near:
            if self.session.built(result.point.candidate.key) is None:
                self.session.compile(result.point.kernel, result.point.candidate, -1)
        keys = {r.point.candidate.key for r in near}
        while not self.session.clock.over():
            if all(self.session.built(k) is not None for k in keys):
                return all(isinstance(self.session.built(k), Built) for k in keys)
            self._wait()
        return False

    def _finals(self, case: CaseRef, choices: list[Choice]) -> tuple[list[Choice], float]:
        job = jobs.FinalJob(
            self.session.run_id,
            self.session.workload_origin(self.workload),
            case,
            [self.session.racer(c) for c in choices],
            seed=self.session.settings.seed,
        )
        outcome = self.session.on_device(job, self.session.sink.write)
        if outcome.done is None:
            return choices, 0.0
        cold, medians = done_value(outcome.done, tuple[list[float], list[float]])
        order = strategies.final_order(cold, medians)
        ranked = [msgspec.structs.replace(choices[i], median_ns=medians[i]) for i in order]
        return ranked, medians[0] / medians[order[0]] - 1.0

    def _all_failed(self, search: _Search) -> None:
        if search.revisits:
            return  # the whole space is searched next
        self.failed += search.rival.role == "language"
        status = search.failures.most_common(1)[0][0] if search.failures else "incorrect"
        self.session.sink.write(
            Failure(
                self.session.run_id,
                search.case.workload,
                search.case.name,
                search.rival.backend,
                search.rival.name if search.rival.role == "vendor" else "",
                status,
                "trial",
                f"none of {search.tried} configs held; see the trials",
            )
        )


def _key(case: CaseRef, point: Point) -> TrialKey:
    kernel, text = point.label
    return case.name, kernel, point.candidate.key, text, round(point.effort, 6)
