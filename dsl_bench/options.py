"""The options that several commands share, and how they are read."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsl_bench.errors import UsageError, unknown
from dsl_bench.records import REGIMES, Regime

if TYPE_CHECKING:
    from dsl_bench import api


class Target(enum.StrEnum):
    """Where to run."""

    auto = "auto"
    device = "device"
    interpret = "interpret"
    compile = "compile"


Winners = Annotated[
    list[Path] | None, typer.Option(help="take tuned winners from here (default: results, runs)")
]
Format = Annotated[str, typer.Option("--format", "-f", help="table, json, csv or md")]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="a plugin file to load as well")]
Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="only these languages")]
Kernels = Annotated[
    list[str] | None, typer.Option("--kernel", "-k", help="only these kernels, and their backends")
]
Groups = Annotated[list[str] | None, typer.Option("--group", "-g", help="case groups (default: quick)")]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        "-c",
        help="a case's name or pattern, or own sizes: m=4096,n=512,k=64 (dtype=bf16 unless given; the "
        "interpreter needs dtype=fp16)",
    ),
]
CaseFile = Annotated[
    Path | None, typer.Option("--cases", help="a CSV file of own sizes, a column a parameter")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="the results file to write")]
Resume = Annotated[Path | None, typer.Option("--resume", help="go on from this results file")]
Limit = Annotated[float | None, typer.Option("--time-limit", min=0, help="seconds for the whole command")]
Deadline = Annotated[float, typer.Option(min=1.0, help="longest silence of the device worker, s")]
CompileDeadline = Annotated[float, typer.Option(min=1.0, help="longest time a compilation may take, s")]
Trials = Annotated[int, typer.Option("--trials", min=1, help="configs to try for each contender and case")]
Workloads = Annotated[list[str] | None, typer.Argument(help="workloads (default: all)")]
Files = Annotated[list[Path] | None, typer.Option("--results", "-r", help="results files or folders")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="list refused cases as well")]


def split_cases(
    given: Sequence[str] | None, file: Path | None
) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """Name patterns, own sizes (told apart by ``=``), and where each of these was read."""
    from dsl_bench import sizes

    texts = [c for c in given or () if "=" in c]
    patterns = [c.strip() for c in given or () if "=" not in c]
    if not all(patterns):
        raise UsageError("--case '': neither a case's name nor own sizes (m=4096,n=512,k=64)")
    own = [sizes.parse_case_text(c) for c in texts]
    where = [f"--case {c!r}" for c in texts]
    for line, row in sizes.read_case_file(file) if file is not None else ():
        own.append(row)
        where.append(f"--cases {file}:{line}")
    return patterns, own, where


def parse_regimes(given: Sequence[str] | None) -> tuple[Regime, ...]:
    """The regimes named, both by default."""
    for name in given or ():
        if name not in REGIMES:
            raise unknown("regime", name, REGIMES)
    return tuple(r for r in REGIMES if not given or r in given)


def build_request(
    workload: list[str] | None,
    backend: list[str] | None,
    kernel: list[str] | None,
    group: list[str] | None,
    case: list[str] | None,
    cases: Path | None,
    plugin: list[str] | None,
    out: Path | None,
    resume: Path | None,
) -> api.Request:
    """What the options of a command ask for; UsageError where they cannot be read."""
    from dsl_bench import api

    patterns, own, where = split_cases(case, cases)
    if resume is not None and not resume.is_file():
        raise UsageError(f"--resume {resume}: no such file")
    return api.Request(
        workload or (),
        group or (),
        patterns,
        own,
        where,
        backend or (),
        kernel or (),
        plugins=plugin or (),
        out=out,
        resume=resume,
    )


def wanted(name: str, chosen: Sequence[str] | None) -> bool:
    """Whether ``name`` is among the chosen ones; none chosen means all."""
    return not chosen or name in chosen
