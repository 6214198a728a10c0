"""The command line: parse, call, render. Data goes to stdout, progress and warnings to stderr."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dsl_bench import __version__
from dsl_bench.errors import DslBenchError, NothingMatched, UsageError, unknown
from dsl_bench.records import REGIMES, Regime

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="GPU kernel languages on the same LLM workloads, as a fraction of the best vendor kernel.",
)
errors = Console(stderr=True, highlight=False)

EXIT_FAILED, EXIT_USAGE, EXIT_NOTHING, EXIT_LOSS, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
FORMATS = ("table", "json", "csv", "md")


class Target(enum.StrEnum):
    """Where to run."""

    auto = "auto"
    device = "device"
    interpret = "interpret"
    compile = "compile"


Format = Annotated[str, typer.Option("--format", "-f", help="table, json, csv or md")]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="a plugin file to load as well")]
Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="only these languages")]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", "-k", help="only these kernels")]
Groups = Annotated[list[str] | None, typer.Option("--group", "-g", help="case groups (default: quick)")]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", "-c", help="a case's name or pattern, or own sizes: m=4096,n=512,k=64"),
]
CaseFile = Annotated[Path | None, typer.Option("--cases", help="a CSV file of own sizes")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="the results file to write")]
Resume = Annotated[Path | None, typer.Option("--resume", help="go on from this results file")]
Limit = Annotated[float | None, typer.Option("--time-limit", help="seconds for the whole command")]
Deadline = Annotated[float, typer.Option(min=1.0, help="longest silence of the device worker, s")]
Trials = Annotated[int, typer.Option("--trials", min=1, help="configs to try for each contender and case")]
Workloads = Annotated[list[str] | None, typer.Argument(help="workloads (default: all)")]
Files = Annotated[list[Path] | None, typer.Option("--results", "-r", help="results files or folders")]


def main() -> None:
    """The console script: one line for every expected error, and the documented exit codes."""
    try:
        code = app(standalone_mode=False)
    except UsageError as fault:
        code = _fail(str(fault), EXIT_USAGE)
    except NothingMatched as fault:
        code = _fail(str(fault), EXIT_NOTHING)
    except DslBenchError as fault:
        code = _fail(str(fault), EXIT_FAILED)
    except KeyboardInterrupt:
        code = _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as fault:
        code = _click_error(fault)
    sys.exit(code or 0)


def _click_error(fault: Exception) -> int:
    """Typer's own usage errors end in one line, like ours; anything else is a bug and keeps its trace."""
    if not hasattr(fault, "format_message"):
        raise fault
    if type(fault).__name__ == "NoArgsIsHelpError":
        errors.print(str(fault))
        return EXIT_USAGE
    return _fail(fault.format_message(), EXIT_USAGE)


def _fail(text: str, code: int) -> int:
    errors.print(f"dsl-bench: {text}", style="red", markup=False, soft_wrap=True)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dsl-bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show it")
    ] = False,
) -> None:
    """GPU kernel languages on the same LLM workloads, as a fraction of the best vendor kernel."""


def emit(rows: Sequence[dict[str, Any]], fmt: str, columns: Sequence[str] | None = None) -> None:
    """Rows to stdout in the chosen format."""
    from dsl_bench import tables

    print(tables.render(rows, fmt, columns))


def _check_format(fmt: str) -> None:
    if fmt not in FORMATS:
        raise unknown("format", fmt, FORMATS)


@contextmanager
def showing() -> Iterator[Any]:
    """A Progressor that draws bars on stderr when that is a terminal, and plain lines when it is not."""
    from dsl_bench.session import Progressor

    if not errors.is_terminal:
        yield Progressor(say=lambda text: None, advance=_plain_lines())
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        status = bars.add_task("starting", total=None)

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield Progressor(say=lambda text: bars.update(status, description=text), advance=advance)


def _plain_lines() -> Callable[[str, int, int], None]:
    seen: dict[str, int] = {}

    def advance(what: str, done: int, total: int) -> None:
        step = max(1, total // 10)
        if done // step != seen.get(what, -1):
            seen[what] = done // step
            errors.print(f"{what} {done}/{total}", markup=False)

    return advance


def split_cases(given: Sequence[str] | None, file: Path | None) -> tuple[list[str], list[dict[str, str]]]:
    """Name patterns and own sizes, told apart by ``=``."""
    from dsl_bench import catalog

    patterns = [c for c in given or () if "=" not in c]
    own = [catalog.parse_case_text(c) for c in given or () if "=" in c]
    if file is not None:
        own += catalog.read_case_file(file)
    return patterns, own


def parse_regimes(given: Sequence[str] | None) -> tuple[Regime, ...]:
    """The regimes named, both by default."""
    for name in given or ():
        if name not in REGIMES:
            raise unknown("regime", name, REGIMES)
    return tuple(r for r in REGIMES if not given or r in given)


@app.command("list")
def list_(
    fmt: Format = "table",
    plugin: Plugins = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 when a plugin is not ready")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show tracebacks")] = False,
) -> None:
    """Backends, workloads and kernels, each with its state and why."""
    from dsl_bench import catalog, listing

    _check_format(fmt)
    with showing() as show:
        found = catalog.load(plugin or (), show.say)
    emit(listing.rows(found), fmt)
    if verbose:
        for described in found.failed:
            errors.print(described.traceback, markup=False)
    if strict and found.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def plan(
    workload: Workloads = None,
    backend: Backends = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    trials: Trials = 8,
    plugin: Plugins = None,
    fmt: Format = "table",
) -> None:
    """What a run would do: kernels and candidates a case, refusals with their reasons, and how long."""
    from dsl_bench import api, listing

    _check_format(fmt)
    patterns, own = split_cases(case, cases)
    request = api.Request(workload or (), group or (), patterns, own, backend or (), plugins=plugin or ())
    request.settings.trials = trials
    with showing() as show:
        rows, seconds = listing.plan_rows(request, show)
    emit(rows, fmt)
    errors.print(f"about {seconds:.0f} s on a GPU, compiling left out", markup=False)


def _request(
    workload: list[str] | None,
    backend: list[str] | None,
    kernel: list[str] | None,
    group: list[str] | None,
    case: list[str] | None,
    cases: Path | None,
    plugin: list[str] | None,
    out: Path | None,
    resume: Path | None,
) -> Any:
    from dsl_bench import api

    patterns, own = split_cases(case, cases)
    if resume is not None and not resume.is_file():
        raise UsageError(f"--resume {resume}: no such file")
    return api.Request(
        workload or (),
        group or (),
        patterns,
        own,
        backend or (),
        kernel or (),
        plugins=plugin or (),
        out=out,
        resume=resume,
    )


def _finish(report: Any, fmt: str) -> None:
    from dsl_bench import listing

    emit(listing.outcome_rows(report), fmt)
    errors.print(f"records: {report.path}", markup=False, soft_wrap=True)
    for name in report.unfinished:
        errors.print(f"not finished within the time limit: {name}", markup=False)
    if report.interrupted:
        errors.print("interrupted; go on with --resume", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def run(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    regime: Annotated[list[str] | None, typer.Option(help="cold, sustained (default: both)")] = None,
    target: Annotated[Target, typer.Option(help="where to run")] = Target.auto,
    trials: Trials = 8,
    processes: Annotated[
        int, typer.Option(min=1, help="race everything in this many separate processes")
    ] = 1,
    race_seconds: Annotated[float, typer.Option(help="seconds of timing a race")] = 1.5,
    data: Annotated[str, typer.Option(help="normal, uniform or zeros")] = "normal",
    winners: Annotated[
        list[Path] | None, typer.Option(help="take tuned winners from here (default: results, runs)")
    ] = None,
    time_limit: Limit = None,
    deadline: Deadline = 60.0,
    resume: Resume = None,
    out: Out = None,
    seed: int = 0,
    revision: Annotated[str, typer.Option(help="what to call this tree where there is no git")] = "",
    plugin: Plugins = None,
    fmt: Format = "table",
) -> None:
    """Tune what has no recorded winner, then race every language against every baseline.

    Without a GPU it interprets and compiles, and says what it could not do."""
    from dsl_bench import api, store
    from dsl_bench.workload import DATA_KINDS

    _check_format(fmt)
    if data not in DATA_KINDS:
        raise unknown("data", data, DATA_KINDS)
    request = _request(workload, backend, kernel, group, case, cases, plugin, out, resume)
    request.regimes, request.target, request.revision = parse_regimes(regime), target.value, revision
    request.winners = winners if winners is not None else store.default_paths()
    settings = request.settings
    settings.trials, settings.processes, settings.race_seconds = trials, processes, race_seconds
    settings.data, settings.seed, settings.time_limit = data, seed, time_limit
    settings.deadline = deadline
    with showing() as show:
        report = api.run(request, show)
    _finish(report, fmt)


@app.command()
def tune(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    strategy: Annotated[str, typer.Option(help="random, local or exhaustive")] = "local",
    trials: Trials = 32,
    trial_seconds: Annotated[float, typer.Option(help="seconds of timing a trial")] = 0.02,
    time_limit: Limit = None,
    deadline: Deadline = 60.0,
    resume: Resume = None,
    out: Out = None,
    seed: int = 0,
    plugin: Plugins = None,
    fmt: Format = "table",
) -> None:
    """Search the spaces under one budget for every language and tunable baseline; `run` uses the winners."""
    from dsl_bench import api
    from dsl_bench.strategies import STRATEGIES

    _check_format(fmt)
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    request = _request(workload, backend, kernel, group, case, cases, plugin, out, resume)
    settings = request.settings
    settings.trials, settings.strategy, settings.seed = trials, strategy, seed
    settings.trial_seconds, settings.time_limit, settings.deadline = trial_seconds, time_limit, deadline
    with showing() as show:
        report = api.tune(request, show)
    _finish(report, fmt)


@app.command()
def inspect(
    workload: Workloads = None,
    backend: Backends = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    plugin: Plugins = None,
    fmt: Format = "table",
) -> None:
    """Codegen facts of every language's first choice, side by side; needs no GPU."""
    from dsl_bench import listing

    _check_format(fmt)
    request = _request(workload, backend, None, group, case, cases, plugin, None, None)
    with showing() as show:
        rows, failed = listing.inspect_rows(request, show)
    emit(rows, fmt)
    if failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick/--full", help="leave out the long measurements")] = True,
    fmt: Format = "table",
    plugin: Plugins = None,
) -> None:
    """What this machine can measure, and how well; ends in a verdict."""
    from dsl_bench import doctor as examination

    _check_format(fmt)
    with showing() as show:
        rows, fit = examination.examine(plugin or (), show, quick)
    emit(rows, fmt)
    if not fit:
        errors.print("verdict: not fit to measure speed here", markup=False)


def _wanted(name: str, chosen: Sequence[str] | None) -> bool:
    return not chosen or name in chosen


@app.command()
def report(
    results: Files = None,
    geomean: Annotated[bool, typer.Option("--geomean", help="one row a group, regime and language")] = False,
    group: Groups = None,
    workload: Workloads = None,
    fail_below: Annotated[float | None, typer.Option(help="exit 4 when a geomean is below this")] = None,
    readme: Annotated[Path | None, typer.Option(help="rewrite the table between this file's markers")] = None,
    fmt: Format = "table",
) -> None:
    """The recorded results: fractions of the fastest vendor kernel, with intervals and verdicts."""
    from dsl_bench import catalog, store
    from dsl_bench import report as reports

    _check_format(fmt)
    paths = results or store.default_paths()
    records, problems = store.read(paths)
    for problem in problems:
        errors.print(f"warning: {problem}", markup=False, soft_wrap=True)
    with showing() as show:
        found = catalog.load((), show.say)
    cases = [c for _, w in found.workloads().values() for c in w.cases]
    everything = reports.rows(records, found.hashes(), cases)
    rows = [r for r in everything if _wanted(r["workload"], workload) and _wanted(r["group"], group)]
    if not rows:
        raise NothingMatched(f"no recorded race matches in {', '.join(map(str, paths)) or 'no file'}")
    means = reports.geomeans(rows, cases)
    if readme is not None:
        readme.write_text(reports.render_readme(readme.read_text(), everything, records, cases))
    emit(means if geomean else rows, fmt, None if fmt in ("json", "csv") else reports.short_columns(geomean))
    if fail_below is not None and any((m["geomean"] or 0.0) < fail_below for m in means):
        raise typer.Exit(EXIT_LOSS)


@app.command()
def record(
    run_file: Annotated[Path, typer.Argument(help="a file that `run` or `tune` wrote")],
    name: Annotated[str, typer.Option(help="what to call it")] = "",
) -> None:
    """Promote a run's file to results/<gpu>/, where git keeps it."""
    from dsl_bench import store

    print(store.promote(run_file, name))


@app.command()
def check(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    plugin: Plugins = None,
    out: Out = None,
    fmt: Format = "table",
) -> None:
    """Correctness only: the first choice of every kernel, on the device or in the interpreter."""
    from dsl_bench import api

    _check_format(fmt)
    request = _request(
        workload,
        backend,
        kernel,
        group or ([] if case or cases else ["smoke"]),
        case,
        cases,
        plugin,
        out,
        None,
    )
    request.race, request.retune = False, True
    # as many as a backend has kernels: each shows its default
    request.settings.trials, request.settings.trial_seconds = 8, 0.001
    with showing() as show:
        finished = api.run(request, show)
    _finish(finished, fmt)


if __name__ == "__main__":
    main()
