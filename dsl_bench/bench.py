"""The device worker's work: check, trial, final, and (in :mod:`dsl_bench.racetrack`) race. Needs torch.

Order of every check: inputs drawn, kernel bound, inputs redrawn in place, outputs poisoned, one run,
outputs against float64.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from dsl_bench import check, fence, jobs, observe, registry, standing, timing
from dsl_bench.arena import AFTER_BIND, AFTER_RACE, BEFORE_BIND, Arena, Bound, Stopwatch, sets_needed
from dsl_bench.artifacts import from_ref, one_line, read_manifest
from dsl_bench.errors import DslBenchError, KernelFault
from dsl_bench.guard import Guard, assert_fills, is_oom, spoils_device
from dsl_bench.jobs import Partial, Progress, Racer
from dsl_bench.kernel import Call, Kernel
from dsl_bench.racetrack import RaceTrack
from dsl_bench.records import Accuracy, Interpreted, Participant, Trial
from dsl_bench.workload import Case, Workload

#: a baseline becomes the yardstick of its race; before that only gross errors shut it out
VENDOR_LEEWAY = 2.0
#: the share of the device's memory that a kernel has to leave to others
LEAST_FREE = 0.05
#: rounds of a final's cold race, at least
FINAL_ROUNDS = 7
#: verdicts that mean something else where the same call held before it was timed
WRONG = ("incorrect", "nonfinite", "unwritten", "mutated_input")

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
            # before any plugin is loaded
            self.guard = Guard()
        self._offences: dict[jobs.Origin, KernelFault | None] = {}

    def handle(self, job: jobs.Job) -> Any:
        """The value of the job's ``Done``."""
        with self.watch("job"):
            match job:
                case jobs.TrialsJob():
                    return self.trials(job)
                case jobs.FinalJob():
                    return self.final(job)
                case jobs.RaceJob():
                    return RaceTrack(self, job).run()
                case jobs.InterpretJob():
                    return self.interpret_one(job)
                case jobs.ProfileJob():
                    return self.profile(job)
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
        """The kernel behind a racer. KernelFault where its plugin tampered with something at import."""
        self.meet((racer.backend, *racer.extra))
        kernel = self.shelf.kernels(racer.backend, racer.extra)[racer.choice.kernel]
        offence = self._offences[self.shelf.owner(kernel.id)]
        if offence is not None:
            raise offence
        return kernel

    def meet(self, origins: Sequence[jobs.Origin]) -> None:
        """Load plugins, each once and watched; what one tampers with is held against its kernels later."""
        for origin in origins:
            if origin not in self._offences:
                self._offences[origin] = self._offence(origin)

    def _offence(self, origin: jobs.Origin) -> KernelFault | None:
        """Load one plugin by itself: what it changes is undone, and held against its own kernels alone."""
        self.guard.settle()
        vendor = False
        # one that cannot be loaded is told apart by whoever asks for its kernels
        with contextlib.suppress(Exception, SystemExit):
            backend = self.shelf.load(origin).backend
            if backend is not None:
                vendor = backend.role == "vendor"
                self.shelf.kernels(origin)
        try:
            self.guard.inspect(vendor)
        except KernelFault as fault:
            return fault
        return None

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
        config = racer.choice.config
        with self.watch("bind"), self._leaves_memory():
            self.guard.settle()
            calls = [kernel.bind(module, arena.case, config, s.inputs, s.outputs) for s in arena.sets]
            self.guard.inspect(racer.role == "vendor")
        assert_fills(racer.role, calls)
        return Bound(racer, calls, index)

    @contextlib.contextmanager
    def _leaves_memory(self) -> Iterator[None]:
        """Before: what torch gives out as uninitialised holds NaN, not the zeros of a fresh device. After: a
        kernel that took all the memory is found out before it costs the next one its verdict."""
        if self.device.type != "cuda":
            yield
            return
        before, total = torch.cuda.mem_get_info()
        soiled = [torch.empty(1 << n, dtype=torch.uint8, device=self.device) for n in range(9, 27)]
        for block in soiled:
            block.fill_(0xFF)
        soiled.clear()
        yield
        free, _ = torch.cuda.mem_get_info()
        if free < LEAST_FREE * total and before - free > free:
            reason = f"{free >> 20} of {total >> 20} MiB of device memory were left"
            raise KernelFault("oom", f"the kernel takes all the memory: {reason}", "memory", fatal=True)

    def draw(self, arena: Arena, version: int, data: str, first_only: bool = False) -> None:
        """Fill an arena's value tensors; booked as a part of checking."""
        with self.watch("check"):
            arena.draw(version, data, first_only)
            self.synchronize()

    # -- checking -------------------------------------------------------------------------------------

    def check(self, arena: Arena, call: Call, version: int, data: str, role: str = "language") -> Accuracy:
        """One verified run on set 0, whose values must be those of ``version`` and ``data``."""
        with self.watch("check"):
            buffers = arena.sets[0]
            # before the run, which may change the inputs
            reference, yard = arena.reference(version, data), arena.yardstick(version, data)
            before = check.fingerprint(buffers.inputs)
            with self._mending(arena, version, data, first_only=True):
                outputs = observe.observed(call, buffers.outputs, self._stream())
                # first of all, so that the checks are the genuine ones
                self.guard.inspect(role == "vendor")
                fence.assert_whole(buffers.fences)
                return check.verify(
                    arena.workload,
                    arena.case,
                    reference,
                    outputs,
                    buffers.inputs,
                    before,
                    data,
                    vendor=yard,
                    leeway=VENDOR_LEEWAY if role == "vendor" else 1.0,
                )

    @contextlib.contextmanager
    def _mending(self, arena: Arena, version: int, data: str, first_only: bool = False) -> Iterator[None]:
        """Whoever fails in here leaves inputs and fences to the next one as they were before."""
        try:
            yield
        except Exception as fault:
            if not spoils_device(fault):
                with contextlib.suppress(KernelFault):
                    fence.assert_whole(arena.fences())
                self.guard.restore()
                arena.draw(version, data, first_only)
            raise

    def check_again(self, arena: Arena, bound: Bound, data: str) -> None:
        """Another verified run after the timing, on values drawn anew; KernelFault ``unstable`` where it does
        not hold any more."""
        self.draw(arena, AFTER_RACE, data, first_only=True)
        try:
            self.check(arena, bound.calls[0], AFTER_RACE, data, bound.racer.role)
        except KernelFault as fault:
            if fault.status not in WRONG:
                raise
            reason = f"held before it was timed, not after it: {fault.reason}"
            raise KernelFault("unstable", reason, "after") from fault

    @contextlib.contextmanager
    def alone(self, arena: Arena, bound: Bound, data: str) -> Iterator[None]:
        """While one racer is timed, on values of AFTER_BIND and ``data``: nothing changes but outputs."""
        inputs = arena.sets[0].inputs
        before = check.fingerprint(inputs)
        with self._mending(arena, AFTER_BIND, data):
            yield
            self.guard.inspect(bound.racer.role == "vendor")
            fence.assert_whole(arena.fences())
            if check.fingerprint(inputs) != before:
                reason = "the kernel changed its inputs while it was timed"
                raise KernelFault("mutated_input", reason, "fingerprint")

    def proof(self, arena: Arena, entered: Sequence[Bound], data: str) -> timing.Prove:
        """That a captured graph holds its kernel: outputs are poisoned, a replay writes them all, and those
        of set 0 (whose values must be those of AFTER_BIND and ``data``) are right."""

        def prove(racer: int, sets: Sequence[int], replay: Callable[[], object]) -> None:
            bound = entered[racer]
            if bound.calls[0].allocates:
                return  # its outputs live in the graph's own memory; the plausibility check still holds
            outputs = [arena.sets[s].outputs for s in sorted(set(sets))]
            for tensors in outputs:
                check.poison(tensors)
            replay()
            self.synchronize()
            check.assert_written(outputs, bound.racer.choice.kernel)
            if 0 in sets:
                self._replayed(arena, bound.racer, data)

        return prove

    def _replayed(self, arena: Arena, racer: Racer, data: str) -> None:
        reference, yard = arena.reference(AFTER_BIND, data), arena.yardstick(AFTER_BIND, data)
        leeway = VENDOR_LEEWAY if racer.role == "vendor" else 1.0
        outputs = arena.sets[0].outputs
        try:
            check.verify(
                arena.workload, arena.case, reference, outputs, {}, {}, data, vendor=yard, leeway=leeway
            )
        except KernelFault as fault:
            reason = f"held when called, not when a captured graph was replayed: {fault.reason}"
            raise KernelFault(fault.status, reason, "capture") from fault

    def plausible(self, arena: Arena, ns: float) -> None:
        """KernelFault ``implausible`` for a call faster than physics, on a device whose rates are known."""
        rates = standing.PEAKS.get(torch.cuda.get_device_name()) if self.device.type == "cuda" else None
        if rates is not None:
            assert_plausible(arena.workload, arena.case, ns, rates)

    def _stream(self) -> timing.CudaDevice | None:
        """The device whose order of work is observed; None on the host."""
        return timing.cuda() if self.device.type == "cuda" else None

    def synchronize(self) -> None:
        """Wait for the device; a kernel's asynchronous fault is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def verdict(self, base: Verdict, fault: Exception) -> Verdict:
        """``base`` with the verdict of ``fault``; a fault that spoils the device ends the job instead."""
        traceback.clear_frames(fault.__traceback__)  # which may hold all the memory
        self.guard.restore()  # what it changed before it failed is not for the next one to answer for
        if spoils_device(fault):
            raise fault
        status, caught_by, reason = "launch_error", "exception", one_line(fault)
        if isinstance(fault, KernelFault):
            if fault.fatal:
                raise fault
            status, caught_by, reason = fault.status, fault.check, fault.reason
        elif is_oom(fault):
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
            accuracy = self.check(arena, bound.calls[0], AFTER_BIND, "normal", racer.role)
            with self.alone(arena, bound, "normal"), self.watch("time"):
                prove = self.proof(arena, [bound], "normal")
                median, n = timing.quick(bound.runs(), job.seconds, prove=prove)
            self.plausible(arena, median)
            self.check_again(arena, bound, "normal")
        except Exception as fault:
            return self.verdict(base, fault)
        return msgspec.structs.replace(base, median_ns=median, n=n, accuracy=[accuracy])

    def final(self, job: jobs.FinalJob) -> tuple[list[float], list[float]]:
        """Medians in ns of the racers, against each other in the cold and in the sustained regime."""
        case = from_ref(job.case)
        arena = self.arena(self.shelf.workload(job.workload), case, job.seed)
        bound = []
        for index, racer in enumerate(job.racers):
            self.send(Progress(f"final of {racer.choice.kernel} on {case.name}", index))
            bound.append(self.bind(arena, racer, index))
        self.draw(arena, AFTER_BIND, "normal")
        runs, seconds, seed = [b.runs() for b in bound], job.seconds, job.seed
        self.send(Progress(f"racing {len(bound)} finalists on {case.name}"))
        with self.watch("time"):
            cold = timing.race_cold(runs, seconds=seconds, seed=seed, min_rounds=FINAL_ROUNDS)
            load = timing.race_sustained(runs, seconds=seconds, seed=seed, warm=0.2)
        return cold.medians, load.medians

    # -- the profiler ---------------------------------------------------------------------------------

    def profile(self, job: jobs.ProfileJob) -> int:
        """One run between marks, on values that were checked; what comes before warms the chip's clocks."""
        case = from_ref(job.case)
        arena = self.arena(self.shelf.workload(job.workload), case, job.seed)
        bound = self.bind(arena, job.racer, 0)
        self.draw(arena, AFTER_BIND, "normal")
        self.check(arena, bound.calls[0], AFTER_BIND, "normal", job.racer.role)
        for call in bound.calls:
            call.run()
        self.synchronize()
        torch.cuda.nvtx.range_push("dsl_bench")
        bound.calls[0].run()
        torch.cuda.nvtx.range_pop()
        self.synchronize()
        return 1

    # -- the interpreter ------------------------------------------------------------------------------

    def interpret_one(self, job: jobs.InterpretJob) -> int:
        """One config on the CPU interpreter, verified on the data asked for and on outliers."""
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
        self.guard.settle()
        call = kernel.bind(module, case, racer.choice.config, buffers.inputs, buffers.outputs)
        assert_fills(racer.role, [call])
        accuracy = []
        for version, data in ((AFTER_BIND, job.data), (AFTER_RACE, "outliers")):
            self.draw(arena, version, data)
            accuracy.append(self.check(arena, call, version, data))
        return accuracy


def assert_plausible(workload: Workload, case: Case, ns: float, rates: tuple[float, float]) -> None:
    """KernelFault ``implausible`` for a call of ``ns`` that beats ``rates`` (FLOP/s, bytes/s)."""
    share = max(workload.flops(case) / rates[0], workload.bytes(case) / rates[1]) / (ns * 1e-9)
    if share > standing.IMPLAUSIBLE:
        reason = f"{ns / 1e3:.2f} us are {share:.2f} of the fixed rates: faster than physics"
        raise KernelFault("implausible", reason, "physics")
