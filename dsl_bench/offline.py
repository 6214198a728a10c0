"""A run on a machine without a GPU: interpret the smoke cases, compile every language, show facts."""

from __future__ import annotations

from collections.abc import Sequence

from dsl_bench import jobs
from dsl_bench.jobs import Candidate, Planned, Refused
from dsl_bench.pool import Worker
from dsl_bench.records import CaseRef, Choice, ConfigDict, Failure, Interpreted, Record, Skip
from dsl_bench.session import Session

INTERPRET_SECONDS = 120.0


def interpret(
    session: Session,
    workload: str,
    cases: Sequence[CaseRef],
    backends: Sequence[str],
    earlier: Sequence[Record] = (),
    kernels: Sequence[str] = (),
) -> tuple[int, list[str]]:
    """Run every kernel that its language can interpret on ``cases``, but for what ``earlier`` records hold.

    Returns how many failed, and what the time limit left undone."""
    failed = 0
    unfinished: list[str] = []
    held = {(r.kernel, r.kernel_hash, r.case.name) for r in earlier if isinstance(r, Interpreted)}
    worker = Worker("interpret", {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    try:
        for name in backends:
            target = session.catalog.backend(name)[1].targets["interpret"]
            if not target.ready:
                _skip(session, workload, name, "", f"interpret: {target.reason}", target.hint)
                continue
            for planned in session.plan(name, cases, 0, kernels):
                if (planned.kernel, session.catalog.hashes()[planned.kernel], planned.case.name) in held:
                    continue
                if session.clock.over():
                    unfinished.append(f"interpret {planned.kernel} on {planned.case.name}")
                    continue
                failed += _interpret_one(session, worker, workload, planned)
    finally:
        worker.kill()
    return failed, unfinished


def _interpret_one(session: Session, worker: Worker, workload: str, planned: Planned) -> int:
    if not planned.candidates:
        _skip(
            session,
            workload,
            planned.kernel.partition("/")[0],
            planned.kernel,
            planned.reason,
            "",
            planned.case.name,
        )
        return 0
    first = planned.candidates[0]
    racer = session.racer(_choice(session, planned.kernel, first))
    job = jobs.InterpretJob(
        session.run_id,
        session.workload_origin(workload),
        planned.case,
        racer,
        first.static,
        session.settings.seed,
    )
    session.show.say(f"interpreting {planned.kernel} on {planned.case.name}")
    kept: list[Record] = []
    outcome = worker.run(
        job, INTERPRET_SECONDS, lambda r: kept.append(r.record) if isinstance(r, jobs.Partial) else None
    )
    if not kept:
        refused = outcome.refused or Refused("launch_error", "no answer")
        c = racer.choice
        kept.append(
            Interpreted(
                session.run_id,
                planned.case,
                c.kernel,
                c.kernel_hash,
                c.config,
                refused.status,
                0.0,
                check=refused.check,
                reason=refused.reason,
            )
        )
    for record in kept:
        session.sink.write(record)
    return sum(isinstance(r, Interpreted) and r.status != "ok" for r in kept)


def compile_all(
    session: Session,
    workload: str,
    cases: Sequence[CaseRef],
    backends: Sequence[str],
    limit: int,
    kernels: Sequence[str] = (),
) -> int:
    """Compile the first ``limit`` candidates of every kernel and case; returns how many failed."""
    wanted: dict[str, tuple[str, ConfigDict]] = {}
    for name in backends:
        target = session.catalog.backend(name)[1].targets["compile"]
        if not target.ready:
            _skip(session, workload, name, "", f"compile: {target.reason}", target.hint)
            continue
        for planned in session.plan(name, cases, limit if limit > 8 else 0, kernels):
            if not planned.candidates:
                _skip(session, workload, name, planned.kernel, planned.reason, "", planned.case.name)
            for candidate in planned.candidates[:limit]:
                session.compile(planned.kernel, candidate, candidate.rank)
                wanted.setdefault(candidate.key, (planned.kernel, candidate.config))
    while any(session.built(key) is None for key in wanted):
        if session.clock.over():
            break
        session.show.advance("compiled", *session.progress())
        session.wait_built(lambda: all(session.built(k) is not None for k in wanted))
    refused = [(key, r) for key in wanted if isinstance(r := session.built(key), Refused)]
    for key, why in refused:
        kernel, config = wanted[key]
        session.sink.write(
            Failure(
                session.run_id,
                workload,
                "",
                kernel.partition("/")[0],
                kernel,
                why.status,
                "compile",
                why.reason,
                config,
            )
        )
    return len(refused)


def no_device(session: Session, workload: str, backends: Sequence[str], reason: str, hint: str) -> None:
    """Say for every backend that nothing was timed, and why."""
    for name in backends:
        target = session.catalog.backend(name)[1].targets["device"]
        _skip(
            session, workload, name, "", f"no speed measured: {target.reason or reason}", target.hint or hint
        )


def _choice(session: Session, kernel: str, candidate: Candidate) -> Choice:
    return Choice(kernel, session.catalog.hashes()[kernel], candidate.config, candidate.key)


def _skip(
    session: Session, workload: str, backend: str, kernel: str, reason: str, hint: str, case: str = ""
) -> None:
    status = "invalid_config" if case else "unavailable"
    session.sink.write(Skip(session.run_id, workload, case, backend, kernel, status, reason, hint))
