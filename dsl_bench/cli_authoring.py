"""The commands of authors: new, check."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from dsl_bench.console import EXIT_FAILED, check_format, emit, errors, finish, put, showing
from dsl_bench.errors import UsageError
from dsl_bench.options import (
    Backends,
    CaseFile,
    Cases,
    Format,
    Groups,
    Kernels,
    Out,
    Plugins,
    Verbose,
    build_request,
)


class Kind(enum.StrEnum):
    """What there is a skeleton of."""

    kernel = "kernel"
    workload = "workload"
    backend = "backend"


def new(
    kind: Annotated[Kind, typer.Argument(help="what to write")],
    name: Annotated[
        str, typer.Argument(help="a kernel's is <language>/<name> (triton, tilelang or cuda); others plain")
    ],
    into: Annotated[Path, typer.Option("--into", help="the folder to write to")] = Path(),
) -> None:
    """Write a skeleton that already runs and passes its check; overwrites nothing."""
    from dsl_bench import skeleton

    made = getattr(skeleton, kind.value)(name, into)
    _refuse_taken(kind, name)
    made.write()
    put("\n".join(map(str, made.files)))
    errors.print(f"next: {made.next}", markup=False, soft_wrap=True)


def _refuse_taken(kind: Kind, name: str) -> None:
    """UsageError where an installed plugin has the name: two of one name are both refused."""
    from dsl_bench import catalog

    with showing() as show:
        found = catalog.load((), show.say, probe=False)
    tables = {
        Kind.kernel: {k: info.origin for k, info in found.kernels().items()},
        Kind.workload: {k: origin for k, (origin, _) in found.workloads().items()},
        Kind.backend: {k: origin for k, (origin, _) in found.backends().items()},
    }
    owner = tables[kind].get(name)
    if owner is not None:
        raise UsageError(f"{kind} {name!r} is taken: {owner.dist} ({owner.value}) has it")


def check(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="workloads (default: all), or files with kernels, a workload or a backend"),
    ] = None,
    backend: Backends = None,
    kernel: Kernels = None,
    group: Groups = None,
    case: Cases = None,
    cases: CaseFile = None,
    plugin: Plugins = None,
    no_race: Annotated[bool, typer.Option("--no-race", help="of a file's kernels: never the speed")] = False,
    out: Out = None,
    verbose: Verbose = False,
    fmt: Format = "table",
) -> None:
    """Is it right? The first choice of every kernel, on the device or in the interpreter.

    A file (.py) need not be installed: it is checked with all that it brings, and with a GPU its kernels race
    the vendor's on the quick cases, or those that you name."""
    from dsl_bench import checking

    check_format(fmt)
    workloads, files = checking.split_files(what or ())
    given = [*(plugin or ()), *files]
    request = build_request(workloads, backend, kernel, group, case, cases, given, out, None)
    with showing() as show:
        if files:
            done = checking.check_files(request, files, show, race=not no_race)
        else:
            done = checking.check_installed(request, show)
    if done.report is None:
        emit(done.rows, fmt)
    else:
        finish(done.report, fmt, verbose, done.rows)
    if done.failed:
        raise typer.Exit(EXIT_FAILED)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (check, new):
        app.command()(command)
