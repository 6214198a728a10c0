"""Runs and searches as functions: what the command line and notebooks call."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dsl_bench import catalog as catalogs
from dsl_bench import environment, offline, store
from dsl_bench.catalog import Catalog
from dsl_bench.contest import Memory, contenders
from dsl_bench.errors import NothingMatched, UsageError
from dsl_bench.records import REGIMES, SCHEMA, CaseRef, Record, Regime, RunHeader
from dsl_bench.runner import Runner
from dsl_bench.session import Progressor, Session, Settings, gpu_lock

TargetChoice = Literal["auto", "device", "interpret", "compile"]


@dataclass
class Request:
    """What to run. Empty selections mean everything (backends, kernels) or the quick group (cases)."""

    workloads: Sequence[str] = ()
    groups: Sequence[str] = ()
    patterns: Sequence[str] = ()
    own_cases: Sequence[dict[str, str]] = ()
    backends: Sequence[str] = ()
    kernels: Sequence[str] = ()
    regimes: Sequence[Regime] = REGIMES
    target: TargetChoice = "auto"
    settings: Settings = field(default_factory=Settings)
    out: Path | None = None
    resume: Path | None = None
    plugins: Sequence[str] = ()
    winners: Sequence[Path] = ()
    revision: str = ""
    race: bool = True
    retune: bool = False


@dataclass
class Report:
    """What a run left: its file, its records, and how it went."""

    path: Path
    records: list[Record]
    failed: int = 0
    held: int = 0
    target: str = ""
    unfinished: list[str] = field(default_factory=list)
    interrupted: bool = False


class _Tee:
    """Writes to the results file and keeps the records for the table at the end."""

    def __init__(self, writer: store.Writer) -> None:
        self._writer = writer
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """On disk first, then kept."""
        self._writer.write(record)
        self.records.append(record)


def cases_of(catalog: Catalog, workload: str, request: Request) -> list[CaseRef]:
    """The cases a request means: named ones, the user's own, or the quick group."""
    origin, info = catalog.workload(workload)
    chosen: list[CaseRef] = []
    if request.own_cases:
        chosen += catalogs.own_cases(origin, list(request.own_cases))
    if request.groups or request.patterns or not request.own_cases:
        groups = request.groups or ([] if request.patterns else ["quick"])
        chosen += catalogs.select(info, groups, request.patterns)
    return list({c.name: c for c in chosen}.values())


def run(request: Request, show: Progressor | None = None) -> Report:
    """Do what the request says with what this machine has; see :class:`Report`."""
    show = show or Progressor()
    catalog = catalogs.load(request.plugins, show.say)
    names = list(request.workloads) or sorted(catalog.workloads())
    for name in request.backends:
        catalog.backend(name)
    for kernel in request.kernels:
        if kernel not in catalog.kernels():
            from dsl_bench.errors import unknown

            raise unknown("kernel", kernel, catalog.kernels())
    work = {name: cases_of(catalog, name, request) for name in names}
    if not work:
        raise NothingMatched("no workload is installed")
    if not any(b.role == "language" for _, b in catalog.backends().values()):
        why = (
            ", ".join(f"{d.origin.name} ({d.state})" for d in catalog.failed)
            or "none is installed or allowed"
        )
        raise NothingMatched(f"no language backend to run: {why}; see dsl-bench list")
    env = environment.collect()
    target = _target(request, env)
    run_id = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + "-" + secrets.token_hex(2)
    path = request.resume or request.out or Path("runs") / f"{run_id}.jsonl"
    earlier = store.read([path])[0] if request.resume else []
    with store.Writer(path) as writer:
        tee = _Tee(writer)
        tee.write(_header(run_id, request, env))
        with Session(catalog, tee, run_id, request.settings, show) as session:
            report = Report(path, tee.records, target=target)
            try:
                if target == "device":
                    with gpu_lock(str(env.get("gpu_uuid", "0"))):
                        for name, cases in work.items():
                            _on_device(session, request, name, cases, earlier, env, report)
                else:
                    for name, cases in work.items():
                        _offline(session, request, name, cases, earlier, target, report)
            except KeyboardInterrupt:
                report.interrupted = True
    return report


def tune(request: Request, show: Progressor | None = None) -> Report:
    """Search a winner for every contender on every case; no race."""
    request.race = False
    request.retune = request.resume is None
    return run(request, show)


def _target(request: Request, env: dict[str, Any]) -> str:
    has_gpu = bool(env.get("gpu"))
    if request.target == "auto":
        return "device" if has_gpu else "offline"
    if request.target == "device" and not has_gpu:
        raise UsageError(f"--target device: no GPU here ({env.get('gpu_reason', 'none found')})")
    return request.target


def _header(run_id: str, request: Request, env: dict[str, Any]) -> RunHeader:
    settings = dict(vars(request.settings))
    return RunHeader(
        schema=SCHEMA,
        run_id=run_id,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["dsl-bench", *sys.argv[1:]]),
        environment=env,
        settings=settings,
        revision=request.revision or str(env.get("revision", "")),
    )


def _on_device(
    session: Session,
    request: Request,
    workload: str,
    cases: list[CaseRef],
    earlier: list[Record],
    env: dict[str, Any],
    report: Report,
) -> None:
    gpu = str(env.get("gpu", ""))
    session.settings.arch = str(env.get("arch", "sm_90a"))
    known = store.read(request.winners)[0] if request.winners and not request.retune else []
    memory = Memory.of(known, session.catalog, gpu, earlier)
    runner = Runner(session, workload, memory, gpu)
    rivals = contenders(session.catalog, workload, request.backends, request.kernels)
    limit = session.settings.trials if session.settings.strategy == "random" else -1
    able = runner.prepare(cases, rivals, limit)
    try:
        runner.prefetch(cases, able)
        runner.tune(cases, able, session.settings.trials, again=request.retune)
        if request.race:
            runner.race(cases, able, request.regimes, session.settings.processes)
    finally:
        report.unfinished += runner.unfinished
        report.failed += runner.failed
        report.held += runner.held
        runner.finish()


def _offline(
    session: Session,
    request: Request,
    workload: str,
    cases: list[CaseRef],
    earlier: list[Record],
    target: str,
    report: Report,
) -> None:
    catalog = session.catalog
    languages = [n for n, (_, b) in catalog.backends().items() if b.role == "language"]
    backends = list(request.backends) or languages
    if target in ("offline", "interpret"):
        info = catalog.workload(workload)[1]
        chosen = [c for c in cases if "smoke" in c.groups or "own" in c.groups]
        smoke = chosen or [c for c in info.cases if "smoke" in c.groups]
        failed, unfinished = offline.interpret(session, workload, smoke, backends, earlier, request.kernels)
        report.failed += failed
        report.unfinished += unfinished
    if target in ("offline", "compile"):
        limit = session.settings.trials if target == "compile" else 1
        report.failed += offline.compile_all(session, workload, cases, backends, limit, request.kernels)
    if target == "offline":
        vendors = [n for n, (_, b) in catalog.backends().items() if b.role == "vendor"]
        offline.no_device(
            session, workload, [*backends, *vendors], "no GPU", "run on a machine with a Hopper GPU"
        )
