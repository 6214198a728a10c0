"""The device worker's work: check, trial, final, and (in :mod:`dsl_bench.racetrack`) race. Needs torch.

Order of every check: inputs drawn, kernel bound, inputs redrawn in place, outputs poisoned, one run,
outputs against float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from dsl_bench import check, jobs, registry, timing
from dsl_bench.arena import AFTER_BIND, BEFORE_BIND, Arena, Bound, Stopwatch, sets_needed
from dsl_bench.artifacts import from_ref, one_line, read_manifest
from dsl_bench.errors import DslBenchError, KernelFault
from dsl_bench.jobs import Partial, Progress, Racer
from dsl_bench.kernel import Call, Kernel
from dsl_bench.records import Accuracy, Interpreted, Participant, Trial
from dsl_bench.workload import Case, Workload

Verdict = TypeVar("Verdict", Trial, Participant, Interpreted)


class Bench:
    """Handles the device jobs of one worker."""

    def __init__(self, shelf: registry.Shelf, send: Callable[[jobs.Reply], None], interpret: bool) -> None:
        self.shelf = shelf
        self.send = send
        self.device = torch.device("cpu" if interpret else "cuda")
        self.watch = Stopwatch()
        self._modules: dict[str, Any] = {}
        self._arena: Arena | None = None
        with self.watch("start"):
            torch.zeros(1, device=self.device)

    def handle(self, job: jobs.Job) -> Any:
        """The value of the job's ``Done``."""
        with self.watch("job"):
            match job:
                case jobs.TrialsJob():
                    return self.trials(job)
                case jobs.FinalJob():
                    return self.final(job)
                case jobs.RaceJob():
                    from dsl_bench.racetrack import RaceTrack

                    return RaceTrack(self, job).run()
                case jobs.InterpretJob():
                    return self.interpret_one(job)
                case jobs.DoctorJob():
                    from dsl_bench import examine

                    return examine.measure(self.send, quick=job.quick)
                case _:
                    raise DslBenchError(f"this worker does not do {type(job).__name__}")

    def take_ledger(self) -> dict[str, float]:
        """Seconds by activity since it was last asked. ``job`` is the wall time they lie in, ``device`` the
        part of ``time`` in which the device ran what was timed."""
        if self.device.type == "cuda":
            self.watch.seconds["device"] = timing.take_timed_seconds()
        taken, self.watch.seconds = self.watch.seconds, {}
        return taken

    # -- preparing ------------------------------------------------------------------------------------

    def arena(self, workload: Workload, case: Case, seed: int) -> Arena:
        """The arena of a case; only the last one is kept."""
        held = self._arena
        if held is not None and (held.case, held.seed) == (case, seed):
            return held
        self._arena = held = None
        with self.watch("allocate"):
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._arena = Arena(workload, case, self.device, sets_needed(workload, case, self.device), seed)
        return self._arena

    def kernel(self, racer: Racer) -> Kernel:
        """The kernel behind a racer."""
        return self.shelf.kernels(racer.backend, racer.extra)[racer.choice.kernel]

    def module(self, racer: Racer) -> Any:
        """The racer's artifact, loaded once a process."""
        key = racer.choice.key
        if key not in self._modules:
            with self.watch("load"):
                artifact, _ = read_manifest(Path(racer.folder))
                self._modules[key] = self.shelf.backend(racer.backend).load(artifact)
        return self._modules[key]

    def bind(self, arena: Arena, racer: Racer, index: int) -> Bound:
        """The racer bound to every buffer set."""
        kernel, module = self.kernel(racer), self.module(racer)
        with self.watch("bind"):
            calls = [
                kernel.bind(module, arena.case, racer.choice.config, s.inputs, s.outputs) for s in arena.sets
            ]
        return Bound(racer, calls, index)

    def draw(self, arena: Arena, version: int, data: str, first_only: bool = False) -> None:
        """Fill an arena's value tensors; booked as a part of checking."""
        with self.watch("check"):
            arena.draw(version, data, first_only)
            self.synchronize()

    # -- checking -------------------------------------------------------------------------------------

    def check(self, arena: Arena, call: Call, version: int, data: str) -> Accuracy:
        """One verified run on set 0, whose values must be those of ``version`` and ``data``."""
        with self.watch("check"):
            buffers = arena.sets[0]
            before = check.fingerprint(buffers.inputs)
            check.poison(buffers.outputs)
            returned = call.run()
            self.synchronize()
            outputs = dict(returned) if call.allocates and returned is not None else buffers.outputs
            reference = arena.reference(version, data)
            return check.verify(arena.workload, arena.case, reference, outputs, buffers.inputs, before, data)

    def synchronize(self) -> None:
        """Wait for the device; a kernel's asynchronous fault is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def verdict(self, base: Verdict, fault: Exception) -> Verdict:
        """``base`` with the verdict of ``fault``; a fault that spoils the device ends the job instead."""
        if "CUDA error" in str(fault) or type(fault).__name__ == "AcceleratorError":
            raise fault
        status, caught_by, reason = "launch_error", "exception", one_line(fault)
        if isinstance(fault, KernelFault):
            status, caught_by, reason = fault.status, fault.check, fault.reason
        elif isinstance(fault, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            status, caught_by = "oom", "allocator"
        return msgspec.structs.replace(base, status=status, check=caught_by, reason=reason)

    # -- trials and finals ----------------------------------------------------------------------------

    def trials(self, job: jobs.TrialsJob) -> int:
        """Check and time each racer; one Trial record each."""
        case = from_ref(job.case)
        arena = self.arena(self.shelf.workload(job.workload), case, job.seed)
        for index, racer in enumerate(job.racers):
            self.send(Progress(f"trying {racer.choice.kernel} on {case.name}", index))
            start = time.monotonic()
            trial = self._trial(job, arena, racer, index)
            self.send(Partial(msgspec.structs.replace(trial, seconds=time.monotonic() - start)))
        return len(job.racers)

    def _trial(self, job: jobs.TrialsJob, arena: Arena, racer: Racer, index: int) -> Trial:
        c = racer.choice
        base = Trial(job.run_id, job.case, c.kernel, c.kernel_hash, c.config, "ok", c.key)
        try:
            self.draw(arena, BEFORE_BIND, "normal", first_only=True)
            bound = self.bind(arena, racer, index)
            self.draw(arena, AFTER_BIND, "normal", first_only=index > 0)
            accuracy = self.check(arena, bound.calls[0], AFTER_BIND, "normal")
            with self.watch("time"):
                median, n = timing.quick(bound.runs(), job.seconds)
        except Exception as fault:
            return self.verdict(base, fault)
        return msgspec.structs.replace(base, median_ns=median, n=n, accuracy=[accuracy])

    def final(self, job: jobs.FinalJob) -> list[float]:
        """Medians in ns of the racers, call by call against each other in the sustained regime."""
        case = from_ref(job.case)
        arena = self.arena(self.shelf.workload(job.workload), case, job.seed)
        bound = []
        for index, racer in enumerate(job.racers):
            self.send(Progress(f"final of {racer.choice.kernel} on {case.name}", index))
            bound.append(self.bind(arena, racer, index))
        self.draw(arena, AFTER_BIND, "normal")
        with self.watch("time"):
            result = timing.race_sustained(
                [b.runs() for b in bound], seconds=job.seconds, seed=job.seed, warm=0.2
            )
        return [float(np.median(row)) for row in result.samples]

    # -- the interpreter ------------------------------------------------------------------------------

    def interpret_one(self, job: jobs.InterpretJob) -> int:
        """One config on the CPU interpreter, verified on normal data and on outliers."""
        c = job.racer.choice
        base = Interpreted(job.run_id, job.case, c.kernel, c.kernel_hash, c.config, "ok", 0.0)
        start = time.monotonic()
        try:
            record = msgspec.structs.replace(base, accuracy=self._interpreted(job))
        except Exception as fault:
            record = self.verdict(base, fault)
        self.send(Partial(msgspec.structs.replace(record, seconds=time.monotonic() - start)))
        return 1

    def _interpreted(self, job: jobs.InterpretJob) -> list[Accuracy]:
        case, racer = from_ref(job.case), job.racer
        arena = self.arena(self.shelf.workload(job.workload), case, job.seed)
        self.draw(arena, BEFORE_BIND, "normal")
        kernel = self.kernel(racer)
        module = self.shelf.backend(racer.backend).interpret(kernel.source(job.static, "interpret"))
        buffers = arena.sets[0]
        call = kernel.bind(module, case, racer.choice.config, buffers.inputs, buffers.outputs)
        accuracy = []
        for data in ("normal", "outliers"):
            self.draw(arena, AFTER_BIND, data)
            accuracy.append(self.check(arena, call, AFTER_BIND, data))
        return accuracy
