"""One run's machinery: the compile pool, the one device worker, the GPU's lock, the results file.

Compiling happens on all cores with CUDA hidden, feeding one device worker that checks and times. Everything
here survives a worker's death: the verdict is recorded and a fresh worker goes on with the rest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dsl_bench import jobs
from dsl_bench.catalog import Catalog, cache_dir
from dsl_bench.errors import DslBenchError, RecordError
from dsl_bench.headstart import HeadStart
from dsl_bench.jobs import (
    Built,
    Candidate,
    Done,
    Included,
    Origin,
    Partial,
    Planned,
    Progress,
    Racer,
    Refused,
)
from dsl_bench.pool import Outcome, Pool, Worker
from dsl_bench.pruning import SMEM_LIMIT
from dsl_bench.records import CaseRef, Choice, Compiled, Failure, Record
from dsl_bench.spending import Purse

COMPILE_SECONDS = 300.0
#: longest silence of the device worker: the slowest step is a float64 reference of the largest case
DEVICE_SECONDS = 60.0


class Sink(Protocol):
    """Where records go: each is on disk when ``write`` returns."""

    def write(self, record: Record) -> None:
        """Append one record."""
        ...


@dataclass
class Progressor:
    """What a long command shows on stderr; the CLI replaces the methods."""

    say: Callable[[str], None] = lambda text: None
    advance: Callable[[str, int, int], None] = lambda what, done, total: None


@dataclass
class Settings:
    """How a run is done."""

    arch: str = "sm_90a"
    trials: int = 8
    trial_seconds: float = 0.02
    race_seconds: float = 1.5
    strategy: str = "random"
    seed: int = 0
    data: str = "normal"
    processes: int = 1
    deadline: float = DEVICE_SECONDS
    compile_deadline: float = COMPILE_SECONDS
    time_limit: float | None = None
    #: False: what the kernels and the compiled code's facts would refuse is tried as well
    prune: bool = True
    compile_workers: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) - 1))


class Clock:
    """The time limit of the whole command."""

    def __init__(self, limit: float | None) -> None:
        self.start = time.monotonic()
        self._limit = limit

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def over(self) -> bool:
        """Whether the limit has passed."""
        return self._limit is not None and self.elapsed() >= self._limit


class Session:
    """Holds workers and futures; closed by ``with``."""

    def __init__(
        self,
        catalog: Catalog,
        sink: Sink,
        run_id: str,
        settings: Settings,
        show: Progressor,
        head: HeadStart | None = None,
    ) -> None:
        self.catalog = catalog
        self.sink = sink
        self.run_id = run_id
        self.settings = settings
        self.show = show
        self.clock = Clock(settings.time_limit)
        self.head = head or HeadStart()
        self.device = self.head.device
        self.ledger: dict[str, float] = {}
        self.compile_seconds: dict[str, float] = {}
        self.hits = 0
        self.misses = 0
        self.cached = 0
        self.purse = Purse()
        self.started: dict[str, int] = {}
        self._sent: set[str] = set()
        #: bytes of shared memory that a block may use on the device
        self.smem_limit = SMEM_LIMIT
        self._preloaded = False
        self._unplannable: set[tuple[str, str]] = set()
        self._pool: Pool | None = None
        self._built: dict[str, Built | Refused] = {}
        self._asked: set[str] = set()
        self._fault: DslBenchError | None = None
        self._changed = threading.Condition()
        #: set where nobody waits for plans any more
        self.stop = threading.Event()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.stop()
        self.head.close()
        if self._pool is not None:
            self._pool.close()

    # -- starting -------------------------------------------------------------------------------------

    def preload(self, backends: Sequence[str]) -> None:
        """Let the pool and the device worker import what they will need, while planning goes on here."""
        if self._preloaded:
            return
        self._preloaded = True
        held = self.catalog.backends()
        infos = [held[n] for n in backends if held[n][1].role == "language"]
        origins = tuple(origin for origin, _ in infos)
        self.head.warm(jobs.PreloadJob(()), self.settings.deadline, "context made")
        extra = self.catalog.extra if origins else ()
        self.head.warm(jobs.PreloadJob(origins, extra), self.settings.deadline, "device ready")
        alone = tuple(origin for origin, info in infos if info.ahead)
        self.head.nursery.open(alone)
        together = tuple(origin for origin in origins if origin not in alone)
        for group in [*((origin,) for origin in alone), *([together] if together else [])]:
            job = jobs.PreloadJob(group, self.catalog.extra)
            for _ in range(self.settings.compile_workers):
                self._compilers().submit(job, COMPILE_SECONDS, lambda outcome: None, -1)

    def _compilers(self) -> Pool:
        if self._pool is None:
            hidden = {"CUDA_VISIBLE_DEVICES": ""}
            self._pool = Pool("compile", self.settings.compile_workers, hidden, self.head.nursery)
        return self._pool

    # -- planning -------------------------------------------------------------------------------------

    def plan(
        self,
        backend: str,
        cases: Sequence[CaseRef],
        limit: int,
        kernels: Sequence[str] = (),
        include: Sequence[Included] = (),
    ) -> list[Planned]:
        """What ``backend`` can do on ``cases``; ``limit`` and ``include`` as in :class:`jobs.PlanJob`."""
        origin, _ = self.catalog.backend(backend)
        job = jobs.PlanJob(
            origin,
            self.catalog.extra,
            tuple(kernels),
            list(cases),
            self.settings.arch,
            limit,
            self.settings.seed,
            list(include),
            self.workload_origin(cases[0].workload) if cases else None,
            self.settings.prune,
        )
        worker = Worker("describe", zygote=self.head.nursery.of(origin))
        try:
            outcome = worker.run(job, COMPILE_SECONDS, stop=self.stop)
        finally:
            worker.kill()
        if outcome.done is not None:
            planned = msgspec.json.decode(outcome.done.value, type=list[Planned])
        else:
            assert outcome.refused is not None
            if self.stop.is_set():
                return []
            planned = self._unplanned(backend, cases, kernels, outcome.refused.reason)
        self.head.latest("planned")
        known = self.catalog.hashes()
        return [self._noted(p, known) for p in planned]

    def _unplanned(
        self, backend: str, cases: Sequence[CaseRef], kernels: Sequence[str], reason: str
    ) -> list[Planned]:
        """Every kernel of a backend whose plan failed as a whole, with that as the reason."""
        ours = [k for k in self.catalog.kernels().values() if k.id.startswith(f"{backend}/")]
        return [
            Planned(k.id, c, [], f"cannot be planned: {reason}", fault=True)
            for k in ours
            for c in cases
            if k.workload == c.workload and (not kernels or k.id in kernels)
        ]

    def _noted(self, planned: Planned, known: dict[str, str]) -> Planned:
        """A kernel that cannot be planned is a recorded failure and costs only itself."""
        if planned.kernel not in known:
            reason = "is not in its backend's description: see dsl-bench list"
            planned = Planned(planned.kernel, planned.case, [], reason, fault=True)
        if planned.fault and (planned.kernel, planned.case.name) not in self._unplannable:
            self._unplannable.add((planned.kernel, planned.case.name))
            name, case = planned.kernel.partition("/")[0], planned.case
            failure = Failure(
                self.run_id,
                case.workload,
                case.name,
                name,
                planned.kernel,
                "invalid_config",
                "plan",
                planned.reason,
            )
            with self._changed:
                self.sink.write(failure)
        return planned

    @property
    def plan_failures(self) -> int:
        """How many kernels could not even be planned on a case."""
        return len(self._unplannable)

    # -- compiling ------------------------------------------------------------------------------------

    def compile(self, kernel: str, candidate: Candidate, priority: int = 0) -> None:
        """Ask for an artifact; once a key, however many cases share it."""
        with self._changed:
            if candidate.key in self._asked:
                self.hits += 1
                return
            self._asked.add(candidate.key)
        origin, _ = self.catalog.backend(kernel.partition("/")[0])
        job = jobs.CompileJob(
            origin,
            self.catalog.extra,
            kernel,
            candidate.key,
            candidate.static,
            self.settings.arch,
            str(self.folder(candidate.key)),
        )
        self._compilers().submit(
            job, self.settings.compile_deadline, lambda outcome: self._compiled(job, outcome), priority
        )

    def folder(self, key: str) -> Path:
        """Where the artifact with ``key`` lies, or will."""
        return cache_dir() / "artifacts" / key

    def _compiled(self, job: jobs.CompileJob, outcome: Outcome) -> None:
        refused = outcome.refused
        if refused is not None and refused.check == "interrupt":
            return
        if refused is not None and refused.check == "start":
            with self._changed:
                self._fault = DslBenchError(refused.reason)
                self._changed.notify_all()
            return
        result: Built | Refused
        if outcome.done is not None:
            result = msgspec.json.decode(outcome.done.value, type=Built)
        else:
            assert refused is not None
            result = refused
        record = self._compile_record(job, result)
        with self._changed:
            backend = job.kernel.partition("/")[0]
            if record.cached:
                self.cached += 1
            else:
                self.compile_seconds[backend] = self.compile_seconds.get(backend, 0.0) + record.seconds
                self.misses += 1
                tally = self.purse.of(backend)
                tally.compiled += 1
                tally.compile_seconds += record.seconds
            try:
                self.sink.write(record)
            except RecordError as fault:
                # in a thread of the pool nobody would hear of it: raised where the run waits
                self._fault = fault
            self.head.mark("first artifact")
            self.head.latest("last artifact")
            self._built[job.key] = result
            self._changed.notify_all()

    def _compile_record(self, job: jobs.CompileJob, result: Built | Refused) -> Compiled:
        kernel_hash = self.catalog.hashes().get(job.kernel, "")
        base = Compiled(self.run_id, job.key, job.kernel, kernel_hash, job.arch, job.static, "ok", 0.0)
        if isinstance(result, Built):
            return msgspec.structs.replace(
                base,
                seconds=result.seconds,
                facts=result.facts,
                toolchain=result.toolchain,
                cached=result.cached,
            )
        return msgspec.structs.replace(base, status=result.status, reason=result.reason)

    def built(self, key: str) -> Built | Refused | None:
        """What became of an artifact; None while it is under way."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            return self._built.get(key)

    def wait_built(self, ready: Callable[[], bool], seconds: float = 1.0) -> None:
        """Sleep until ``ready()`` or something was built, at most ``seconds``."""
        with self._changed:
            if not ready():
                self._changed.wait(seconds)

    def progress(self) -> tuple[int, int]:
        """Artifacts finished, and asked for."""
        with self._changed:
            return len(self._built), len(self._asked)

    # -- the device -----------------------------------------------------------------------------------

    def racer(self, choice: Choice) -> Racer:
        """A choice made ready for the device worker."""
        name = choice.kernel.partition("/")[0]
        origin, info = self.catalog.backend(name)
        version = ", ".join(f"{k} {v}" for k, v in sorted(info.versions.items()))
        return Racer(origin, self.catalog.extra, info.role, choice, str(self.folder(choice.key)), version)

    def on_device(self, job: jobs.Job, on_partial: Callable[[Record], None]) -> Outcome:
        """Run one job on the device worker; its ledger is added to the run's."""

        def hear(reply: Progress | Partial) -> None:
            if isinstance(reply, Partial):
                on_partial(reply.record)
            else:
                self.show.say(reply.stage)

        self._sent |= {r.choice.key for r in getattr(job, "racers", ())}
        device = self.head.settled()
        self.head.mark(f"first {job_name(job)}")
        outcome = device.run(job, self.settings.deadline, hear)
        self.head.latest(f"last {job_name(job)}")
        if outcome.done is not None:
            for name, seconds in outcome.done.ledger.items():
                self.ledger[name] = self.ledger.get(name, 0.0) + seconds
            for name, count in outcome.done.started.items():
                self.started[name] = self.started.get(name, 0) + count
        return outcome

    @property
    def loaded(self) -> int:
        """How many artifacts the device worker was given."""
        return len(self._sent)

    def fresh_device(self) -> None:
        """End the device worker; the next job starts another one."""
        self.head.settled().kill()

    def workload_origin(self, name: str) -> Origin:
        """Where the workload called ``name`` comes from."""
        return self.catalog.workload(name)[0]


def job_name(job: jobs.Job) -> str:
    """A job of the device as a timeline calls it."""
    return type(job).__name__.removesuffix("Job").lower()


def done_value(done: Done, kind: Any) -> Any:
    """A job's result as the type that the job implies."""
    return msgspec.json.decode(done.value, type=kind)
