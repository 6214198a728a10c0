"""What is installed, as data: every plugin described by a worker, so that the parent imports none of them.

Descriptions are cached by a fingerprint of sources and versions; a plugin that hangs, exits or aborts while
it is described becomes a row with that reason.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

from dsl_bench import jobs, registry
from dsl_bench.errors import NothingMatched, UsageError, unknown
from dsl_bench.jobs import BackendInfo, Described, KernelInfo, Origin, WorkloadInfo
from dsl_bench.pool import Outcome, Worker
from dsl_bench.records import CaseRef

#: importing a language on a busy machine takes tens of seconds; a probe that hangs must not take for ever
DESCRIBE_SECONDS = 90.0


def cache_dir() -> Path:
    """Where artifacts and descriptions are kept (``DSL_BENCH_CACHE_DIR`` or the user's cache folder)."""
    given = os.environ.get("DSL_BENCH_CACHE_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("dsl_bench"))


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
        """Plugins that could not be used at all."""
        return [d for d in self.described if d.state != "ready"]

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
                table.update({k.id: k for k in described.kernels})
        return table

    def hashes(self) -> dict[str, str]:
        """Kernel id to the hash of its source as it is now."""
        return {k.id: k.hash for k in self.kernels().values()}

    def backend(self, name: str) -> tuple[Origin, BackendInfo]:
        """The backend called ``name``; the error names the closest ones and what failed to load."""
        table = self.backends()
        if name not in table:
            raise unknown("backend", name, table, self._failure_note())
        return table[name]

    def workload(self, name: str) -> tuple[Origin, WorkloadInfo]:
        """The workload called ``name``."""
        table = self.workloads()
        if name not in table:
            raise unknown("workload", name, table, self._failure_note())
        return table[name]

    def _failure_note(self) -> str:
        names = ", ".join(f"{d.origin.name} ({d.state})" for d in self.failed)
        return f"(not loaded: {names}; see dsl-bench list)" if names else ""


def load(paths: Sequence[str] = (), note: Callable[[str], None] = lambda text: None) -> Catalog:
    """Describe every installed plugin and the files at ``paths``."""
    found = registry.origins(paths)
    if not any(o.kind in ("backend", "workload") for o in found) and "DSL_BENCH_BACKENDS" not in os.environ:
        raise UsageError("no plugin is installed, not even our own: run `pip install -e .` again")
    clashes = registry.duplicates(found)
    adders = tuple(o for o in found if o.kind in ("kernel", "file") and (o.kind, o.name) not in clashes)
    unique = [o for o in found if (o.kind, o.name) not in clashes]
    with ThreadPoolExecutor(max_workers=min(4, len(unique) or 1)) as threads:
        described = list(threads.map(lambda o: _describe(o, adders, note), unique))
    for (kind, name), owners in clashes.items():
        who = " and ".join(f"{o.dist} ({o.value})" for o in owners)
        described += [Described(o, "duplicate", f"{kind} {name!r} is claimed by {who}") for o in owners]
    return Catalog(tuple(_without_twins(described)))


def _without_twins(described: Iterable[Described]) -> list[Described]:
    """Two origins with different entry names may still bring backends of one name."""
    owners: dict[str, list[Described]] = {}
    rows = list(described)
    for row in rows:
        if row.backend is not None and row.state == "ready":
            owners.setdefault(row.backend.name, []).append(row)
    clashing = {id(row): rows_ for rows_ in owners.values() if len(rows_) > 1 for row in rows_}
    result = []
    for row in rows:
        if id(row) in clashing:
            who = " and ".join(f"{r.origin.dist} ({r.origin.value})" for r in clashing[id(row)])
            row = msgspec.structs.replace(
                row, state="duplicate", reason=f"one backend name, two owners: {who}"
            )
        result.append(row)
    return result


def _describe(origin: Origin, adders: tuple[Origin, ...], note: Callable[[str], None]) -> Described:
    extra = adders if origin.kind == "backend" else ()
    path = cache_dir() / "described" / f"{_cache_name(origin, extra)}.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Described)
    note(f"reading {origin.kind} {origin.name}")
    worker = Worker("describe", {"CUDA_MODULE_LOADING": "LAZY"})
    try:
        outcome = worker.run(jobs.Describe(origin, extra), DESCRIBE_SECONDS)
    finally:
        worker.kill()
    described = _from_outcome(origin, outcome)
    if described.state == "ready":
        _write(path, msgspec.json.encode(described))
    return described


def _cache_name(origin: Origin, extra: tuple[Origin, ...]) -> str:
    prints = [registry.fingerprint(o) for o in (origin, *extra)]
    return "-".join([origin.kind, origin.name, *prints])[:200]


def _from_outcome(origin: Origin, outcome: Outcome) -> Described:
    if outcome.done is not None:
        return msgspec.json.decode(outcome.done.value, type=Described)
    refused = outcome.refused
    reason = refused.reason if refused else "no answer"
    return Described(origin, "failed", reason, refused.traceback if refused else "")


def _write(path: Path, data: bytes) -> None:
    """Best effort: a cache that cannot be written costs time only."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)


def own_cases(origin: Origin, given: list[dict[str, str]]) -> list[CaseRef]:
    """The user's own sizes as cases of the workload at ``origin``."""
    worker = Worker("describe")
    try:
        outcome = worker.run(jobs.ParseCases(origin, given), DESCRIBE_SECONDS)
    finally:
        worker.kill()
    if outcome.done is None:
        raise UsageError(outcome.refused.reason if outcome.refused else "the case could not be read")
    return msgspec.json.decode(outcome.done.value, type=list[CaseRef])


def parse_case_text(text: str) -> dict[str, str]:
    """``m=4096,n=5120`` as a mapping."""
    pairs = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UsageError(f"--case {text!r}: {part!r} is not name=value")
        pairs[key.strip()] = value.strip()
    return pairs


def read_case_file(path: Path) -> list[dict[str, str]]:
    """Cases from a CSV file with a header line; empty cells are left out."""
    import csv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [{k.strip(): v.strip() for k, v in row.items() if k and v} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"--cases {path}: {fault}") from fault
    if not rows:
        raise UsageError(f"--cases {path}: no case under the header line")
    return rows


def select(info: WorkloadInfo, groups: Sequence[str], patterns: Sequence[str]) -> list[CaseRef]:
    """The named cases in any of ``groups`` whose name matches any of ``patterns`` (all, where none given)."""
    known = sorted({g for c in info.cases for g in c.groups})
    for group in groups:
        if group not in known:
            raise unknown("group", group, known, f"(workload {info.name})")
    chosen = [c for c in info.cases if not groups or set(groups) & set(c.groups)]
    if patterns:
        chosen = [c for c in chosen if any(fnmatch.fnmatch(c.name, p) for p in patterns)]
    if not chosen:
        raise NothingMatched(
            f"no case of {info.name} matches groups {' '.join(groups) or 'any'}, "
            f"patterns {' '.join(patterns) or 'any'}"
        )
    return chosen
