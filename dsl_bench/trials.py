"""One case's trials on the device worker: every config that was asked for gets exactly one verdict.

A config that kills the worker, or keeps it silent past its deadline, is a row like any other, and a fresh
worker goes on with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dsl_bench import jobs
from dsl_bench.jobs import Built, Racer, Refused
from dsl_bench.pruning import facts_reason
from dsl_bench.records import CaseRef, Choice, Record, Trial
from dsl_bench.session import Session
from dsl_bench.strategies import Point

#: how often a worker may fail before its first candidate until the rest gets that verdict untried
MOST_FALSE_STARTS = 2


class Bench:
    """Runs trials of one workload and records them."""

    def __init__(self, session: Session, workload: str) -> None:
        self.session = session
        self.workload = workload

    def run(self, case: CaseRef, choices: Sequence[tuple[Point, Choice]]) -> list[Trial | None]:
        """One trial a choice, in order; None where the time limit came first. What was not built or is not
        worth a try gets its verdict here."""
        found: list[Trial | None] = [None] * len(choices)
        efforts: dict[float, list[int]] = {}
        for index, (point, choice) in enumerate(choices):
            refused = self._refused(choice.key)
            if refused is None:
                efforts.setdefault(point.effort, []).append(index)
            else:
                found[index] = self._keep(point, self._verdict(case, choice, refused))
        for effort, members in sorted(efforts.items()):
            trials = self._batch(case, [choices[i] for i in members], effort)
            for index, trial in zip(members, trials, strict=True):
                found[index] = trial
        return found

    def _refused(self, key: str) -> Refused | None:
        built = self.session.built(key)
        if not isinstance(built, Built):
            return built or Refused("compile_error", "was never compiled", "pool")
        reason = facts_reason(built.facts, self.session.smem_limit) if self.session.settings.prune else ""
        return Refused("invalid_config", reason, "facts") if reason else None

    def _batch(
        self, case: CaseRef, choices: Sequence[tuple[Point, Choice]], effort: float
    ) -> list[Trial | None]:
        """Trials of one effort; a config that kills the worker gets its verdict, the rest goes on."""
        racers = [self.session.racer(choice) for _, choice in choices]
        found: list[Trial] = []
        false_starts = 0
        while len(found) < len(racers) and not self.session.clock.over():
            before = len(found)
            refused, index = self._job(case, racers[before:], choices[before:], effort, found)
            if refused is None or len(found) == len(racers):
                break
            # a worker that fails before its first candidate says nothing about that candidate
            false_starts += 1 if index < 0 and len(found) == before else 0
            if index < 0 and len(found) == before and false_starts < MOST_FALSE_STARTS:
                continue
            hopeless = false_starts >= MOST_FALSE_STARTS
            for point, choice in choices[len(found) :][: None if hopeless else 1]:
                found.append(self._keep(point, self._verdict(case, choice, refused)))
        return [*found, *[None] * (len(racers) - len(found))]

    def _job(
        self,
        case: CaseRef,
        racers: Sequence[Racer],
        choices: Sequence[tuple[Point, Choice]],
        effort: float,
        found: list[Trial],
    ) -> tuple[Refused | None, int]:
        """One job; appends its trials to ``found``. Returns how it failed, if so, and the candidate it was at
        (-1: none yet)."""
        waiting = iter(choices)

        def keep(record: Record) -> None:
            if isinstance(record, Trial):
                found.append(self._keep(next(waiting)[0], record))
            else:
                self.session.sink.write(record)

        job = jobs.TrialsJob(
            self.session.run_id,
            self.session.workload_origin(self.workload),
            case,
            list(racers),
            self.session.settings.trial_seconds * effort,
            self.session.settings.seed,
        )
        outcome = self.session.on_device(job, keep)
        return outcome.refused, outcome.last.index

    def _verdict(self, case: CaseRef, c: Choice, refused: Refused) -> Trial:
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

    def _keep(self, point: Point, trial: Trial) -> Trial:
        """Write a trial down with what was known of its config before."""
        c = point.candidate
        pruned = c.refused
        if not self.session.settings.prune and not pruned:
            built = self.session.built(c.key)
            pruned = facts_reason(built.facts, self.session.smem_limit) if isinstance(built, Built) else ""
        trial = msgspec.structs.replace(
            trial, rank=c.rank, estimate=round(c.estimate, 3), effort=point.effort, pruned=pruned
        )
        self.session.sink.write(trial)
        self.session.purse.of(trial.kernel.partition("/")[0]).book(trial)
        return trial
