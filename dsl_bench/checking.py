"""`dsl-bench check` on files that are in no package: what is in them, whether it is right, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dsl_bench import api, jobs
from dsl_bench import catalog as catalogs
from dsl_bench.catalog import Catalog
from dsl_bench.errors import PluginError, UsageError
from dsl_bench.jobs import Described
from dsl_bench.pool import Worker
from dsl_bench.session import Progressor

Row = dict[str, Any]
#: the longest that the references of a workload's smoke cases may take together
EXAMINE_SECONDS = 120.0


@dataclass
class Checked:
    """Rows about the files themselves, and the reports of the runs of their kernels (correctness, then with a
    GPU the race)."""

    rows: list[Row] = field(default_factory=list)
    report: api.Report | None = None
    failed: int = 0


def split_files(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Workloads, and files (told apart by ``.py``); UsageError for a file that is not there."""
    files = [name for name in given if name.endswith(".py")]
    for name in files:
        if not Path(name).is_file():
            raise UsageError(f"no file {name!r}")
    return [name for name in given if name not in files], files


def check_files(
    request: api.Request, files: Sequence[str], show: Progressor | None = None, race: bool = True
) -> Checked:
    """Check what ``files`` bring: workloads, backends, kernels. With a GPU, correct kernels also race.

    ``request`` has the files among its plugins. Raises PluginError for a file that cannot be used at all."""
    show = show or Progressor()
    catalog = catalogs.load(request.plugins, show.say)
    places = {str(Path(name).resolve()) for name in files}
    checked = Checked()
    for described in catalog.described:
        if described.origin.value in places:
            _usable(described)
            checked.rows += _workload_rows(described) + _backend_rows(described)
    checked.failed = sum(row["status"] == "failed" for row in checked.rows)
    _known_names(catalog, places)
    mine = [k.id for k in catalog.kernels().values() if k.origin.value in places]
    request.kernels = request.kernels or mine
    if request.kernels:
        checked.report = _run(request, catalog, show, race)
        checked.failed += checked.report.failed
    return checked


def check_installed(request: api.Request, show: Progressor | None = None) -> Checked:
    """Correctness alone, of what the request selects: the smoke cases unless it names some."""
    if not _chosen(request):
        request.groups = ["smoke"]
    report = api.run(_correctness(request), show)
    return Checked(report=report, failed=report.failed)


def _chosen(request: api.Request) -> bool:
    return bool(request.groups or request.patterns or request.own_cases)


def _correctness(request: api.Request) -> api.Request:
    """No race, and as many trials as a backend has kernels: each shows its default."""
    settings = replace(request.settings, trials=8, trial_seconds=0.001)
    return replace(request, race=False, retune=True, settings=settings)


def _usable(described: Described) -> None:
    if described.state != "ready":
        raise PluginError(
            f"{described.origin.value}: {described.reason} "
            f"(dsl-bench list --verbose --plugin {described.origin.value} shows where)"
        )


def _known_names(catalog: Catalog, places: set[str]) -> None:
    """UsageError for a kernel of these files whose language or workload nobody has."""
    for kernel in catalog.kernels().values():
        if kernel.origin.value in places:
            try:
                catalog.backend(kernel.id.partition("/")[0])
                catalog.workload(kernel.workload)
            except UsageError as fault:
                raise UsageError(f"kernel {kernel.id} of {kernel.origin.value}: {fault}") from fault


def _row(what: str, case: str, kernel: str, status: str, text: str) -> Row:
    return {"what": what, "case": case, "kernel": kernel, "status": status, "result": text}


def _workload_rows(described: Described) -> list[Row]:
    info = described.workload
    if info is None:
        return []
    worker = Worker("describe")
    try:
        outcome = worker.run(jobs.ExamineWorkload(described.origin), EXAMINE_SECONDS)
    finally:
        worker.kill()
    if outcome.done is None:
        reason = outcome.refused.reason if outcome.refused else "no answer"
        return [_row("workload", "", info.name, "failed", reason)]
    found = msgspec.json.decode(outcome.done.value, type=list[tuple[str, str, str]])
    return [
        _row("workload", case, info.name, "failed" if wrong else "ok", wrong or seen)
        for case, wrong, seen in found
    ]


def _backend_rows(described: Described) -> list[Row]:
    info = described.backend
    if info is None:
        return []
    rows = []
    for name, target in info.targets.items():
        reason = target.reason + (f" ({target.hint})" if target.hint else "")
        state = "ok" if target.ready else "unavailable" if target.reason else "failed"
        text = reason or ("ready" if target.ready else "not ready, and probe() gives no reason")
        rows.append(_row(f"target {name}", "", info.name, state, text))
    return rows


def _run(request: api.Request, catalog: Catalog, show: Progressor, race: bool) -> api.Report:
    """Correctness; on a device, where everything held, also the race: of the cases that were asked for, or
    the quick ones."""
    chosen = _chosen(request)
    if not chosen:
        request.groups = ["smoke"]
    report = api.run(_correctness(request), show, catalog)
    if not race or report.target != "device" or report.failed or report.interrupted:
        return report
    full = request
    if not chosen:
        wanted = {k.workload for k in catalog.kernels().values() if k.id in request.kernels}
        quick = [
            name
            for name, (_, info) in catalog.workloads().items()
            if name in wanted and "quick" in catalogs.groups_of(info)
        ]
        if not quick:
            return report
        kept = [k for k in request.kernels if catalog.kernels()[k].workload in quick]
        full = replace(full, groups=["quick"], workloads=quick, kernels=kept)
    raced = api.run(replace(full, race=True, retune=False, out=None, resume=report.path), show, catalog)
    return _joined(report, raced)


def _joined(first: api.Report, then: api.Report) -> api.Report:
    """Two reports of one file as one."""
    return replace(
        then,
        records=[*first.records, *then.records],
        failed=first.failed + then.failed,
        held=first.held + then.held,
        compiled_for={**first.compiled_for, **then.compiled_for},
    )
