"""The command line: parse, call, render. Data goes to stdout, progress and warnings to stderr."""

from __future__ import annotations

import errno
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dsl_bench import __version__, cli_authoring, cli_results
from dsl_bench.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    EXIT_PIPE,
    EXIT_USAGE,
    check_format,
    drop_output,
    emit,
    errors,
    fail,
    finish,
    showing,
    warn,
)
from dsl_bench.errors import DslBenchError, NothingMatched, UsageError, unknown
from dsl_bench.options import (
    Backends,
    CaseFile,
    Cases,
    CompileDeadline,
    Deadline,
    Format,
    Groups,
    Kernels,
    Limit,
    Out,
    Plugins,
    Resume,
    Target,
    Trials,
    Verbose,
    Winners,
    Workloads,
    build_request,
    parse_regimes,
    wanted,
)
from dsl_bench.strategies import describe as describe_strategies

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="GPU kernel languages on the same LLM workloads, as a fraction of the best vendor kernel.",
)
STRATEGY_HELP = f"how to search (default: local). {describe_strategies()}"


def main() -> None:
    """The console script: one line for every expected error, and the documented exit codes."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal that knows ASCII only shows ? in place of a sign, not a traceback in place of the table
        if hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:  # Typer makes Ctrl-C an exit code, without a word
            fail("interrupted", code)
    except UsageError as fault:
        code = fail(str(fault), EXIT_USAGE)
    except NothingMatched as fault:
        code = fail(str(fault), EXIT_NOTHING)
    except DslBenchError as fault:
        code = fail(str(fault), EXIT_FAILED)
    except KeyboardInterrupt:
        code = fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        code = drop_output(EXIT_PIPE)
    except OSError as fault:
        short = fault.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
        what = fault.filename or ("no worker process can be started" if short else "cannot write the output")
        code = fail(f"{what}: {fault.strerror or fault}", drop_output(EXIT_FAILED))
    except Exception as fault:
        code = _click_error(fault)
    sys.exit(code or 0)


def _click_error(fault: Exception) -> int:
    """Typer's own usage errors end in one line, like ours; anything else is a bug and keeps its trace."""
    if type(fault).__name__ == "Abort":
        return fail("interrupted", EXIT_INTERRUPTED)
    if not hasattr(fault, "format_message"):
        raise fault
    if type(fault).__name__ == "NoArgsIsHelpError":
        errors.print(str(fault))
        return EXIT_USAGE
    return fail(fault.format_message().replace("Value error, ", ""), EXIT_USAGE)


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


@app.command("list")
def list_(
    fmt: Format = "table",
    plugin: Plugins = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 when a plugin is not ready")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show tracebacks")] = False,
) -> None:
    """Backends, workloads and kernels, each with its state and why."""
    from dsl_bench import catalog, listing

    check_format(fmt)
    with showing() as show:
        found = catalog.load(plugin or (), show.say)
    emit(listing.rows(found), fmt)
    if verbose:
        for described in found.failed:
            errors.print(described.traceback or f"{described.origin.name}: {described.reason}", markup=False)
    if strict and found.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def plan(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    trials: Trials = 8,
    plugin: Plugins = None,
    fmt: Format = "table",
) -> None:
    """What a run would do: kernels and candidates a case, refusals with their reasons, and how long."""
    from dsl_bench import listing

    check_format(fmt)
    request = build_request(workload, backend, kernel, group, case, cases, plugin, None, None)
    request.settings.trials = trials
    with showing() as show:
        rows, seconds = listing.plan_rows(request, show)
    emit(rows, fmt)
    errors.print(f"about {seconds:.0f} s on a GPU, compiling left out", markup=False)


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
    race_seconds: Annotated[float, typer.Option(min=0.01, help="seconds of timing a race")] = 1.5,
    data: Annotated[str, typer.Option(help="normal, uniform, zeros or outliers")] = "normal",
    winners: Winners = None,
    time_limit: Limit = None,
    deadline: Deadline = 60.0,
    compile_deadline: CompileDeadline = 300.0,
    resume: Resume = None,
    out: Out = None,
    seed: int = 0,
    revision: Annotated[str, typer.Option(help="what to call this tree where there is no git")] = "",
    plugin: Plugins = None,
    verbose: Verbose = False,
    fmt: Format = "table",
) -> None:
    """Tune what has no recorded winner, then race every language against every baseline.

    Without a GPU it interprets and compiles, and says what it could not do."""
    from dsl_bench import api, store
    from dsl_bench.workload import DATA_KINDS

    check_format(fmt)
    if data not in DATA_KINDS:
        raise unknown("data", data, DATA_KINDS)
    request = build_request(workload, backend, kernel, group, case, cases, plugin, out, resume)
    request.regimes, request.target, request.revision = parse_regimes(regime), target.value, revision
    request.winners = winners if winners is not None else store.default_paths()
    settings = request.settings
    settings.trials, settings.processes, settings.race_seconds = trials, processes, race_seconds
    settings.data, settings.seed, settings.time_limit = data, seed, time_limit
    settings.deadline, settings.compile_deadline = deadline, compile_deadline
    with showing() as show:
        report = api.run(request, show)
    finish(report, fmt, verbose)


def _replay(
    paths: Sequence[Path], names: Sequence[str], trials: int, chosen: tuple[Any, Any, Any, Any], fmt: str
) -> None:
    """Walk recorded trials; ``chosen`` are workloads, groups, backends and cases, None for all."""
    from dsl_bench import replay, store

    workloads, groups, backends, cases = chosen
    records, problems = store.read(paths, trials=True)
    warn(problems)
    found = [
        s
        for s in replay.spaces(records)
        if wanted(s.case.workload, workloads)
        and (not groups or set(groups) & set(s.case.groups))
        and (s.contender.partition("/")[0] in backends if backends else not s.vendor)
        and (not cases or any(fnmatch.fnmatch(s.case.name, pattern) for pattern in cases))
    ]
    if not found:
        raise NothingMatched(f"no recorded search matches in {', '.join(map(str, paths))}")
    emit(replay.rows(replay.run(found, names, trials)), fmt)


@app.command()
def tune(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    strategy: Annotated[list[str] | None, typer.Option(help=STRATEGY_HELP)] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="configs to try for each contender and case (default: 32)")
    ] = None,
    trial_seconds: Annotated[float, typer.Option(help="seconds of timing a trial")] = 0.02,
    no_prune: Annotated[
        bool, typer.Option("--no-prune", help="also try what would be refused: a test of the pruning")
    ] = False,
    replay: Annotated[
        list[Path] | None,
        typer.Option(help="search recorded trials instead of a GPU: results files or folders"),
    ] = None,
    time_limit: Limit = None,
    deadline: Deadline = 60.0,
    compile_deadline: CompileDeadline = 300.0,
    resume: Resume = None,
    out: Out = None,
    seed: int = 0,
    plugin: Plugins = None,
    verbose: Verbose = False,
    fmt: Format = "table",
) -> None:
    """Search the spaces under one budget for every language and tunable baseline; `run` uses the winners.

    With --replay it walks recorded trials, with every strategy unless some are named, and needs no GPU."""
    from dsl_bench import api, strategies

    check_format(fmt)
    for name in strategy or ():
        strategies.require(name)
    if replay:
        chosen = (workload, group, backend, case)
        _replay(replay, strategy or strategies.available(), trials or 0, chosen, fmt)
        return
    if len(strategy or ()) > 1:
        raise UsageError(f"one --strategy at a time, not {', '.join(strategy or ())} (but with --replay)")
    request = build_request(workload, backend, kernel, group, case, cases, plugin, out, resume)
    settings = request.settings
    settings.trials, settings.strategy, settings.seed = trials or 32, (strategy or ["local"])[0], seed
    settings.prune = not no_prune
    settings.trial_seconds, settings.time_limit = trial_seconds, time_limit
    settings.deadline, settings.compile_deadline = deadline, compile_deadline
    with showing() as show:
        report = api.tune(request, show)
    finish(report, fmt, verbose)


@app.command()
def inspect(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    plugin: Plugins = None,
    fmt: Format = "table",
) -> None:
    """Codegen facts of every language's first choice, side by side; needs no GPU."""
    from dsl_bench import listing

    check_format(fmt)
    request = build_request(workload, backend, kernel, group, case, cases, plugin, None, None)
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
    """What this machine can measure, and how well; ends in a verdict, and exits 1 where that is: not fit."""
    from dsl_bench import doctor as examination

    check_format(fmt)
    with showing() as show:
        rows, fit = examination.examine(plugin or (), show, quick)
    emit(rows, fmt)
    if not fit:
        errors.print("verdict: not fit to measure speed here", markup=False)
        raise typer.Exit(EXIT_FAILED)


@app.command()
def profile(
    workload: Workloads = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    plugin: Plugins = None,
    winners: Winners = None,
    fmt: Format = "table",
) -> None:
    """Winners under ncu, a row a launch: clocks and caches as they are, and the dozen metrics that matter."""
    from dsl_bench import profile as profiling
    from dsl_bench import store

    check_format(fmt)
    request = build_request(workload, backend, kernel, group, case, cases, plugin, None, None)
    request.winners = list(winners or store.default_paths())
    with showing() as show:
        rows = profiling.rows(request, show)
    if not rows:
        raise NothingMatched("no kernel does these cases")
    emit(rows, fmt, None if fmt in ("json", "csv") else list(profiling.FIELDS))


cli_authoring.register(app)
cli_results.register(app)

if __name__ == "__main__":
    main()
