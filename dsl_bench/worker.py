"""The process that may crash: reads jobs on stdin, answers on what was its stdout.

``python -m dsl_bench.worker ROLE`` with ROLE one of describe, compile, device, interpret. Whatever plugins
print goes to stderr; the parent keeps that as the log of a death.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dsl_bench import jobs, registry
from dsl_bench.artifacts import compile_artifact, from_ref, one_line, to_ref
from dsl_bench.backend import Backend, Target
from dsl_bench.errors import KernelFault
from dsl_bench.jobs import Origin
from dsl_bench.kernel import Kernel
from dsl_bench.records import CaseRef
from dsl_bench.workload import Case

TARGETS: tuple[Target, ...] = ("device", "interpret", "compile")


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
            case jobs.ParseCases():
                workload = self.shelf.workload(job.workload)
                return [to_ref(workload.parse_case(given)) for given in job.given]
            case jobs.PlanJob():
                return plan(self.shelf, job)
            case jobs.CompileJob():
                return compile_artifact(self.shelf, job)
            case _:
                return self._on_device(job)

    def _on_device(self, job: jobs.Job) -> Any:
        from dsl_bench import bench

        if self._device is None:
            self._device = bench.Bench(self.shelf, self.send, interpret=self.role == "interpret")
        return self._device.handle(job)

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
    targets: dict[str, jobs.TargetInfo] = {}
    for target in TARGETS:
        got = backend.probe(target)
        targets[target] = jobs.TargetInfo(got.ready, got.reason, got.hint)
    kernels: list[jobs.KernelInfo] = []
    problems: list[str] = []
    if any(t.ready for t in targets.values()):
        try:
            kernels = [_kernel_info(k, origin) for k in shelf.kernels(origin, extra).values()]
        except Exception as fault:
            problems.append(f"kernels: {one_line(fault)}")
    versions = backend.versions() if kernels else {}
    return jobs.BackendInfo(
        backend.name,
        backend.role,
        targets,
        versions,
        backend.toolchain() if kernels else "",
        kernels,
        problems,
    )


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
    )


def plan(shelf: registry.Shelf, job: jobs.PlanJob) -> list[jobs.Planned]:
    """For every kernel and case: what could run, default first, then seeds, then the rest of the space."""
    backend = shelf.backend(job.backend)
    toolchain = backend.toolchain()
    rows = []
    for kernel in shelf.kernels(job.backend, job.extra).values():
        if job.kernels and kernel.id not in job.kernels:
            continue
        source = registry.source_hash(kernel)
        rows += [
            _plan_case(kernel, source, c, toolchain, job) for c in job.cases if c.workload == kernel.workload
        ]
    return rows


def _plan_case(kernel: Kernel, source: str, ref: CaseRef, toolchain: str, job: jobs.PlanJob) -> jobs.Planned:
    reason = registry.unmet(kernel.needs, job.arch)
    if reason:
        return jobs.Planned(kernel.id, ref, [], reason)
    case = from_ref(ref)
    candidates: dict[str, jobs.Candidate] = {}
    pruned: dict[str, int] = {}
    for rank, config in _ranked(kernel, case, job):
        if rank == 2 and 0 <= job.limit <= len(candidates):
            break
        name = json.dumps(config, sort_keys=True)
        if name in candidates:
            continue
        why = kernel.valid(case, config)
        if why is not None:
            pruned[why] = pruned.get(why, 0) + 1
            continue
        static = dict(kernel.static(case, config))
        key = registry.artifact_key(source, json.dumps(static, sort_keys=True).encode(), toolchain, job.arch)
        candidates[name] = jobs.Candidate(config, key, static, rank)
    reason = "" if candidates else max(pruned, key=lambda k: pruned[k], default="the space is empty")
    return jobs.Planned(kernel.id, ref, list(candidates.values()), reason, pruned)


def _ranked(kernel: Kernel, case: Case, job: jobs.PlanJob) -> Iterator[tuple[int, dict[str, Any]]]:
    yield 0, dict(kernel.default(case))
    for config in kernel.seeds(case):
        yield 1, dict(config)
    for wanted in job.include:
        if (wanted.kernel, wanted.case) == (kernel.id, case.name):
            yield 1, dict(wanted.config)
    if job.limit:
        rest = list(kernel.configs())
        if job.limit > 0:
            random.Random(job.seed).shuffle(rest)
        for config in rest:
            yield 2, config


def _refusal(fault: BaseException, role: str) -> jobs.Refused:
    text = traceback.format_exc()
    if isinstance(fault, KernelFault):
        return jobs.Refused(fault.status, fault.reason, fault.check, text)
    status = "compile_error" if role == "compile" else "launch_error"
    name = type(fault).__name__
    if name in ("OutOfMemoryError", "MemoryError"):
        return jobs.Refused("oom", one_line(fault), "allocator", text)
    fatal = name == "AcceleratorError" or "CUDA error" in str(fault) or "illegal memory" in str(fault)
    if "illegal memory" in str(fault):
        status = "illegal_access"
    return jobs.Refused(status, one_line(fault), "exception", text, fatal)


def _follow_parent() -> None:
    """Die with the parent: PR_SET_PDEATHSIG, checked again in case it died before we asked."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    parent = os.environ.get("DSL_BENCH_PARENT")
    if parent and os.getppid() != int(parent):
        os._exit(1)


def main(role: str) -> None:
    """Serve jobs until stdin closes."""
    _follow_parent()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(reply: jobs.Reply) -> None:
        replies.write(jobs.encoder.encode(reply) + b"\n")

    worker = Worker(role, send)
    for line in sys.stdin.buffer:
        try:
            value = worker.handle(jobs.job_decoder.decode(line))
            send(jobs.Done(msgspec.Raw(jobs.encoder.encode(value)), worker.ledger()))
        except BaseException as fault:
            send(_refusal(fault, role))


if __name__ == "__main__":
    main(sys.argv[1])
