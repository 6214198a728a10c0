"""Searches winners: compiles ahead in the pool, tries on the device, lets near-ties race for the place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from dsl_bench import jobs, strategies
from dsl_bench.contest import Contender, Contest, Memory
from dsl_bench.jobs import Built, Racer, Refused
from dsl_bench.records import CaseRef, Choice, Failure, Record, Trial, Tuned
from dsl_bench.session import Session, done_value
from dsl_bench.strategies import Point, Result, Strategy


@dataclass
class _Search:
    """One contender's search on one case."""

    case: CaseRef
    rival: Contender
    strategy: Strategy
    space: int
    asked: list[Point] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    settled: bool = False
    gpu_seconds: float = 0.0


class Tuner:
    """One search over the cases of one workload; winners go to ``memory``."""

    def __init__(self, session: Session, contest: Contest, memory: Memory, workload: str, gpu: str) -> None:
        self.session = session
        self.contest = contest
        self.memory = memory
        self.workload = workload
        self.gpu = gpu
        self.unfinished: list[str] = []
        self.failed = 0

    def search(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], trials: int, again: bool = False
    ) -> None:
        """Find a winner for every case and contender that has none (or for all, with ``again``).

        Goes over all cases in rounds, so that the pool compiles what one case asked for while others run."""
        searches = list(self._searches(cases, rivals, again))
        total = len({s.case.name for s in searches})
        while searches:
            for priority, search in enumerate(searches):
                search.asked = search.strategy.ask(trials - len(search.results))
                for point in search.asked:
                    self.session.compile(point.kernel, point.candidate, priority)
            if not self._round(searches, trials):
                for search in searches:
                    if search.results and not search.settled:
                        self._settle(search, "seconds")
                return
            searches = [s for s in searches if not s.settled]
            self.session.show.advance("tuned", total - len({s.case.name for s in searches}), total)

    def _round(self, searches: Sequence[_Search], trials: int) -> bool:
        """Try what every search asked for, case by case as artifacts become ready; False when out of time."""
        waiting = list(dict.fromkeys(s.case.name for s in searches))
        total = len(waiting)
        while waiting:
            if self.session.clock.over():
                self.unfinished += [f"tune {name}" for name in waiting]
                return False
            name = next((n for n in waiting if self._ready(n, searches)), None)
            if name is None:
                self._wait(waiting, searches)
                continue
            waiting.remove(name)
            self._tune_case([s for s in searches if s.case.name == name], trials)
            self.session.show.advance("tried", total - len(waiting), total)
        return True

    def _searches(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], again: bool
    ) -> Iterator[_Search]:
        settings = self.session.settings
        for case in cases:
            for rival in rivals:
                if (case.name, rival.name) in self.memory.tuned and not again:
                    continue
                points = self.contest.points(case, rival)
                if not points:
                    self.contest.refuse(case, rival)
                    continue
                strategy = strategies.make_strategy(settings.strategy, points, settings.seed)
                yield _Search(case, rival, strategy, len(points))

    def _ready(self, name: str, searches: Sequence[_Search]) -> bool:
        keys = {p.candidate.key for s in searches if s.case.name == name for p in s.asked}
        return all(self.session.built(k) is not None for k in keys)

    def _wait(self, waiting: Sequence[str], searches: Sequence[_Search]) -> None:
        done, asked = self.session.progress()
        self.session.show.advance("compiled", done, asked)
        self.session.wait_built(lambda: any(self._ready(n, searches) for n in waiting[:1]))

    def _tune_case(self, searches: Sequence[_Search], trials: int) -> None:
        case = searches[0].case
        racers: list[Racer] = []
        owners: list[tuple[_Search, Point]] = []
        told: dict[int, list[Result]] = {id(s): [] for s in searches}
        for search in searches:
            for point in search.asked:
                built = self.session.built(point.candidate.key)
                if isinstance(built, Built):
                    search.compile_seconds[built.key] = built.seconds
                    racers.append(self.session.racer(self.contest.choice(point)))
                    owners.append((search, point))
                elif built is not None:
                    self._record_refused(search, point, built)
                    told[id(search)].append(Result(point, None))
        for (search, point), trial in zip(owners, self._run_trials(case, racers), strict=True):
            if trial is not None:
                told[id(search)].append(Result(point, trial.median_ns if trial.status == "ok" else None))
                search.gpu_seconds += trial.seconds
        for search in searches:
            search.results += told[id(search)]
            search.strategy.tell(told[id(search)])
            if not search.asked or len(search.results) >= min(trials, search.space):
                self._settle(search)

    def _record_refused(self, search: _Search, point: Point, built: Refused) -> None:
        choice = self.contest.choice(point)
        self.session.sink.write(
            Trial(
                self.session.run_id,
                search.case,
                choice.kernel,
                choice.kernel_hash,
                choice.config,
                built.status,
                choice.key,
                reason=built.reason,
            )
        )

    def _run_trials(self, case: CaseRef, racers: list[Racer]) -> list[Trial | None]:
        """One trial a racer, in order; a racer that kills the worker gets its verdict, the rest go on."""
        found: list[Trial | None] = [None] * len(racers)
        start = 0
        settings = self.session.settings
        while start < len(racers) and not self.session.clock.over():
            batch = racers[start:]
            got: list[Trial] = []

            def keep(record: Record, got: list[Trial] = got) -> None:
                self.session.sink.write(record)
                if isinstance(record, Trial):
                    got.append(record)

            job = jobs.TrialsJob(
                self.session.run_id,
                self.session.workload_origin(self.workload),
                case,
                batch,
                settings.trial_seconds,
                settings.seed,
            )
            outcome = self.session.on_device(job, keep)
            found[start : start + len(got)] = got
            start += len(got)
            if outcome.done is not None:
                break
            assert outcome.refused is not None
            if start < len(racers):
                trial = self._failed_trial(case, racers[start], outcome.refused)
                self.session.sink.write(trial)
                found[start] = trial
                start += 1
        return found

    def _failed_trial(self, case: CaseRef, racer: Racer, refused: Refused) -> Trial:
        c = racer.choice
        return Trial(
            self.session.run_id,
            case,
            c.kernel,
            c.kernel_hash,
            c.config,
            refused.status,
            c.key,
            check=refused.check,
            reason=refused.reason,
        )

    def _settle(self, search: _Search, bound: str = "") -> None:
        search.settled = True
        near = strategies.near_ties(search.results)
        if not near:
            self._all_failed(search)
            return
        choices = [self.contest.choice(r.point, r.median_ns or 0.0) for r in near]
        regret = 0.0
        if len(choices) > 1 and not self.session.clock.over():
            choices, regret = self._finals(search.case, choices)
        tuned = Tuned(
            run_id=self.session.run_id,
            case=search.case,
            contender=search.rival.name,
            strategy=self.session.settings.strategy,
            near=choices,
            trials=len(search.results),
            failed=sum(r.median_ns is None for r in search.results),
            pruned=self.contest.pruned(search.case, search.rival),
            compile_seconds=sum(search.compile_seconds.values()),
            gpu_seconds=search.gpu_seconds,
            bound=bound or ("space" if len(search.results) == search.space else "trials"),
            gpu=self.gpu,
            regret=regret,
        )
        self.session.sink.write(tuned)
        self.memory.tuned[search.case.name, search.rival.name] = tuned

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
        medians: list[float] = done_value(outcome.done, list[float])
        order = sorted(range(len(choices)), key=lambda i: medians[i])
        ranked = [msgspec.structs.replace(choices[i], median_ns=medians[i]) for i in order]
        return ranked, medians[0] / medians[order[0]] - 1.0

    def _all_failed(self, search: _Search) -> None:
        self.failed += search.rival.role == "language"
        self.session.sink.write(
            Failure(
                self.session.run_id,
                search.case.workload,
                search.case.name,
                search.rival.backend,
                "",
                "incorrect",
                "trial",
                f"none of {len(search.results)} configs held; see the trials",
            )
        )
