"""What the command line shows and how it ends: data on stdout, the rest on stderr, and the exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dsl_bench.errors import unknown

if TYPE_CHECKING:
    from dsl_bench import api


class _Errors(Console):
    """Standard error. Where its reader has gone (`2>&1 | head`), the command goes on without a word: it may
    be a run, whose records nobody piped."""

    def on_broken_pipe(self) -> None:
        """From now on, silence."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def print(self, *objects: Any, **how: Any) -> None:
        """As ever; an older Rich raises where a newer one calls :meth:`on_broken_pipe`."""
        try:
            super().print(*objects, **how)
        except BrokenPipeError:
            self.on_broken_pipe()


errors = _Errors(stderr=True, highlight=False)

EXIT_FAILED, EXIT_USAGE, EXIT_NOTHING, EXIT_LOSS, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 3, 4, 130, 141
FORMATS = ("table", "json", "csv", "md")
#: a foreign file given as results would otherwise be quoted line by line
MOST_WARNINGS = 5


def drop_output(code: int) -> int:
    """``code``. What standard output refused must not be tried again on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def fail(text: str, code: int) -> int:
    """``code``, after one line on stderr."""
    errors.print(f"dsl-bench: {text}", style="red", markup=False, soft_wrap=True)
    return code


def emit(rows: Sequence[dict[str, Any]], fmt: str, columns: Sequence[str] | None = None) -> None:
    """Rows to stdout in the chosen format."""
    from dsl_bench import tables

    put(tables.render(rows, fmt, columns))


def put(text: str) -> None:
    """Text to stdout; a reader that has seen enough is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        raise typer.Exit(drop_output(EXIT_PIPE)) from None


def warn(problems: Sequence[Any]) -> None:
    """The first few of some problems, and how many more there are."""
    for problem in problems[:MOST_WARNINGS]:
        errors.print(f"warning: {problem}", markup=False, soft_wrap=True)
    if len(problems) > MOST_WARNINGS:
        errors.print(f"warning: … and {len(problems) - MOST_WARNINGS} more lines like these", markup=False)


def check_format(fmt: str, known: Sequence[str] = FORMATS) -> None:
    """Raises UsageError for a format that is not among ``known``."""
    if fmt not in known:
        raise unknown("format", fmt, known)


@contextmanager
def showing() -> Iterator[Any]:
    """A Progressor that draws bars on stderr when that is a terminal, and plain lines when it is not."""
    from dsl_bench.session import Progressor

    if not errors.is_terminal:
        yield Progressor(say=lambda text: None, advance=plain_lines())
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


def plain_lines() -> Callable[[str, int, int], None]:
    """Progress as lines, about ten each and always the last."""
    seen: dict[str, int] = {}

    def advance(what: str, done: int, total: int) -> None:
        step = max(1, total // 10)
        if done // step != seen.get(what, -1) or (done == total and seen.get(f"{what} last") != total):
            seen[f"{what} last"] = done
            seen[what] = done // step
            errors.print(f"{what} {done}/{total}", markup=False)

    return advance


def finish(report: api.Report, fmt: str, verbose: bool, before: Sequence[dict[str, Any]] = ()) -> None:
    """Show what a run did (after the rows ``before``) and where its records are; exits 1 after a failure,
    130 after an interrupt."""
    from dsl_bench import listing, spending

    warn(report.problems)
    try:
        if fmt == "table":
            put(f"{listing.outcome_summary(report)}\n")
        # a table is for eyes: data for a program lacks nothing
        emit([*before, *listing.outcome_rows(report, refusals=verbose or fmt != "table")], fmt)
    finally:
        errors.print(f"records: {report.path}", markup=False, soft_wrap=True)
    for line in spending.lines(report.records):
        errors.print(line, markup=False, soft_wrap=True)
    for name in report.unfinished:
        errors.print(f"not finished within the time limit: {name}", markup=False)
    if report.interrupted:
        errors.print(f"to go on: the same command with --resume {report.path}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.failed:
        raise typer.Exit(EXIT_FAILED)
