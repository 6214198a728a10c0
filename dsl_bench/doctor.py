"""What this machine can measure, and how well, ending in a verdict: fit or not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dsl_bench import catalog as catalogs
from dsl_bench import environment, jobs
from dsl_bench.catalog import Catalog
from dsl_bench.headstart import gpu_lock
from dsl_bench.pool import Worker
from dsl_bench.session import Progressor

DOCTOR_SECONDS = 120.0

Row = dict[str, Any]


def examine(plugins: Sequence[str], show: Progressor, quick: bool) -> tuple[list[Row], bool]:
    """Rows (what, value, verdict, note) and whether speed can be measured here."""
    env = environment.collect()
    catalog = catalogs.load(plugins, show.say)
    rows = [*_environment_rows(env), *_backend_rows(catalog)]
    if not env.get("gpu"):
        rows.append(_row("GPU", "none", "not fit", str(env.get("gpu_reason", "no NVIDIA driver answers"))))
        rows.append(
            _row("verdict", "not fit to measure speed", "not fit", "interpret and compile work where ready")
        )
        return rows, False
    with gpu_lock(str(env.get("gpu_uuid", "0"))):
        rows += _device_rows(show, quick)
    bad = [r["what"] for r in rows if r["verdict"] == "not fit"]
    text = f"not fit to measure speed: {', '.join(bad)}" if bad else "fit to measure"
    rows.append(_row("verdict", text, "not fit" if bad else "ok", ""))
    return rows, not bad


def _row(what: str, value: Any, verdict: str = "", note: str = "") -> Row:
    return {"what": what, "value": value, "verdict": verdict, "note": note}


def _environment_rows(env: dict[str, Any]) -> list[Row]:
    rows = []
    for key, value in env.items():
        if isinstance(value, dict):
            rows.append(_row(key, ", ".join(f"{k} {v}" for k, v in value.items())))
        elif key not in ("gpu_reason", "foreign"):
            rows.append(_row(key, value))
    for process in env.get("foreign", ()):
        rows.append(_row("foreign process", process, "not fit", "somebody else uses this GPU"))
    return rows


def _backend_rows(catalog: Catalog) -> list[Row]:
    rows = []
    for name, (_, info) in catalog.backends().items():
        for target, state in info.targets.items():
            if state.ready or info.role == "language" or target == "device":
                verdict = "ok" if state.ready else "missing"
                note = "" if state.ready else f"{state.reason} ({state.hint})"
                rows.append(
                    _row(f"{name}: {target}", "ready" if state.ready else "unavailable", verdict, note)
                )
    for described in catalog.failed:
        rows.append(_row(f"{described.origin.name}: plugin", described.state, "missing", described.reason))
    return rows


def _device_rows(show: Progressor, quick: bool) -> list[Row]:
    worker = Worker("device")
    try:
        outcome = worker.run(
            jobs.DoctorJob(quick),
            DOCTOR_SECONDS,
            lambda reply: show.say(reply.stage) if isinstance(reply, jobs.Progress) else None,
        )
    finally:
        worker.kill()
    if outcome.done is None:
        assert outcome.refused is not None
        return [_row("device", outcome.refused.status, "not fit", outcome.refused.reason)]
    return [_judged(r) for r in msgspec.json.decode(outcome.done.value, type=list[dict[str, Any]])]


def _judged(row: Row) -> Row:
    """A measured row with its verdict: ``limit`` is the greatest value that is fit."""
    limit = row.pop("limit", None)
    if limit is None:
        return {"verdict": "", "note": "", **row}
    row["note"] = f"{row.get('note', '')} limit {limit:g}".strip()
    row["verdict"] = "ok" if float(row["value"]) <= limit else "not fit"
    return row
