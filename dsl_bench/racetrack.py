"""One case's races on the device: who may enter, who races whom, and whether all still hold afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from dsl_bench import check, fence, jobs, stream, timing
from dsl_bench.arena import AFTER_BIND, AFTER_RACE, BEFORE_BIND, Arena, Bound
from dsl_bench.artifacts import from_ref
from dsl_bench.errors import KernelFault
from dsl_bench.jobs import Partial, Progress
from dsl_bench.records import Race, Regime

if TYPE_CHECKING:
    from dsl_bench.bench import Bench

#: below this share of the fastest, a participant races apart: it would cool the chip for its betters
APART = 0.8
#: seconds between two signs of life of a race
HEARTBEAT_SECONDS = 1.0
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
        bound = self._held_to_vendor([b for b in bound if self._timed(b)])
        if not bound:
            for regime in self.job.regimes:
                self._publish(self._record(regime, None, [], 0.0), {})
            return 0
        races = []
        for regime in self.job.regimes:
            for group in self._groups(bound, regime):
                races.append(self._race_of_able(group, regime))
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

    def _timed(self, bound: Bound) -> bool:
        """Time one racer by itself for a moment: what it does then is nobody else's doing."""
        index, person = bound.index, self.people[bound.index]
        self.bench.send(Progress(f"timing {person.kernel} on {self.case.name}", index))
        data = self.job.data
        try:
            with self.bench.alone(self.arena, bound, data), self.bench.watch("time"):
                prove = self.bench.proof(self.arena, [bound], data)
                self.quick[index] = timing.quick(bound.runs(), 0.01, prove=prove)[0]
            self.bench.plausible(self.arena, self.quick[index])
        except Exception as fault:
            self.people[index] = self.bench.verdict(person, fault)
            return False
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

    def _race_of_able(self, group: list[Bound], regime: Regime) -> Race:
        """The race of a group, without those that cannot be captured where the others need it."""
        try:
            return self._race(group, regime)
        except KernelFault:
            able = [b for b in group if self._captures(b)]
            if not able or len(able) == len(group):
                raise
            return self._race(able, regime)

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
            beat = self._heart(f"racing {self.case.name} {regime}")
            prove = self.bench.proof(self.arena, entered, self.job.data)
            if regime == "cold":
                result = timing.race_cold(runs, seconds=seconds, seed=seed, beat=beat)
            else:
                result = timing.race_sustained(runs, seconds=seconds, seed=seed, prove=prove, beat=beat)
        for b, host in zip(group, result.host_us, strict=False):
            self.people[b.index] = msgspec.structs.replace(self.people[b.index], host_us=host)
        race = self._record(regime, result, [b.index for b in group], time.monotonic() - start)
        copy = msgspec.structs.replace(self.people[best.index], role="aa")
        people = [*race.participants, copy]
        return msgspec.structs.replace(race, participants=people, racers=[*race.racers, len(people) - 1])

    def _captures(self, bound: Bound) -> bool:
        """Whether a racer can be captured in a graph, which alone it may not need."""
        prove = self.bench.proof(self.arena, [bound], self.job.data)
        spent = self.quick[bound.index]
        try:
            with self.bench.watch("time"):
                # as long on the host as on the device: that is what asks for a graph
                stream.units(timing.cuda(), [bound.runs()], [stream.Cost(spent, spent)], prove)
        except Exception as fault:
            self.people[bound.index] = self.bench.verdict(self.people[bound.index], fault)
            return False
        return True

    def _heart(self, stage: str) -> Callable[[], None]:
        """Tells the parent, once in a while, that a race is alive: 15 rounds of calls of 20 ms and their idle
        gaps are a quarter of a minute, and a deadline is the longest silence."""
        last = time.monotonic()

        def beat() -> None:
            nonlocal last
            if time.monotonic() - last > HEARTBEAT_SECONDS:
                last = time.monotonic()
                self.bench.send(Progress(stage))

        return beat

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
        fence.assert_whole(self.arena.fences())
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
