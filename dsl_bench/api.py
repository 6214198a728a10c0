"""Runs and searches as functions: what the command line and notebooks call."""

from __future__ import annotations

import fnmatch
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dsl_bench import catalog as catalogs
from dsl_bench import environment, offline, store
from dsl_bench.catalog import Catalog
from dsl_bench.contest import Memory, contenders
from dsl_bench.errors import DslBenchError, NothingMatched, UsageError, unknown
from dsl_bench.headstart import HeadStart, gpu_lock
from dsl_bench.jobs import KernelInfo, WorkloadInfo
from dsl_bench.records import (
    REGIMES,
    SCHEMA,
    CaseRef,
    Compiled,
    Failure,
    Record,
    Regime,
    RunHeader,
    Skip,
)
from dsl_bench.runner import Runner
from dsl_bench.session import Progressor, Session, Settings

TargetChoice = Literal["auto", "device", "interpret", "compile"]


@dataclass
class Request:
    """What to run. Empty selections mean everything (backends, kernels) or the quick group (cases)."""

    workloads: Sequence[str] = ()
    groups: Sequence[str] = ()
    patterns: Sequence[str] = ()
    own_cases: Sequence[dict[str, str]] = ()
    #: where each own case was read, for the message about a bad one
    own_where: Sequence[str] = ()
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
    #: lines of the resumed file that could not be read
    problems: list[str] = field(default_factory=list)
    #: the names of the cases behind each compiled artifact's key
    compiled_for: dict[str, list[str]] = field(default_factory=dict)


class _Tee:
    """Writes to the results file and keeps the records for the table at the end.

    What a resumed file says already (refusals, artifacts) is not written again."""

    def __init__(self, writer: store.Writer, gpu: str = "", earlier: Sequence[Record] = ()) -> None:
        self._writer = writer
        self.records: list[Record] = []
        here = {r.run_id for r in earlier if isinstance(r, RunHeader) and r.environment.get("gpu", "") == gpu}
        self._said = {
            said
            for r in earlier
            if getattr(r, "run_id", None) in here and (said := _repeatable(r)) is not None
        }

    def write(self, record: Record) -> None:
        """On disk first, then kept."""
        if _repeatable(record) not in self._said:
            self._writer.write(record)
            self.records.append(record)


def _repeatable(record: Record) -> tuple[str, ...] | None:
    """What a record says whichever run says it; None for those that each run adds."""
    match record:
        case Skip():
            return ("skip", record.workload, record.case, record.backend, record.kernel, record.reason)
        case Compiled() if record.status == "ok":
            return ("compile", record.key, record.toolchain)
        case _:
            return None


def work_of(catalog: Catalog, request: Request) -> dict[str, list[CaseRef]]:
    """The cases that a request means, by workload. Fills in the backends that its kernels imply.

    Raises UsageError for what does not exist or go together, NothingMatched where nothing is left."""
    for name in request.backends:
        catalog.backend(name)
    kernels = [_kernel(catalog, name) for name in request.kernels]
    implied = list(dict.fromkeys(k.id.partition("/")[0] for k in kernels))
    for name in implied:
        catalog.backend(name)
    _same_backends(request, implied)
    request.backends = request.backends or implied
    work = _cases_by_workload(catalog, request, [k.workload for k in kernels])
    for kernel in kernels:
        if kernel.workload not in work:
            raise UsageError(f"kernel {kernel.id} does {kernel.workload}, not {', '.join(work)}")
    if not any(b.role == "language" for _, b in catalog.backends().values()):
        why = ", ".join(f"{d.origin.name} ({d.state})" for d in catalog.failed)
        why = why or "none is installed or allowed"
        raise NothingMatched(f"no language backend to run: {why}; see dsl-bench list")
    return work


def _kernel(catalog: Catalog, name: str) -> KernelInfo:
    kernels = catalog.kernels()
    if name in kernels:
        return kernels[name]
    owner = catalog.backends().get(name.partition("/")[0])
    if owner is not None and not any(t.ready for t in owner[1].targets.values()):
        why = "; ".join(dict.fromkeys(t.reason for t in owner[1].targets.values()))
        raise UsageError(f"kernel {name!r}: the backend {owner[1].name} is not ready here: {why}")
    raise unknown("kernel", name, kernels, catalog.failure_note())


def _same_backends(request: Request, implied: Sequence[str]) -> None:
    if not request.kernels or not request.backends:
        return
    given = ", ".join(request.kernels)
    for name in request.backends:
        if name not in implied:
            raise UsageError(f"--backend {name}: none of the kernels given ({given}) is of this backend")
    for name in implied:
        if name not in request.backends:
            raise UsageError(f"--kernel {given}: the backend {name} is not among those given")


def _cases_by_workload(
    catalog: Catalog, request: Request, implied: Sequence[str]
) -> dict[str, list[CaseRef]]:
    """Workloads that were named must each have a case; of those that were not, the ones that have some do."""
    names = list(dict.fromkeys(request.workloads or implied)) or sorted(catalog.workloads())
    if not names:
        raise NothingMatched("no workload is installed")
    if len(names) > 1 and request.own_cases:
        raise UsageError(f"own sizes are sizes of one workload: name it, one of {', '.join(names)}")
    work: dict[str, list[CaseRef]] = {}
    refused: list[DslBenchError] = []
    for name in names:
        try:
            work[name] = cases_of(catalog, name, _share(catalog, request, name, names))
        except (UsageError, NothingMatched) as fault:
            if request.workloads or len(names) == 1:
                raise
            refused.append(fault)
    if not work:
        known = sorted({g for _, w in catalog.workloads().values() for g in catalogs.groups_of(w)})
        for group in request.groups:
            if group not in known:
                raise unknown("group", group, known)
        raise NothingMatched("; ".join(str(fault) for fault in refused))
    return work


def _share(catalog: Catalog, request: Request, workload: str, names: Sequence[str]) -> Request:
    """What a request over several workloads asks of one: not groups or patterns that only others know."""
    infos = {name: catalog.workload(name)[1] for name in names}

    def meant(given: Sequence[str], known: Callable[[WorkloadInfo, str], bool], what: str) -> list[str]:
        kept = [x for x in given if known(infos[workload], x) or not any(known(i, x) for i in infos.values())]
        if given and not kept:
            raise NothingMatched(f"no {what} of {workload} is meant by {', '.join(given)}")
        return kept

    def has_group(info: WorkloadInfo, group: str) -> bool:
        return group in catalogs.groups_of(info)

    def has_case(info: WorkloadInfo, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(c.name, pattern) for c in info.cases)

    groups = meant(request.groups, has_group, "group")
    return replace(request, groups=groups, patterns=meant(request.patterns, has_case, "case"))


def cases_of(catalog: Catalog, workload: str, request: Request) -> list[CaseRef]:
    """The cases a request means: named ones, the user's own, or the quick group."""
    origin, info = catalog.workload(workload)
    known = {c.name for c in info.cases}
    names = [p for p in request.patterns if p not in known and not set(p) & set("*?[")]
    chosen: list[CaseRef] = []
    if request.own_cases or names:
        chosen += catalogs.own_cases(origin, list(request.own_cases), request.own_where, names)
    own = {c.name for c in chosen}
    patterns = [p for p in request.patterns if p not in own]
    if request.groups or patterns or not chosen:
        groups = request.groups or ([] if patterns else ["quick"])
        chosen += catalogs.select(info, groups, patterns)
    return list({c.name: c for c in chosen}.values())


def run(request: Request, show: Progressor | None = None, catalog: Catalog | None = None) -> Report:
    """Do what the request says with what this machine has; see :class:`Report`. ``catalog`` is for those who
    loaded the one of the request's plugins already."""
    show = show or Progressor()
    with HeadStart() as head:
        return _run(request, show, catalog, head)


def _run(request: Request, show: Progressor, catalog: Catalog | None, head: HeadStart) -> Report:
    if request.resume and request.out and request.resume.resolve() != request.out.resolve():
        raise UsageError(f"--resume {request.resume} goes on in that file: leave --out {request.out} away")
    missing = [p for p in request.winners if not Path(p).exists()]
    if missing:
        raise UsageError(f"no results to take winners from at {missing[0]}")
    _start_ahead(request, head)
    with ThreadPoolExecutor(1) as threads:
        machine = threads.submit(environment.collect)
        catalog = catalog or catalogs.load(request.plugins, show.say, nursery=head.nursery)
    head.mark("described")
    work = work_of(catalog, request)
    catalogs.require_cache()
    env = machine.result()
    target = _target(request, env)
    run_id = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + "-" + secrets.token_hex(2)
    path = request.resume or request.out or Path("runs") / f"{run_id}.jsonl"
    earlier, problems = store.read([path]) if request.resume else ([], [])
    with store.Writer(path) as writer:
        tee = _Tee(writer, str(env.get("gpu", "")), earlier)
        tee.write(_header(run_id, request, env))
        with Session(catalog, tee, run_id, request.settings, show, head) as session:
            report = Report(path, tee.records, target=target, problems=[str(p) for p in problems])
            report.failed += _note_problems(session, request)
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
            report.failed += session.plan_failures
    return report


def _start_ahead(request: Request, head: HeadStart) -> None:
    """Needed whatever the plugins say: torch on the device worker, and the languages that are named."""
    if request.target in ("auto", "device"):
        head.torch()
    if request.target != "interpret":
        head.languages(request.backends or [k.partition("/")[0] for k in request.kernels])


def _note_problems(session: Session, request: Request) -> int:
    """A row for every plugin that could not be used as a whole; returns how many of them are failures.

    A failure is a kernel file of a backend that was to run, or a plugin file that was given. Where kernels
    were named, a broken file beside theirs is none."""
    count = 0
    for row in session.catalog.failed:
        name = row.backend.name if row.backend else row.origin.name
        if request.backends and row.origin.kind == "backend" and name not in request.backends:
            continue
        if row.origin.kind == "file" or (row.backend is not None and not request.kernels):
            session.sink.write(
                Failure(session.run_id, "", "", name, "", "unavailable", "describe", row.reason)
            )
            count += 1
        else:
            session.sink.write(Skip(session.run_id, "", "", name, "", "unavailable", row.reason))
    return count


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
    driver = str(env.get("driver", ""))
    session.smem_limit = int(env.get("smem_block_bytes") or session.smem_limit)
    memory = Memory.of(known, session.catalog, gpu, earlier, driver)
    runner = Runner(session, workload, memory, gpu, driver)
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
    backends = _with_kernels(session, workload, list(request.backends) or languages)
    if target in ("offline", "interpret"):
        info = catalog.workload(workload)[1]
        chosen = [c for c in cases if "smoke" in c.groups or "own" in c.groups]
        smoke = chosen or [c for c in info.cases if "smoke" in c.groups]
        failed, unfinished = offline.interpret(session, workload, smoke, backends, earlier, request.kernels)
        report.failed += failed
        report.unfinished += unfinished
    if target in ("offline", "compile"):
        limit = session.settings.trials if target == "compile" else 1
        report.failed += offline.compile_all(
            session, workload, cases, backends, limit, request.kernels, report.compiled_for
        )
    if target == "offline":
        baselines = dict.fromkeys(k.partition("/")[0] for k in catalog.workload(workload)[1].baselines)
        vendors = [name for name in baselines if name in catalog.backends()]
        everyone = list(dict.fromkeys([*backends, *vendors]))
        offline.no_device(session, workload, everyone, "no GPU", "run on a machine with a Hopper GPU")


def _with_kernels(session: Session, workload: str, backends: Sequence[str]) -> list[str]:
    """The backends that hold a kernel of the workload, or cannot say; a row says why another is left out."""
    able = []
    for name in backends:
        held = session.catalog.backend(name)[1].kernels
        if held and not any(k.workload == workload for k in held):
            reason = f"{name} has no kernel for {workload}"
            session.sink.write(Skip(session.run_id, workload, "", name, "", "unavailable", reason))
        else:
            able.append(name)
    return able
