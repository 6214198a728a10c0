"""One case's races on the device: who may enter, who races whom, and whether all still hold afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from dsl_bench import check, jobs, timing
from dsl_bench.arena import AFTER_BIND, AFTER_RACE, BEFORE_BIND, Arena, Bound
from dsl_bench.artifacts import from_ref
from dsl_bench.errors import KernelFault
from dsl_bench.jobs import Partial, Progress
from dsl_bench.records import Race, Regime

if TYPE_CHECKING:
    from dsl_bench.bench import Bench

#: below this share of the fastest, a participant races apart: it would cool the chip for its betters
APART = 0.8
#: what a record takes over from the timer's result as it is
FROM_RESULT = (
    "samples",
    "timer",
    "calls",
    "clock_mhz",
    "power_w",
    "throttle",
    "dropped",
    "foreign",
    "gaps",
    "retries",
    "proven",
    "chunk",
    "null_ns",
    "notes",
)


class RaceTrack:
    """Carries out one RaceJob. Records are sent after the last check, so that none has to be taken back."""

    def __init__(self, bench: Bench, job: jobs.RaceJob) -> None:
        self.bench = bench
        self.job = job
        self.case = from_ref(job.case)
        self.arena: Arena = bench.arena(bench.shelf.workload(job.workload), self.case, job.seed)
        self.people = [jobs.participant(r) for r in job.racers]
        self.quick: dict[int, float] = {}

    def run(self) -> int:
        """The number of races held."""
        self.bench.draw(self.arena, BEFORE_BIND, self.job.data)
        bound = self._enter()
        if not bound:
            for regime in self.job.regimes:
                self._publish(self._record(regime, None, [], 0.0), {})
            return 0
        with self.bench.watch("time"):
            self.quick = {b.index: timing.quick(b.runs(), 0.01)[0] for b in bound}
        bound = self._held_to_vendor(bound)
        races = []
        for regime in self.job.regimes:
            for group in self._groups(bound, regime):
                races.append(self._race(group, regime))
        broken = self._check_again(bound)
        for race in races:
            self._publish(race, broken)
        return len(races)

    def _enter(self) -> list[Bound]:
        """Bind all, redraw, check all on outliers and on the race's data; those that hold may race."""
        bound: list[Bound] = []
        for index, racer in enumerate(self.job.racers):
            self.bench.send(Progress(f"binding {racer.choice.kernel} on {self.case.name}", index))
            try:
                bound.append(self.bench.bind(self.arena, racer, index))
            except Exception as fault:
                self.people[index] = self.bench.verdict(self.people[index], fault)
        for data in ("outliers", self.job.data):
            self.bench.draw(self.arena, AFTER_BIND, data, first_only=data != self.job.data)
            bound = [b for b in bound if self._holds(b, AFTER_BIND, data)]
        return bound

    def _holds(self, bound: Bound, version: int, data: str) -> bool:
        index, person = bound.index, self.people[bound.index]
        self.bench.send(Progress(f"checking {person.kernel} on {self.case.name}", index))
        try:
            accuracy = self.bench.check(self.arena, bound.calls[0], version, data, bound.racer.role)
        except Exception as fault:
            self.people[index] = self.bench.verdict(person, fault)
            return False
        self.people[index] = msgspec.structs.replace(
            person, accuracy=[*person.accuracy, accuracy], allocates=bound.calls[0].allocates
        )
        return True

    def _held_to_vendor(self, bound: list[Bound]) -> list[Bound]:
        """Those whose errors are within bounds of the fastest vendor kernel's, where that counts."""
        vendors = [b for b in bound if b.racer.role == "vendor"]
        if self.arena.workload.bound.yardstick != "vendor" or not vendors:
            return bound
        best = min(vendors, key=lambda b: self.quick[b.index])
        yards = {a.data: a for a in self.people[best.index].accuracy}
        held = []
        for b in bound:
            person = self.people[b.index]
            try:
                for accuracy in person.accuracy if b.racer.role != "vendor" else ():
                    check.hold_to(person.kernel, accuracy, yards[accuracy.data], self.arena.workload.bound)
            except KernelFault as fault:
                self.people[b.index] = self.bench.verdict(person, fault)
                continue
            held.append(b)
        return held

    def _groups(self, bound: Sequence[Bound], regime: Regime) -> list[list[Bound]]:
        """Who races whom: equals together; each that is far slower, alone with the baselines.

        The cold regime leaves gaps, so nobody cools the chip for anybody and all race together."""
        if regime == "cold":
            return [list(bound)]
        fastest = min(self.quick.values())
        slow = [b for b in bound if b.racer.role != "vendor" and fastest < APART * self.quick[b.index]]
        vendors = [b for b in bound if b.racer.role == "vendor"]
        equals = [b for b in bound if b not in slow]
        together = [equals] if not slow or any(b.racer.role != "vendor" for b in equals) else []
        return together + [[*vendors, b] for b in slow]

    def _race(self, group: list[Bound], regime: Regime) -> Race:
        self.bench.send(Progress(f"racing {self.case.name} {regime}"))
        start = time.monotonic()
        vendors = [b for b in group if b.racer.role == "vendor"]
        best = min(vendors or group[:1], key=lambda b: self.quick[b.index])
        twin = self.bench.bind(self.arena, best.racer, best.index)
        with self.bench.watch("time"):
            entered = [*group, twin]
            runs = [b.runs() for b in entered]
            seconds, seed = self.job.seconds, self.job.seed
            if regime == "cold":
                result = timing.race_cold(runs, seconds=seconds, seed=seed)
            else:
                result = timing.race_sustained(runs, seconds=seconds, seed=seed, prove=self._proof(entered))
        for b, host in zip(group, result.host_us, strict=False):
            self.people[b.index] = msgspec.structs.replace(self.people[b.index], host_us=host)
        race = self._record(regime, result, [b.index for b in group], time.monotonic() - start)
        copy = msgspec.structs.replace(self.people[best.index], role="aa")
        people = [*race.participants, copy]
        return msgspec.structs.replace(race, participants=people, racers=[*race.racers, len(people) - 1])

    def _proof(self, entered: Sequence[Bound]) -> timing.Prove:
        """That a captured graph holds its kernel: its outputs were poisoned, and are written by a replay."""

        def prove(racer: int, sets: Sequence[int], replay: Callable[[], object]) -> None:
            bound = entered[racer]
            if bound.calls[0].allocates:
                return  # its outputs live in the graph's own memory; the plausibility check still holds
            outputs = [self.arena.sets[s].outputs for s in sorted(set(sets))]
            for tensors in outputs:
                check.poison(tensors)
            replay()
            self.bench.synchronize()
            check.assert_written(outputs, bound.racer.choice.kernel)

        return prove

    def _record(
        self, regime: Regime, result: timing.RaceResult | None, racers: list[int], seconds: float
    ) -> Race:
        workload, case = self.arena.workload, self.case
        race = Race(
            run_id=self.job.run_id,
            case=self.job.case,
            regime=regime,
            process=self.job.process,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            participants=list(self.people),
            racers=racers,
            samples=[],
            timer="",
            calls=0,
            flops=workload.flops(case),
            bytes=workload.bytes(case),
            data=self.job.data,
            seconds=seconds,
        )
        if result is None:
            return race
        return msgspec.structs.replace(
            race,
            **{name: getattr(result, name) for name in FROM_RESULT},
        )

    def _check_again(self, bound: Sequence[Bound]) -> dict[int, str]:
        """Fresh values after the race: who fails now, and why."""
        self.bench.draw(self.arena, AFTER_RACE, self.job.data, first_only=True)
        broken = {}
        for b in bound:
            if not self._holds(b, AFTER_RACE, self.job.data):
                broken[b.index] = f"held before the race, not after it: {self.people[b.index].reason}"
        return broken

    def _publish(self, race: Race, broken: dict[int, str]) -> None:
        """Send a race; whoever broke stays listed, without samples."""
        people = list(race.participants)
        for index, reason in broken.items():
            people[index] = msgspec.structs.replace(
                people[index], status="unstable", check="after", reason=reason
            )
        keep = [place for place, index in enumerate(race.racers) if index not in broken]
        record = msgspec.structs.replace(
            race,
            participants=people,
            racers=[race.racers[k] for k in keep],
            samples=[race.samples[k] for k in keep] if race.samples else [],
        )
        self.bench.send(Partial(record))
