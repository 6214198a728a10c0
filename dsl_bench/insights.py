"""What a reader asks of a report: where the regime decides, who the baselines were, what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsl_bench.records import CaseRef, Compiled, Record, Tuned

Row = dict[str, Any]
#: why a case that no language raced has no number
NOT_YET = "not raced yet"
FLIPS: tuple[str, ...] = ("workload", "case", "cold", "sustained", "cold_order", "sustained_order")
BASELINES: tuple[str, ...] = ("workload", "group", "dtype", "regime", "baseline", "cases", "total")
COSTS: tuple[str, ...] = (
    "workload",
    "backend",
    "contenders",
    "trials",
    "failed",
    "tuning_seconds",
    "compiles",
    "compile_seconds",
    "kernels",
    "lines",
)
GAPS: tuple[str, ...] = ("workload", "case", "backend", "regime", "status", "reason")


def gaps(rows: Sequence[Row], cases: Iterable[CaseRef] = ()) -> list[Row]:
    """What has no fraction, and why: a row a case and language, and one for every case of ``cases`` that no
    language raced though others of its group were."""
    table: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        if row["fraction"] is None:
            key = (row["workload"], row["case"], row["backend"], row["status"], row["reason"])
            table.setdefault(key, {})[row["regime"]] = None
    found = [
        dict(zip(GAPS, (workload, case, backend, ", ".join(regimes), status, reason), strict=True))
        for (workload, case, backend, status, reason), regimes in table.items()
    ]
    groups = {(r["workload"], r["group"], r["dtype"]) for r in rows}
    raced = {(r["workload"], r["case"]) for r in rows}
    for case in cases:
        wanted = any((case.workload, g, case.dtype) in groups for g in case.groups)
        if wanted and (case.workload, case.name) not in raced:
            values = (case.workload, case.name, "all", "all", "missing", NOT_YET)
            found.append(dict(zip(GAPS, values, strict=True)))
    return found


def gap_lines(found: Iterable[Row]) -> list[str]:
    """:func:`gaps` as sentences, the cases that nobody raced together."""
    lines, waiting = [], dict[str, list[str]]()
    for gap in found:
        if gap["reason"] == NOT_YET:
            waiting.setdefault(gap["workload"], []).append(gap["case"])
        else:
            place = f"{gap['workload']} {gap['case']} in {gap['backend']}"
            lines.append(f"no number: {place} ({gap['regime']}): {gap['status']}: {gap['reason']}")
    return lines + [f"{NOT_YET}: {workload} {', '.join(names)}" for workload, names in waiting.items()]


def flips(rows: Sequence[Row]) -> list[Row]:
    """Cases whose fastest language in one regime is not that of the other, by intervals that do not touch."""
    table: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row["fraction"] is not None:
            key = (row["gpu"], row["workload"], row["case"])
            held = table.setdefault(key, {}).setdefault(row["regime"], [])
            if all(r["backend"] != row["backend"] for r in held):
                held.append(row)
    found = []
    for (_, workload, case), regimes in table.items():
        orders = {name: sorted(held, key=lambda r: -r["fraction"]) for name, held in regimes.items()}
        if set(orders) >= {"cold", "sustained"} and _flipped(orders["cold"], orders["sustained"]):
            cold, sustained = orders["cold"], orders["sustained"]
            found.append(
                {
                    "workload": workload,
                    "case": case,
                    "cold": cold[0]["backend"],
                    "sustained": sustained[0]["backend"],
                    "cold_order": _order(cold),
                    "sustained_order": _order(sustained),
                }
            )
    return found


def _flipped(one: Sequence[Row], other: Sequence[Row]) -> bool:
    first, second = one[0]["backend"], other[0]["backend"]
    return first != second and _ahead(one, first, second) and _ahead(other, second, first)


def _ahead(rows: Sequence[Row], better: str, worse: str) -> bool:
    """Whether one language's interval lies wholly above another's."""
    held = {r["backend"]: r for r in rows}
    if better not in held or worse not in held:
        return False
    return bool(held[better]["fraction_lo"] > held[worse]["fraction_hi"])


def _order(rows: Sequence[Row]) -> str:
    return " > ".join(f"{r['backend']} {r['fraction']:.3f}" for r in rows)


def baselines(rows: Sequence[Row]) -> list[Row]:
    """How often each vendor kernel was the fastest, by group and regime."""
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["baseline"]:
            key = (row["workload"], row["group"], row["dtype"], row["regime"])
            seen.setdefault(key, {}).setdefault(row["case"], row["baseline"])
    found = []
    for place, by_case in seen.items():
        names = list(by_case.values())
        for name in sorted(set(names), key=lambda n: -names.count(n)):
            values = (*place, name, names.count(name), len(names))
            found.append(dict(zip(BASELINES, values, strict=True)))
    return found


def costs(found: Iterable[Record], kernels: Mapping[str, tuple[str, int]]) -> list[Row]:
    """What the recorded winners cost, by workload and language: seconds of the device for tuning, configs
    tried, compiles and their seconds, and lines of kernel code. ``kernels`` maps a kernel's id to its
    workload and its lines (its file and helper files, which kernels may share)."""
    table: dict[tuple[str, str], Row] = {}

    def row(workload: str, backend: str) -> Row:
        start: Row = {**dict.fromkeys(COSTS, 0), "workload": workload, "backend": backend}
        return table.setdefault((workload, backend), start)

    for record in found:
        if isinstance(record, Tuned) and "/" not in record.contender:
            mine = row(record.case.workload, record.contender)
            mine["contenders"] += 1
            mine["trials"] += record.trials
            mine["failed"] += record.failed
            mine["tuning_seconds"] += record.gpu_seconds
        elif isinstance(record, Compiled) and record.kernel in kernels and record.facts is not None:
            mine = row(kernels[record.kernel][0], record.kernel.partition("/")[0])
            mine["compiles"] += not record.cached
            mine["compile_seconds"] += record.seconds
    for kernel, (workload, lines) in kernels.items():
        if (workload, kernel.partition("/")[0]) in table:
            mine = table[workload, kernel.partition("/")[0]]
            mine["kernels"] += 1
            mine["lines"] = max(mine["lines"], lines)
    return [table[key] for key in sorted(table)]
