"""The commands that read results: report, compare, record."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dsl_bench.console import EXIT_LOSS, FORMATS, check_format, emit, errors, put, showing, warn
from dsl_bench.errors import NothingMatched, RecordError, UsageError, unknown
from dsl_bench.options import Files, Format, Workloads, wanted


class Shown(enum.StrEnum):
    """What a report shows."""

    fractions = "fractions"
    flips = "flips"
    baselines = "baselines"
    gaps = "gaps"
    cost = "cost"


def _read_page(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"--readme {path}: {getattr(fault, 'strerror', None) or fault}") from fault


def _write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as fault:
        raise RecordError(f"--readme {path}: {fault.strerror or fault}") from fault


def _known_only(kind: str, given: Sequence[str] | None, known: set[str]) -> None:
    for name in given or ():
        if name not in known:
            raise unknown(kind, name, known)


def _insight(
    show: Shown,
    rows: Sequence[dict[str, Any]],
    records: Sequence[Any],
    kernels: Any,
    cases: Sequence[Any],
    fmt: str,
) -> None:
    from dsl_bench import insights

    if show == Shown.gaps:
        found, names = insights.gaps(rows, cases), insights.GAPS
    elif show == Shown.flips:
        found, names = insights.flips(rows), insights.FLIPS
    elif show == Shown.baselines:
        found, names = insights.baselines(rows), insights.BASELINES
    else:
        found, names = insights.costs(records, kernels), insights.COSTS
    emit(found, fmt, list(names))


#: longer than that, the reasons would hide the answer
_MOST_GAPS = 12


def _fractions(
    rows: Sequence[dict[str, Any]], means: Sequence[dict[str, Any]], cases: Sequence[Any], geomean: bool
) -> None:
    """The rows by group for a terminal of any width, the headline last, and on stderr what has no number."""
    from dsl_bench import insights, tables
    from dsl_bench import report as reports

    shown = means if geomean else [r | {"verdict": r["verdict"] or r["status"]} for r in rows]
    by = [*(["gpu"] if len({r["gpu"] for r in rows}) > 1 else []), "workload"]
    by += [] if geomean else ["group", "dtype"]
    names = [n for n in reports.short_columns(geomean) if n not in ("status", "reason")]
    if not any(r["stale"] for r in rows):
        names.remove("stale")
    text, gone = tables.sections(shown, by, names, reports.MEAN_SPARE if geomean else reports.SPARE)
    put(text)
    worse = [m for m in means if m["regime"] == reports.WORSE]
    for gpu in dict.fromkeys(m["gpu"] for m in worse):
        mine = [m for m in worse if m["gpu"] == gpu]
        summary, fields = reports.headline(mine, worst=False)
        put(
            f"\nSpeed as a fraction of the fastest vendor kernel on {gpu}: geometric mean, each case at its "
            "lower regime. fastest: within 1 % of the best mean, of the languages with the most cases.\n"
        )
        put(tables.sections(summary, ["workload"], fields, [("cases",)])[0])
    if gone:
        errors.print(f"left out for width: {', '.join(gone)} (all columns: --format csv)", markup=False)
    lines = insights.gap_lines(insights.gaps(rows, cases))
    for line in lines[:_MOST_GAPS]:
        errors.print(line, markup=False, soft_wrap=True)
    if len(lines) > _MOST_GAPS:
        errors.print(f"… and {len(lines) - _MOST_GAPS} more lines like these: --show gaps", markup=False)


def report(
    results: Files = None,
    geomean: Annotated[bool, typer.Option("--geomean", help="one row a group, regime and language")] = False,
    group: Annotated[
        list[str] | None, typer.Option("--group", "-g", help="case groups (default: all)")
    ] = None,
    workload: Workloads = None,
    fail_below: Annotated[
        float | None, typer.Option(help="exit 4 when the geomean of any group shown is below this")
    ] = None,
    readme: Annotated[Path | None, typer.Option(help="rewrite the table between this file's markers")] = None,
    show: Annotated[
        Shown,
        typer.Option(
            help="fractions; flips of the ranking between regimes; who was the baseline; cost; gaps: what "
            "has no number, and why"
        ),
    ] = Shown.fractions,
    fmt: Annotated[str, typer.Option("--format", "-f", help="table, json, csv, md or html")] = "table",
) -> None:
    """The recorded results: fractions of the fastest vendor kernel, with intervals and verdicts."""
    from dsl_bench import catalog, store
    from dsl_bench import report as reports

    check_format(fmt, (*FORMATS, "html"))
    if show != Shown.fractions and (geomean or fmt == "html"):
        raise UsageError(
            f"--show {show} goes with neither --geomean nor --format html, which holds all of them"
        )
    page = _read_page(readme) if readme is not None else ""
    paths = results or store.default_paths()
    records, problems = store.read(paths)
    warn(problems)
    with showing() as bars:
        found = catalog.load((), bars.say, probe=False)
    cases = [c for _, w in found.workloads().values() for c in w.cases]
    everything = reports.rows(records, found.hashes(), cases)
    _known_only("workload", workload, {c.workload for c in cases} | {r["workload"] for r in everything})
    _known_only("group", group, {g for c in cases for g in c.groups} | {r["group"] for r in everything})
    rows = [r for r in everything if wanted(r["workload"], workload) and wanted(r["group"], group)]
    if not rows:
        raise NothingMatched(f"no recorded race matches in {', '.join(map(str, paths)) or 'no file'}")
    means = reports.geomeans(rows, cases)
    shown = [c for c in cases if wanted(c.workload, workload)]
    if readme is not None:
        _write_page(readme, reports.render_readme(page, everything, records, cases))
    kernels = {name: (k.workload, k.lines) for name, k in found.kernels().items()}
    if fmt == "html":
        from dsl_bench import page as pages

        put(pages.render(rows, records, kernels, cases))
    elif show != Shown.fractions:
        _insight(show, rows, records, kernels, shown, fmt)
    elif fmt == "table":
        _fractions(rows, means, shown, geomean)
    else:
        emit(
            means if geomean else rows,
            fmt,
            None if fmt in ("json", "csv") else reports.short_columns(geomean),
        )
    if fail_below is not None and any((m["geomean"] or 0.0) < fail_below for m in means):
        raise typer.Exit(EXIT_LOSS)


def compare(
    before: Annotated[str, typer.Argument(help="a file, a folder, a run's id, or a git revision")],
    after: Annotated[str, typer.Argument(help="the same, to be held against the first")],
    threshold: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="a loss of so many per cent is none")
    ] = 0.0,
    workload: Workloads = None,
    verdict: Annotated[
        list[str] | None, typer.Option(help="only these: faster, slower, same, ambiguous, missing")
    ] = None,
    fmt: Format = "table",
) -> None:
    """Two sets of results: who is faster or slower as a fraction of one vendor kernel. Exit 4 on a loss."""
    from dsl_bench import compare as comparing

    check_format(fmt)
    sides = comparing.load(before), comparing.load(after)
    for side in sides:
        warn(side.problems)
    everything = comparing.compare(*sides, threshold / 100.0)
    _known_only("workload", workload, {r["workload"] for r in everything})
    _known_only("verdict", verdict, set(comparing.counts(())))
    for line in comparing.environments(*sides):
        errors.print(f"differs: {line}", markup=False, soft_wrap=True)
    rows = [r for r in everything if wanted(r["workload"], workload) and wanted(r["verdict"], verdict)]
    if not rows:
        raise NothingMatched(f"nothing in {before} and {after} matches")
    emit(rows, fmt, None if fmt in ("json", "csv") else list(comparing.FIELDS))
    counts = comparing.counts(rows)
    errors.print(", ".join(f"{n} {word}" for word, n in counts.items()), markup=False)
    if counts["slower"]:
        raise typer.Exit(EXIT_LOSS)


def record(
    run_file: Annotated[Path, typer.Argument(help="a file that `run` or `tune` wrote")],
    name: Annotated[str, typer.Option(help="what to call it")] = "",
    force: Annotated[bool, typer.Option("--force", help="overwrite other results of that name")] = False,
) -> None:
    """Promote a run's file to results/<gpu>/, where git keeps it."""
    from dsl_bench import store

    notes: list[str] = []
    target = store.promote(run_file, name, force, notes.append)
    for note in notes:
        errors.print(note, markup=False, soft_wrap=True)
    put(str(target))


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (report, compare, record):
        app.command()(command)
