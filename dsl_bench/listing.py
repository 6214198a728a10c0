"""Rows that commands other than `report` show: what is installed, what a run would do, what it did."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dsl_bench import api, offline, stats
from dsl_bench import catalog as catalogs
from dsl_bench.catalog import Catalog
from dsl_bench.contest import contenders
from dsl_bench.jobs import Built, KernelInfo
from dsl_bench.records import Compiled, Failure, Interpreted, Race, Record, Skip, Tuned
from dsl_bench.session import Progressor, Session, Settings

Row = dict[str, Any]

#: seconds of a trial and of a race beside their timing: binding, references, checks (first seen on an H200)
TRIAL_OVERHEAD, RACE_OVERHEAD = 0.1, 2.0
#: instruction classes worth a column
OPCODES = ("HGMMA", "QGMMA", "HMMA", "UTMALDG", "UTMASTG", "LDGSTS", "LDL", "STL")


def rows(catalog: Catalog) -> list[Row]:
    """Every plugin and kernel: kind, name, where it is from, state, targets, and the reason."""
    result: list[Row] = []
    for described in catalog.described:
        origin = described.origin
        base = {"kind": origin.kind, "name": origin.name, "from": origin.dist or origin.value}
        if described.state != "ready":
            result.append({**base, "state": described.state, "targets": "", "reason": described.reason})
        elif described.backend is not None:
            info = described.backend
            ready = [name for name, t in info.targets.items() if t.ready]
            reasons = [
                f"{n}: {t.reason}" + (f" ({t.hint})" if t.hint else "")
                for n, t in info.targets.items()
                if not t.ready
            ]
            problems = [*info.problems, *described.problems]
            state = "failed" if problems else "ready" if ready else "unavailable"
            reason = "; ".join([*problems, *reasons])
            result.append({**base, "state": state, "targets": " ".join(ready), "reason": reason})
        elif described.workload is None:
            # kernels alone: each has a row below, this one says what was left out
            state = "failed" if described.problems else "ready"
            text = "; ".join(described.problems) or f"{len(described.kernels)} kernels"
            result.append({**base, "state": state, "targets": "", "reason": text})
        else:
            cases = described.workload.cases
            groups = sorted({g for c in cases for g in c.groups})
            text = f"{len(cases)} cases; groups {' '.join(groups)}"
            result.append({**base, "state": "ready", "targets": "", "reason": text})
    for kernel in sorted(catalog.kernels().values(), key=lambda k: k.id):
        unmet = kernel.unmet or _no_backend(catalog, kernel)
        state = "unavailable" if unmet else "ready"
        base = {"kind": "kernel", "name": kernel.id, "from": kernel.origin.dist or kernel.origin.value}
        size = 1
        for values in kernel.space.values():
            size *= len(values)
        text = unmet or f"{kernel.workload}; {size} points; {kernel.lines} lines; {kernel.summary}"
        result.append({**base, "state": state, "targets": "", "reason": text})
    return result


def _no_backend(catalog: Catalog, kernel: KernelInfo) -> str:
    """Why no backend would compile or run a kernel; empty where one does."""
    name = kernel.id.partition("/")[0]
    backends = catalog.backends()
    if name not in backends:
        return f"no backend {name!r} {catalog.failure_note()}".strip()
    if not any(t.ready for t in backends[name][1].targets.values()):
        return f"its backend {name} is not ready here"
    return ""


class _Nowhere:
    def write(self, record: Record) -> None:
        """Drops the record."""


def plan_rows(request: api.Request, show: Progressor) -> tuple[list[Row], float]:
    """One row a case and kernel, and the seconds of GPU time that the whole would take."""
    catalog = catalogs.load(request.plugins, show.say)
    result: list[Row] = []
    seconds = 0.0
    settings = request.settings
    for workload, cases in api.work_of(catalog, request).items():
        rivals = contenders(catalog, workload, request.backends, request.kernels)
        with Session(catalog, _Nowhere(), "plan", settings, show) as session:
            for name in sorted({r.backend for r in rivals if r.backend in catalog.backends()}):
                mine = [k for k in request.kernels if k.startswith(f"{name}/")]
                for planned in session.plan(name, cases, -1, mine):
                    count = len(planned.candidates)
                    result.append(
                        {
                            "workload": workload,
                            "case": planned.case.name,
                            "kernel": planned.kernel,
                            "candidates": count,
                            "pruned": sum(planned.pruned.values()),
                            "first": json.dumps(planned.candidates[0].config) if count else "",
                            "reason": planned.reason,
                        }
                    )
        seconds += len(cases) * len(rivals) * settings.trials * (settings.trial_seconds + TRIAL_OVERHEAD)
        seconds += len(cases) * len(request.regimes) * (settings.race_seconds + RACE_OVERHEAD)
    return result, seconds


#: the order in which a run's rows are shown
_ORDER = ("race", "tune", "interpret", "compile", "failure", "skip")


def outcome_rows(report: api.Report, refusals: bool = True) -> list[Row]:
    """What a run did, a row each: races, winners, interpreted cases, compiled specialisations, failures, and
    what was not done. ``refusals`` False leaves out the cases that kernels refuse."""
    result: list[Row] = []
    broken = {(r.kernel, r.status, r.reason) for r in report.records if isinstance(r, Compiled)}
    for record in report.records:
        # a compile that failed has a row already, and is one failure
        if isinstance(record, Failure) and record.where == "compile":
            told = (record.kernel, record.status, record.reason) in broken
        else:
            told = not refusals and _is_refusal(record)
        if not told:
            result += _outcome(record, report)
    return sorted(result, key=lambda row: _ORDER.index(row["what"].partition(" ")[0]))


def _is_refusal(record: Record) -> bool:
    return isinstance(record, Skip) and bool(record.case)


def outcome_summary(report: api.Report) -> str:
    """What a run did, in one line."""
    counts: dict[str, dict[str, int]] = {}
    for row in outcome_rows(report, refusals=False):
        kind = counts.setdefault(row["what"], {})
        kind[row["status"]] = kind.get(row["status"], 0) + 1
    parts = [
        f"{what}: " + ", ".join(f"{n} {status}" for status, n in kind.items())
        for what, kind in counts.items()
    ]
    refused = sum(_is_refusal(r) for r in report.records)
    if refused:
        parts.append(f"refused cases: {refused} (--verbose lists them)")
    return "; ".join(parts) or "nothing was left to do"


def _outcome(record: Record, report: api.Report) -> list[Row]:
    match record:
        case Race():
            return _race_rows(record)
        case Interpreted():
            error = max((a.rms / a.rounding_rms for a in record.accuracy if a.rounding_rms), default=None)
            text = f"RMS error {error:.3f}x rounding" if error is not None else record.reason
            return [_row("interpret", record.case.name, record.kernel, record.status, text)]
        case Compiled():
            cases = report.compiled_for.get(record.key, [])
            text = ", ".join(cases) if len(cases) < 3 else f"{cases[0]} and {len(cases) - 1} more"
            return [_row("compile", text, record.kernel, record.status, _compiled_text(record))]
        case Tuned():
            best = record.near[0]
            text = f"{best.median_ns / 1e3:.1f} us, {record.trials} trials, {record.failed} failed: "
            return [_row("tune", record.case.name, best.kernel, "ok", text + json.dumps(best.config))]
        case Skip():
            hint = f" ({record.hint})" if record.hint else ""
            kernel = record.kernel or record.backend
            return [_row("skip", record.case, kernel, record.status, record.reason + hint)]
        case Failure():
            kernel = record.kernel or record.backend
            return [_row("failure", record.case, kernel, record.status, f"{record.where}: {record.reason}")]
    return []


def _row(what: str, case: str, kernel: str, status: str, text: str) -> Row:
    return {"what": what, "case": case, "kernel": kernel, "status": status, "result": text}


def _race_rows(race: Race) -> list[Row]:
    result = []
    roles = [race.participants[i].role for i in race.racers]
    vendors = [n for n, role in enumerate(roles) if role == "vendor"]
    baseline = stats.best_baseline(race.samples, vendors) if vendors else None
    for place, index in enumerate(race.racers):
        person = race.participants[index]
        micro = sorted(race.samples[place])[len(race.samples[place]) // 2] / 1e3
        text = f"{micro:.1f} us"
        if baseline is not None:
            got = stats.fraction(race.samples, place, baseline)
            name = race.participants[race.racers[baseline]].kernel
            text += f", {got.value:.3f} [{got.lo:.3f}, {got.hi:.3f}] of {name}"
        kernel = f"{person.kernel} (A/A)" if person.role == "aa" else person.kernel
        result.append(_row(f"race {race.regime}", race.case.name, kernel, "ok", text))
    for person in race.participants:
        if person.status != "ok":
            result.append(
                _row(f"race {race.regime}", race.case.name, person.kernel, person.status, person.reason)
            )
    return result


def _compiled_text(record: Compiled) -> str:
    """The config that is baked in, and what came out of it."""
    baked = " ".join(f"{k}={v}" for k, v in record.static.items())
    if record.facts is None:
        return record.reason or f"{baked}; nothing to compile".lstrip("; ")
    facts = record.facts
    counts = " ".join(f"{op} {facts.sass[op]}" for op in OPCODES if facts.sass.get(op))
    seen = f"{facts.registers} regs, stack {facts.stack}, smem {facts.smem_dynamic}"
    return "; ".join(filter(None, (seen, counts, baked)))


def inspect_rows(request: api.Request, show: Progressor) -> tuple[list[Row], int]:
    """Codegen facts of every kernel's first choice on each case; and how many failed to compile."""
    catalog = catalogs.load(request.plugins, show.say)
    records: list[Record] = []

    class Keep:
        def write(self, record: Record) -> None:
            records.append(record)

    failed = 0
    result: list[Row] = []
    work = api.work_of(catalog, request)
    catalogs.require_cache()
    languages = [n for n, (_, b) in catalog.backends().items() if b.role == "language"]
    for workload, cases in work.items():
        with Session(catalog, Keep(), "inspect", Settings(), show) as session:
            backends = list(request.backends) or languages
            failed += offline.compile_all(session, workload, cases, backends, 1, request.kernels)
            for name in backends:
                if not catalog.backend(name)[1].targets["compile"].ready:
                    continue
                for planned in session.plan(name, cases, 0, request.kernels):
                    for candidate in planned.candidates[:1]:
                        built = session.built(candidate.key)
                        if isinstance(built, Built) and built.facts is not None:
                            result.append(
                                _inspect_row(planned.case.name, planned.kernel, candidate.config, built)
                            )
            failed += session.plan_failures
    for record in records:
        if isinstance(record, Skip | Failure):
            kernel = record.kernel or record.backend
            result.append({"case": record.case, "kernel": kernel, "reason": record.reason})
    result.sort(key=lambda r: (r["case"], r["kernel"]))
    columns = dict.fromkeys(name for row in result for name in row)
    columns.pop("reason", None)
    return [{name: row.get(name) for name in (*columns, "reason")} for row in result], failed


def _inspect_row(case: str, kernel: str, config: dict[str, Any], built: Built) -> Row:
    assert built.facts is not None
    facts = msgspec.structs.asdict(built.facts)
    sass = facts.pop("sass")
    base = {
        "case": case,
        "kernel": kernel,
        "config": json.dumps(config),
        "compile_s": round(built.seconds, 2),
    }
    return {**base, **facts, **{op: sass.get(op, 0) for op in OPCODES}}
