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
            hashes = session.catalog.hashes()
            for planned in session.plan(name, cases, 0, kernels):
                if (planned.kernel, hashes.get(planned.kernel), planned.case.name) in held:
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
        _skip_planned(session, workload, planned)
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
        session.settings.data,
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
    kept = [_verdict_or_skip(r) for r in kept]
    for record in kept:
        session.sink.write(record)
    return sum(isinstance(r, Interpreted) and r.status != "ok" for r in kept)


def _verdict_or_skip(record: Record) -> Record:
    """What an interpreter cannot do says nothing about the kernel: it is a refusal, not a failure."""
    if not isinstance(record, Interpreted):
        return record
    case, hint = record.case, ""
    if record.status == "hang" and "smoke" not in case.groups:
        hint = "the interpreter is for small sizes"
    elif record.status != "unavailable":
        return record
    elif case.dtype != "fp16":
        hint = "the interpreter needs dtype=fp16"
    backend = record.kernel.partition("/")[0]
    reason = f"interpret: {record.reason}"
    return Skip(record.run_id, case.workload, case.name, backend, record.kernel, "unavailable", reason, hint)


def compile_all(
    session: Session,
    workload: str,
    cases: Sequence[CaseRef],
    backends: Sequence[str],
    limit: int,
    kernels: Sequence[str] = (),
    compiled_for: dict[str, list[str]] | None = None,
) -> int:
    """Compile the first ``limit`` candidates of every kernel and case; returns how many failed.

    ``compiled_for`` receives the names of the cases behind each artifact's key."""
    wanted: dict[str, tuple[str, ConfigDict]] = {}
    compiled_for = {} if compiled_for is None else compiled_for
    for name in backends:
        target = session.catalog.backend(name)[1].targets["compile"]
        if not target.ready:
            _skip(session, workload, name, "", f"compile: {target.reason}", target.hint)
            continue
        for planned in session.plan(name, cases, limit if limit > 8 else 0, kernels):
            if not planned.candidates:
                _skip_planned(session, workload, planned)
            for candidate in planned.candidates[:limit]:
                session.compile(planned.kernel, candidate, candidate.rank)
                compiled_for.setdefault(candidate.key, []).append(planned.case.name)
                wanted.setdefault(candidate.key, (planned.kernel, candidate.config))
    while any(session.built(key) is None for key in wanted):
        if session.clock.over():
            break
        session.show.advance("compiled", *session.progress())
        session.wait_built(lambda: all(session.built(k) is not None for k in wanted))
    session.show.advance("compiled", *session.progress())
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


def _skip_planned(session: Session, workload: str, planned: Planned) -> None:
    """A kernel that refuses a case; one that failed to be planned is recorded already."""
    if not planned.fault:
        backend = planned.kernel.partition("/")[0]
        _skip(session, workload, backend, planned.kernel, planned.reason, "", planned.case.name)


def _skip(
    session: Session, workload: str, backend: str, kernel: str, reason: str, hint: str, case: str = ""
) -> None:
    status = "invalid_config" if case else "unavailable"
    session.sink.write(Skip(session.run_id, workload, case, backend, kernel, status, reason, hint))
