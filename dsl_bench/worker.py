"""The process that may crash: reads jobs on stdin, answers on what was its stdout.

``python -m dsl_bench.worker ROLE`` with ROLE one of describe, compile, device, interpret. Whatever plugins
print goes to stderr; the parent keeps that as the log of a death.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dsl_bench import conformance, jobs, planning, registry
from dsl_bench.artifacts import compile_artifact, one_line, to_ref
from dsl_bench.backend import Availability, Backend, Target
from dsl_bench.errors import KernelFault, PluginError, UsageError
from dsl_bench.jobs import Origin
from dsl_bench.kernel import Kernel
from dsl_bench.records import CaseRef
from dsl_bench.workload import Case, Workload

TARGETS: tuple[Target, ...] = ("device", "interpret", "compile")
#: of the host's free memory, what an interpreted kernel may take
HOST_SHARE = 0.8


class Worker:
    """Dispatches jobs to handlers; holds the plugins that were loaded."""

    def __init__(self, role: str, send: Callable[[jobs.Reply], None]) -> None:
        self.role = role
        self.send = send
        self.shelf = registry.Shelf()
        self._device: Any = None

    def handle(self, job: jobs.Job) -> Any:
        """The value of the job's ``Done``."""
        match job:
            case jobs.Describe():
                return describe(self.shelf, job)
            case jobs.ProbeJob():
                backend = self.shelf.backend(job.origin)
                return {t: _target(backend, t) for t in TARGETS if t in job.targets}
            case jobs.ParseCases():
                return parse_cases(self.shelf.workload(job.workload), job)
            case jobs.ExamineWorkload():
                return list(conformance.examine(self.shelf.workload(job.workload)))
            case jobs.PlanJob():
                return plan(self.shelf, job)
            case jobs.CompileJob():
                return compile_artifact(self.shelf, job)
            case jobs.PreloadJob():
                return self._preload(job)
            case _:
                return self._on_device(job)

    def _on_device(self, job: jobs.Job) -> Any:
        from dsl_bench import bench

        if self._device is None:
            self._device = bench.Bench(self.shelf, self.send, interpret=self.role == "interpret")
        return self._device.handle(job)

    def _preload(self, job: jobs.PreloadJob) -> int:
        """Import the backends' kernels and languages. The device role imports torch first and, where it may
        have the GPU, makes its context: before any plugin's import, which is watched there."""
        if self.role == "device":
            from dsl_bench import bench

            if job.context:
                self._device = self._device or bench.Bench(self.shelf, self.send, interpret=False)
                self._device.meet((*job.backends, *job.extra))
        else:
            for origin in job.backends:
                self.shelf.kernels(origin, job.extra)
        return len(job.backends)

    def ledger(self) -> dict[str, float]:
        """Seconds by activity of the job just done (device role only)."""
        return self._device.take_ledger() if self._device is not None else {}


def describe(shelf: registry.Shelf, job: jobs.Describe) -> jobs.Described:
    """What one plugin holds; a plugin that raises, even SystemExit, is told apart from an empty one."""
    origin = job.origin
    try:
        loaded = shelf.load(origin)
        backend = None
        if loaded.backend is not None:
            backend = _describe_backend(shelf, origin, loaded.backend, job.extra)
        workload = None
        if loaded.workload is not None:
            w = loaded.workload
            workload = jobs.WorkloadInfo(
                w.name, tuple(w.baselines), tuple(w.param_names), w.metric, [to_ref(c) for c in w.cases()]
            )
        kernels = [_kernel_info(k, origin) for k in loaded.kernels]
    except KeyboardInterrupt:
        raise
    except BaseException as fault:
        state = "incompatible" if "plugin API" in str(fault) else "failed"
        return jobs.Described(origin, state, one_line(fault), traceback.format_exc())
    return jobs.Described(origin, "ready", backend=backend, workload=workload, kernels=kernels)


def _describe_backend(
    shelf: registry.Shelf, origin: Origin, backend: Backend, extra: tuple[Origin, ...]
) -> jobs.BackendInfo:
    targets: dict[str, jobs.TargetInfo] = {t: _target(backend, t) for t in TARGETS}
    kernels: list[jobs.KernelInfo] = []
    if any(t.ready for t in targets.values()):
        kernels = [_kernel_info(k, shelf.owner(k.id)) for k in shelf.kernels(origin, extra).values()]
    problems = list(shelf.problems.get(origin, ()))
    versions = backend.versions() if kernels else {}
    return jobs.BackendInfo(
        backend.name,
        backend.role,
        targets,
        versions,
        backend.toolchain() if kernels else "",
        kernels,
        problems,
        bool(backend.ahead),
    )


def _target(backend: Backend, target: Target) -> jobs.TargetInfo:
    got = backend.probe(target)
    if not isinstance(got, Availability):
        raise PluginError(f"probe({target!r}) returned a {type(got).__name__}, not an Availability")
    return jobs.TargetInfo(got.ready, got.reason, got.hint)


def _kernel_info(kernel: Kernel, origin: Origin) -> jobs.KernelInfo:
    return jobs.KernelInfo(
        id=kernel.id,
        workload=kernel.workload,
        hash=registry.source_hash(kernel),
        space={name: list(values) for name, values in kernel.space.items()},
        summary=kernel.summary,
        archs=kernel.needs.archs,
        unmet=registry.unmet(kernel.needs),
        lines=registry.source_lines(kernel),
        origin=origin,
        files=tuple(str(path) for path in registry.kernel_files(kernel)),
    )


def parse_cases(workload: Workload, job: jobs.ParseCases) -> list[CaseRef]:
    """The cases that a user gave by their parameters, whatever the letters' case, or by name.

    Raises UsageError that says where a bad one was read. A name that no size has is left out."""
    known = {p.lower(): p for p in (*workload.param_names, "dtype")}
    found = []
    for number, given in enumerate(job.given):
        try:
            case = workload.parse_case({known.get(k.lower(), k): v for k, v in given.items()})
        except UsageError as fault:
            where = job.where[number] if number < len(job.where) else ""
            raise UsageError(f"{where}: {fault}" if where else str(fault)) from fault
        found.append(to_ref(case))
    return found + [to_ref(c) for c in (_case_called(workload, n) for n in job.names) if c is not None]


def _case_called(workload: Workload, name: str) -> Case | None:
    """The user's own size that results show as ``name`` (``4096x5120x2560-bf16``), if there is one."""
    sizes, _, dtype = name.rpartition("-")
    values = sizes.split("x")
    if len(values) != len(workload.param_names):
        return None
    try:
        case = workload.parse_case({**dict(zip(workload.param_names, values, strict=True)), "dtype": dtype})
    except UsageError:
        return None
    return case if case.name == name else None


def plan(shelf: registry.Shelf, job: jobs.PlanJob) -> list[jobs.Planned]:
    """For every kernel and case: what could run, default first, then seeds, then the rest of the space."""
    backend = shelf.backend(job.backend)
    toolchain = backend.toolchain()
    workload = shelf.workload(job.workload) if job.workload else None
    rows = []
    for kernel in shelf.kernels(job.backend, job.extra).values():
        if job.kernels and kernel.id not in job.kernels:
            continue
        source = registry.source_hash(kernel)
        for case in job.cases:
            if case.workload != kernel.workload:
                continue
            try:
                rows.append(planning.plan_case(kernel, source, case, toolchain, job, workload))
            except Exception as fault:
                reason = f"cannot be planned: {one_line(fault)}"
                rows.append(jobs.Planned(kernel.id, case, [], reason, fault=True))
    return rows


def _refusal(fault: BaseException, role: str) -> jobs.Refused:
    text = traceback.format_exc()
    if isinstance(fault, KernelFault):
        return jobs.Refused(fault.status, fault.reason, fault.check, text, fault.fatal)
    status = "compile_error" if role == "compile" else "launch_error"
    name = type(fault).__name__
    if name in ("OutOfMemoryError", "MemoryError"):
        return jobs.Refused("oom", one_line(fault), "allocator", text)
    fatal = name == "AcceleratorError" or "CUDA error" in str(fault) or "illegal memory" in str(fault)
    if "illegal memory" in str(fault):
        status = "illegal_access"
    return jobs.Refused(status, one_line(fault), "exception", text, fatal)


def follow_parent(parent: int) -> None:
    """Die with the parent: PR_SET_PDEATHSIG, checked again in case it died before we asked."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def leave_nobody() -> None:
    """Start a process that outlives this one, however that ends, by a moment: it ends the whole group, and
    with it the compilers and whatever else was started here. They would not hear of the parent's death. A
    group that others lead (a profiler's, say) is theirs to end."""
    us = os.getpid()
    if os.getpgrp() != us or os.fork():
        return
    for stream in (0, 1, 2):
        os.close(stream)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() == us:
        signal.sigwait({signal.SIGTERM})
    os.killpg(0, signal.SIGKILL)


def _bound_memory() -> None:
    """A kernel that takes all of the host's memory is refused it before the system picks a victim."""
    sizes = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            sizes.append(int(line.split()[1]) << 10)
    with contextlib.suppress(OSError, ValueError):  # no bound reads "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if sizes:
        resource.setrlimit(resource.RLIMIT_DATA, (int(HOST_SHARE * min(sizes)), hard))


def _count_programs() -> dict[str, int]:
    """Counts, by name, the programs that this process will start: an assembler among those of the device
    worker means that something was compiled there, which the pool should have done."""
    started: dict[str, int] = {}

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.system"):
            name = os.path.basename(str(args[0]).split(" ")[0])  # noqa: PTH119 (cheap: it may run often)
            started[name] = started.get(name, 0) + 1

    sys.addaudithook(hear)
    return started


def _taken(counts: dict[str, int]) -> dict[str, int]:
    taken = dict(counts)
    counts.clear()
    return taken


def main(role: str, parent: int = 0) -> None:
    """Serve jobs until stdin closes; ``parent`` is the process to die with, if not the one that the
    environment names."""
    follow_parent(parent or int(os.environ.get("DSL_BENCH_PARENT", "0")))
    leave_nobody()
    if role == "interpret":
        _bound_memory()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(reply: jobs.Reply) -> None:
        replies.write(jobs.encoder.encode(reply) + b"\n")

    started = _count_programs()
    worker = Worker(role, send)
    for line in sys.stdin.buffer:
        try:
            value = worker.handle(jobs.job_decoder.decode(line))
            send(jobs.Done(msgspec.Raw(jobs.encoder.encode(value)), worker.ledger(), _taken(started)))
        except BaseException as fault:
            send(_refusal(fault, role))


if __name__ == "__main__":
    main(sys.argv[1])
