"""Carries out a run over the cases of one workload: tune what has no winner, then race, case by case.

The unit that survives is one record: everything already recorded (by this run before it was cut off, or by
the results that ship with the project) is used and not done again.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsl_bench import jobs
from dsl_bench.contest import Contender, Contest, Memory
from dsl_bench.jobs import Built, Racer, Refused
from dsl_bench.records import CaseRef, Failure, Ledger, Participant, Race, Record, Regime
from dsl_bench.session import Session
from dsl_bench.tuner import Tuner


class Runner:
    """One run over the cases of one workload."""

    def __init__(self, session: Session, workload: str, memory: Memory, gpu: str, driver: str = "") -> None:
        self.session = session
        self.workload = workload
        self.memory = memory
        self.contest = Contest(session)
        self.tuner = Tuner(session, self.contest, memory, workload, gpu, driver)
        self.unfinished: list[str] = []
        self.failed = 0
        self.held = 0

    def prepare(self, cases: Sequence[CaseRef], rivals: Sequence[Contender], limit: int) -> list[Contender]:
        """Plan; returns the contenders that can run here, the others are recorded as skipped."""
        return self.contest.prepare(cases, rivals, limit, self.memory)

    def tune(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], trials: int, again: bool = False
    ) -> None:
        """Find a winner for every case and contender that has none (or for all, with ``again``)."""
        self.tuner.search(cases, rivals, trials, again)
        self.unfinished += self.tuner.unfinished
        self.failed += self.tuner.failed

    def race(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], regimes: Sequence[Regime], processes: int
    ) -> None:
        """Race every case; once a process, each time in a fresh worker."""
        total = len(cases) * processes
        for number in range(processes):
            self.session.fresh_device()
            for index, case in enumerate(cases):
                if self.session.clock.over():
                    self.unfinished += [f"race {c.name} (process {number})" for c in cases[index:]]
                    break
                todo = tuple(r for r in regimes if (case.name, r, str(number)) not in self.memory.raced)
                if todo:
                    self._race_case(case, rivals, todo, str(number))
                self.session.show.advance("raced", number * len(cases) + index + 1, total)

    def _entrants(self, case: CaseRef, rivals: Sequence[Contender]) -> list[Racer]:
        racers = []
        for rival in rivals:
            tuned = self.memory.tuned.get((case.name, rival.name))
            if tuned is None:
                continue
            point = self.contest.point_of(case, rival, tuned.near[0])
            if point is not None:
                racers.append(self.session.racer(self.contest.choice(point)))
        return racers

    def prefetch(self, cases: Sequence[CaseRef], rivals: Sequence[Contender]) -> None:
        """Have every recorded winner's artifact built, and wait for it."""
        keys = set()
        for priority, case in enumerate(cases):
            for rival in rivals:
                tuned = self.memory.tuned.get((case.name, rival.name))
                point = tuned and self.contest.point_of(case, rival, tuned.near[0])
                if point:
                    self.session.compile(point.kernel, point.candidate, priority)
                    keys.add(point.candidate.key)
        while not self.session.clock.over() and any(self.session.built(k) is None for k in keys):
            self.session.show.advance("compiled", *self.session.progress())
            self.session.wait_built(lambda: all(self.session.built(k) is not None for k in keys))

    def _race_case(
        self, case: CaseRef, rivals: Sequence[Contender], regimes: tuple[Regime, ...], process: str
    ) -> None:
        racers = [
            r for r in self._entrants(case, rivals) if isinstance(self.session.built(r.choice.key), Built)
        ]
        settings = self.session.settings
        while racers:
            job = jobs.RaceJob(
                self.session.run_id,
                self.session.workload_origin(self.workload),
                case,
                regimes,
                racers,
                settings.race_seconds,
                settings.data,
                settings.seed + int(process),
                process,
            )
            outcome = self.session.on_device(job, self._keep_race)
            if outcome.done is not None:
                return
            assert outcome.refused is not None
            index = outcome.last.index
            culprit = racers[index] if 0 <= index < len(racers) else None
            self._record_race_failure(case, culprit, outcome.refused)
            if culprit is None:
                return
            racers = [r for r in racers if r is not culprit]

    def _keep_race(self, record: Record) -> None:
        self.session.sink.write(record)
        if isinstance(record, Race):
            bad = [p for p in record.participants if p.status != "ok"]
            self.failed += sum(p.role == "language" for p in bad)
            self.held += len(record.racers)

    def _record_race_failure(self, case: CaseRef, racer: Racer | None, refused: Refused) -> None:
        self.failed += 1
        base = jobs.participant(racer) if racer else Participant("", "", "", {})
        self.session.sink.write(
            Failure(
                self.session.run_id,
                case.workload,
                case.name,
                base.backend,
                base.kernel,
                refused.status,
                "race",
                refused.reason,
                base.config,
                refused.check,
            )
        )

    def finish(self) -> None:
        """Write the run's ledger: what its workloads spent so far, together."""
        s = self.session
        self.session.sink.write(
            Ledger(
                s.run_id,
                dict(s.ledger),
                dict(s.compile_seconds),
                s.hits,
                s.misses,
                s.clock.elapsed(),
                self.unfinished,
                s.cached,
                s.loaded,
                dict(s.purse.bounds),
                s.purse.spent(),
                dict(s.started),
                s.head.timeline(),
            )
        )
