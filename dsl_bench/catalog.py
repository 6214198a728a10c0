"""What is installed, as data: every plugin described by a worker, so that the parent imports none of them.

Descriptions are cached by a fingerprint of sources and versions, but never one with a problem, and targets
that were not ready are asked again each time. A plugin that hangs, exits or aborts while it is described
becomes a row with that reason.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

from dsl_bench import claims, jobs, keeping, registry
from dsl_bench.errors import NothingMatched, UsageError, unknown
from dsl_bench.jobs import BackendInfo, Described, KernelInfo, Origin, TargetInfo, WorkloadInfo
from dsl_bench.nursery import Nursery, Zygote
from dsl_bench.pool import Outcome, Worker
from dsl_bench.records import CaseRef

#: importing a language on a busy machine takes tens of seconds; a probe that hangs must not take for ever
DESCRIBE_SECONDS = 90.0


def cache_dir() -> Path:
    """Where artifacts and descriptions are kept (``DSL_BENCH_CACHE_DIR`` or the user's cache folder).

    Absolute: a worker is told of it, where a plugin may have changed the working directory."""
    given = os.environ.get("DSL_BENCH_CACHE_DIR")
    return Path(given).absolute() if given else Path(platformdirs.user_cache_dir("dsl_bench"))


def require_cache() -> None:
    """Raises UsageError where artifacts could not be kept, before anything is compiled in vain."""
    folder = cache_dir() / "artifacts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        raise UsageError(
            f"cannot write to the cache {cache_dir()}: {fault.strerror or fault}; "
            "DSL_BENCH_CACHE_DIR names another folder"
        ) from fault
    _drop_halves(folder)


def _drop_halves(folder: Path) -> None:
    """Remove what compiles that were killed left there, a day later: by then nobody is at them."""
    for path in folder.glob(".*-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86400:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Catalog:
    """Every plugin's description, with look-ups that explain themselves when they fail."""

    described: tuple[Described, ...]

    @property
    def extra(self) -> tuple[Origin, ...]:
        """Origins that add kernels to somebody else's backend."""
        return tuple(d.origin for d in self.described if d.state == "ready" and d.kernels)

    @property
    def failed(self) -> list[Described]:
        """Plugins that could not be used, or not as a whole (state ``failed``, with the reason); none that a
        file replaces."""
        rows = []
        for d in self.described:
            if d.state == claims.REPLACED:
                continue
            problems = [*(d.backend.problems if d.backend else ()), *d.problems]
            if d.state != "ready":
                rows.append(d)
            elif problems:
                rows.append(msgspec.structs.replace(d, state="failed", reason="; ".join(problems)))
        return rows

    def backends(self) -> dict[str, tuple[Origin, BackendInfo]]:
        """Backends that loaded, by name."""
        return {
            d.backend.name: (d.origin, d.backend) for d in self.described if d.backend and d.state == "ready"
        }

    def workloads(self) -> dict[str, tuple[Origin, WorkloadInfo]]:
        """Workloads that loaded, by name."""
        return {
            d.workload.name: (d.origin, d.workload)
            for d in self.described
            if d.workload and d.state == "ready"
        }

    def kernels(self) -> dict[str, KernelInfo]:
        """Every kernel by id."""
        table = {k.id: k for _, info in self.backends().values() for k in info.kernels}
        for described in self.described:
            if described.state == "ready":
                # what a backend has under a name stays: the plugin's own row says what was left out
                table = {k.id: k for k in described.kernels} | table
        return table

    def hashes(self) -> dict[str, str]:
        """Kernel id to the hash of its source as it is now."""
        return {k.id: k.hash for k in self.kernels().values()}

    def backend(self, name: str) -> tuple[Origin, BackendInfo]:
        """The backend called ``name``; the error names the closest ones and what failed to load."""
        table = self.backends()
        if name not in table:
            allowed = os.environ.get(registry.ALLOW)
            note = "" if allowed is None else f"({registry.ALLOW}={allowed!r} leaves out all others) "
            raise unknown("backend", name, table, (note + self.failure_note()).strip())
        return table[name]

    def workload(self, name: str) -> tuple[Origin, WorkloadInfo]:
        """The workload called ``name``."""
        table = self.workloads()
        if name not in table:
            raise unknown("workload", name, table, self.failure_note())
        return table[name]

    def failure_note(self) -> str:
        """Which plugins failed to load, as the end of an error's text; empty where none did."""
        names = ", ".join(f"{d.origin.name} ({d.state})" for d in self.failed)
        return f"(not loaded: {names}; see dsl-bench list)" if names else ""


def load(
    paths: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    probe: bool = True,
    nursery: Nursery | None = None,
) -> Catalog:
    """Describe every installed plugin and the files at ``paths``.

    ``probe`` False is for those who only read: targets that were not ready are not asked again. Backends that
    have a process in ``nursery`` are described in forks of it."""
    found = registry.origins(paths)
    if not any(o.kind in ("backend", "workload") for o in found) and registry.ALLOW not in os.environ:
        raise UsageError("no plugin is installed, not even our own: run `pip install -e .` again")
    clashes = registry.duplicates(found)
    unique = [o for o in found if (o.kind, o.name) not in clashes]
    with contextlib.closing(_Describer(note, probe, nursery)) as describer:
        describer.foresee(unique)
        described = _describe_all(unique, describer)
    for (kind, name), owners in clashes.items():
        who = " and ".join(f"{o.dist} ({o.value})" for o in owners)
        described += [Described(o, "duplicate", f"{kind} {name!r} is claimed by {who}") for o in owners]
    return Catalog(tuple(claims.settled(described)))


def cases() -> list[CaseRef]:
    """Every case of the installed workloads, in their order, which no backend is asked for."""
    found = [o for o in registry.origins(()) if o.kind == "workload"]
    described = _describe_all(found, _Describer(lambda text: None, False))
    return [c for _, w in Catalog(tuple(described)).workloads().values() for c in w.cases]


def _describe_all(found: Sequence[Origin], describer: _Describer) -> list[Described]:
    """Descriptions in the order of ``found``: first of those that may add kernels, then of the backends with
    what was added to them."""
    rows: dict[Origin, Described] = {}

    def added(backend: str) -> tuple[Origin, ...]:
        prefix = f"{backend}/"
        adds = (o for o, d in adders.items() if d.state == "ready")
        return tuple(o for o in adds if any(k.id.startswith(prefix) for k in adders[o].kernels))

    def describe(origin: Origin) -> Described:
        # an entry point is named after its backend, or else the second look puts it right
        first = rows[origin].backend if origin in rows else None
        name = first.name if first else origin.name
        row = describer.describe(origin, added(name))
        if row.backend is not None and added(row.backend.name) != added(name):
            row = describer.describe(origin, added(row.backend.name))
        return row

    with ThreadPoolExecutor(max_workers=min(max(4, os.cpu_count() or 1), len(found) or 1)) as threads:
        try:
            files = [o for o in found if o.kind in ("kernel", "file")]
            plain = [o for o in found if o.kind == "workload"]
            first, second = (threads.map(lambda o: describer.describe(o, ()), row) for row in (files, plain))
            adders = claims.without_replaced(dict(zip(files, first, strict=True)))
            rows |= adders
            again = [o for o, d in adders.items() if d.backend is not None and added(d.backend.name)]
            rest = [o for o in found if o.kind != "workload" and (o not in rows or o in again)]
            rows |= dict(zip(rest, threads.map(describe, rest), strict=True))
            rows |= dict(zip(plain, second, strict=True))
        except BaseException:
            describer.stop.set()
            raise
    return [rows[o] for o in found]


class _Describer:
    """Describes origins in workers, or from the cache."""

    def __init__(self, note: Callable[[str], None], probe: bool, nursery: Nursery | None = None) -> None:
        self.stop = threading.Event()
        self._nursery = nursery or Nursery()
        self._note = note
        self._probe = probe
        self._prints = registry.Fingerprints()
        self._probers: dict[str, tuple[threading.Lock, Worker]] = {}
        self._starting = threading.Lock()

    def foresee(self, origins: Iterable[Origin]) -> None:
        """Start the processes that will be asked what forks cannot see."""
        for origin in origins:
            if self._nursery.of(origin) is not None:
                self._prober(origin)[1].start()

    def describe(self, origin: Origin, extra: tuple[Origin, ...]) -> Described:
        """What ``origin`` holds; a backend with the kernels that ``extra`` add to it."""
        extra = extra if origin.kind in ("backend", "file") else ()
        path = cache_dir() / "described" / f"{self._cache_name(origin, extra)}.json"
        held = keeping.read(path)
        if held is not None:
            held = self._asked_again(held)
        if held is not None:
            return held
        self._note(f"reading {origin.kind} {origin.name}")
        described = self._described_in(origin, extra, self._zygote_of(origin))
        if keeping.worth(described):
            keeping.write(path, described)
        return described

    def _asked_again(self, held: Described) -> Described | None:
        """``held`` with a fresh word on the targets that were not ready; None: describe it anew."""
        info = held.backend
        unready = tuple(t for t, state in info.targets.items() if not state.ready) if info else ()
        if info is None or not unready or not self._probe:
            return held
        outcome = self._ask(jobs.ProbeJob(held.origin, unready))
        if outcome.done is None:
            return None
        fresh = msgspec.json.decode(outcome.done.value, type=dict[str, TargetInfo])
        return msgspec.structs.replace(
            held, backend=msgspec.structs.replace(info, targets=info.targets | fresh)
        )

    def _zygote_of(self, origin: Origin) -> Zygote | None:
        return self._nursery.only() if origin.kind == "file" else self._nursery.of(origin)

    def _described_in(self, origin: Origin, extra: tuple[Origin, ...], zygote: Zygote | None) -> Described:
        worker = _describer(zygote)
        try:
            outcome = worker.run(jobs.Describe(origin, extra), DESCRIBE_SECONDS, stop=self.stop)
        finally:
            worker.kill()
        described = _from_outcome(origin, outcome)
        if not worker.forked or (outcome.refused and outcome.refused.check != "process"):
            return described
        # a fork does not see the GPU: what it found not ready is asked of a process that does
        seen = self._asked_again(described) if outcome.done else None
        return seen or self._described_in(origin, extra, None)

    def _ask(self, job: jobs.ProbeJob) -> Outcome:
        """Ask in a process that the backends of one distribution share: most of what a probe takes is the
        start of Python and of torch. A backend that dies or hangs there is described anew, by itself."""
        lock, worker = self._prober(job.origin)
        with lock:
            return worker.run(job, DESCRIBE_SECONDS, stop=self.stop)

    def _prober(self, origin: Origin) -> tuple[threading.Lock, Worker]:
        owner = origin.value if origin.kind == "file" else origin.dist
        with self._starting:
            return self._probers.setdefault(owner, (threading.Lock(), _describer()))

    def close(self) -> None:
        """End the shared processes."""
        for _, worker in self._probers.values():
            worker.kill()

    def _cache_name(self, origin: Origin, extra: tuple[Origin, ...]) -> str:
        prints = "-".join(self._prints.of(o) for o in (origin, *extra))
        name = re.sub(r"\W+", "_", origin.name)[:60]
        return f"{origin.kind}-{name}-{hashlib.sha256(prints.encode()).hexdigest()[:32]}"


def _describer(zygote: Zygote | None = None) -> Worker:
    return Worker("describe", {"CUDA_MODULE_LOADING": "LAZY"}, zygote)


def _from_outcome(origin: Origin, outcome: Outcome) -> Described:
    if outcome.done is not None:
        return msgspec.json.decode(outcome.done.value, type=Described)
    refused = outcome.refused
    reason = refused.reason if refused else "no answer"
    return Described(origin, "failed", reason, refused.traceback if refused else "")


def own_cases(
    origin: Origin, given: list[dict[str, str]], where: Sequence[str] = (), names: Sequence[str] = ()
) -> list[CaseRef]:
    """The user's own sizes as cases of the workload at ``origin``; ``where`` says where each was read.

    ``names`` are those that results show for such sizes; one that no size has is left out."""
    worker = Worker("describe")
    try:
        outcome = worker.run(jobs.ParseCases(origin, given, list(where), list(names)), DESCRIBE_SECONDS)
    finally:
        worker.kill()
    if outcome.done is None:
        raise UsageError(outcome.refused.reason if outcome.refused else "the case could not be read")
    return msgspec.json.decode(outcome.done.value, type=list[CaseRef])


def select(info: WorkloadInfo, groups: Sequence[str], patterns: Sequence[str]) -> list[CaseRef]:
    """The named cases in any of ``groups`` whose name matches any of ``patterns`` (all, where none given).

    Raises NothingMatched where a pattern, or all together, match none."""
    known = groups_of(info)
    for group in groups:
        if group not in known:
            raise unknown("group", group, known, f"(workload {info.name})")
    chosen = [c for c in info.cases if not groups or set(groups) & set(c.groups)]
    within = f" in groups {' '.join(groups)}" if groups else ""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(c.name, pattern) for c in chosen):
            raise NothingMatched(f"no case of {info.name} matches {pattern!r}{within}")
    if patterns:
        chosen = [c for c in chosen if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]
    if not chosen:
        raise NothingMatched(f"{info.name} has no case{within}")
    return chosen


def groups_of(info: WorkloadInfo) -> list[str]:
    """The names of a workload's groups."""
    return sorted({g for c in info.cases for g in c.groups})
