"""Results on disk: one append-only file of JSON lines a run, and the ways to read them back.

``results/<gpu>/`` holds what the project has recorded (in git), ``runs/`` a user's own runs. A line that
cannot be read is named by file and number and costs only itself. Owns no ratio: :mod:`dsl_bench.report` does.
"""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from dsl_bench import records
from dsl_bench.entry import Entry, entries, from_frame, to_frame
from dsl_bench.errors import RecordError, UsageError
from dsl_bench.records import Compiled, Pruned, Race, Record, RunHeader, Trial, Tuned

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Entry",
    "Problem",
    "Writer",
    "default_paths",
    "entries",
    "from_frame",
    "load_results",
    "promote",
    "read",
    "results_folder",
    "slug",
    "to_frame",
]

#: a folder of results to read and to promote to, in place of ./results
ENV_RESULTS = "DSL_BENCH_RESULTS"
#: everything under results/ together: a clone stays small for good
MOST_BYTES = 6_000_000
#: how every line of ours begins, and the reason given for one that a killed run left unfinished
_START, _CUT = b'{"type":"', "cut off"


class Writer:
    """Appends records to the file at ``path``, each on disk before ``write`` returns.

    Raises RecordError at once where the file cannot be written, so that nothing is measured in vain, and
    UsageError where it holds something else than results: that is never appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_file() and path.stat().st_size and not _ours(path):
                raise UsageError(f"{path} is not a results file of dsl-bench; it is left as it is")
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: what a full disk refused must not be tried again on closing
            self._file = path.open("ab", buffering=0)
            self._end_line()
        except OSError as fault:
            raise RecordError(f"cannot write results to {path}: {fault.strerror or fault}") from fault

    def _end_line(self) -> None:
        """A run that was killed may have left half a line: what follows must not be glued to it."""
        with self.path.open("rb") as old:
            size = old.seek(0, os.SEEK_END)
            if size and (old.seek(size - 1), old.read(1))[1] != b"\n":
                self._put(b"\n")

    def _put(self, data: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        written = self._file.write(data)
        if written != len(data):
            if written:  # what there was room for is no line
                os.ftruncate(self._file.fileno(), end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())

    def write(self, record: Record) -> None:
        """One line; raises RecordError where the disk refuses it or it would not read back (a NaN)."""
        line = records.encode(record)
        try:
            records.decode(line)
            self._put(line + b"\n")
        except msgspec.ValidationError as fault:
            raise RecordError(
                f"a {type(record).__name__} would not read back from {self.path}: {fault}"
            ) from fault
        except OSError as fault:
            raise RecordError(f"cannot write results to {self.path}: {fault.strerror or fault}") from fault

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Problem:
    """A line that could not be read. ``str()`` of it is ``file:line: reason``."""

    path: Path
    line: int
    reason: str

    @property
    def cut(self) -> bool:
        """Whether the line is the beginning of a record that a killed run did not finish."""
        return self.reason.startswith(_CUT)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def read(paths: Iterable[Path | str], trials: bool = False) -> tuple[list[Record], list[Problem]]:
    """All records of the files (and of the ``.jsonl`` files below the folders) at ``paths``, in file order,
    and the lines that held none. With ``trials`` also of the compressed files in folders, which hold what
    searches tried and no report needs; a file that is named is read whatever its kind. A race that lies in
    several files (a run and its promoted copy) is one race and is returned once. Raises UsageError for a path
    that does not exist."""
    found: list[Record] = []
    problems: list[Problem] = []
    earlier: set[bytes] = set()
    for path in _files(paths, (".jsonl", ".jsonl.xz") if trials else (".jsonl",)):
        mine: set[bytes] = set()
        for number, outcome in _lines(path):
            if isinstance(outcome, str):
                problems.append(Problem(path, number, outcome))
                continue
            identity = _identity(outcome)
            if identity not in earlier:
                found.append(outcome)
            mine |= {identity} if identity else set()
        earlier |= mine
    return found, problems


def _identity(record: Record) -> bytes:
    """What makes a race the same one in another file; empty for other records."""
    return hashlib.sha256(records.encode(record)).digest() if isinstance(record, Race) else b""


def _files(paths: Iterable[Path | str], endings: tuple[str, ...]) -> list[Path]:
    chosen: dict[Path, Path] = {}
    for given in map(Path, paths):
        if not given.exists():
            raise UsageError(f"no results at {given}")
        below = (p for p in given.rglob("*") if p.name.endswith(endings)) if given.is_dir() else ()
        inside = sorted(below) if given.is_dir() else [given]
        chosen.update({path.resolve(): path for path in inside})
    return list(chosen.values())


def _lines(path: Path) -> Iterator[tuple[int, Record | str]]:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse(line)
    except (OSError, EOFError, lzma.LZMAError) as fault:
        yield 0, f"cannot be read: {getattr(fault, 'strerror', None) or fault}"


def _parse(line: bytes) -> Record | str:
    """The record on a line, or why there is none."""
    try:
        record = records.decode(line.strip())
    except msgspec.ValidationError as fault:
        return f"not a record of dsl_bench ({fault})"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        if line.startswith(_START) and "truncated" in str(fault):
            return f"{_CUT}: the run was killed while it wrote this line"
        return f"not JSON ({fault})"
    if isinstance(record, RunHeader) and record.schema > records.SCHEMA:
        return f"written by a newer dsl_bench (schema {record.schema}, this one reads up to {records.SCHEMA})"
    return record


def _ours(path: Path) -> bool:
    """Whether a file holds a record, or the beginning of one."""
    for _, outcome in _lines(path):
        if not isinstance(outcome, str) or outcome.startswith((_CUT, "written by a newer")):
            return True
    return False


def default_paths() -> list[Path]:
    """Where results lie by default: ``results/`` and ``runs/`` here, and the ``results/`` of a source tree
    that is installed in editable mode. Only folders that exist."""
    here = [results_folder(), Path("runs"), Path(__file__).resolve().parents[1] / "results"]
    unique = {path.resolve(): path for path in reversed(here) if path.is_dir()}
    return list(reversed(unique.values()))


def results_folder() -> Path:
    """The folder of recorded results: ``$DSL_BENCH_RESULTS``, or ``results`` here."""
    return Path(os.environ.get(ENV_RESULTS) or "results")


def slug(text: str) -> str:
    """``text`` as a lower-case file name: ``NVIDIA H200`` → ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def promote(
    run_file: Path | str, name: str = "", force: bool = False, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Copy a run's file to ``results/<gpu>/<utc>-<name>.jsonl`` and return that path.

    Leaves out what no report reads: trials, what was pruned, and artifacts of configs that were not near the
    winner (the number of trials stays in each ``tuned`` line); and, with a word to ``say``, lines that a
    killed run left unfinished. Raises RecordError for a file with other unreadable lines, without a GPU or
    without results, where results/ would exceed its bound, and, without ``force``, where the target holds
    something else.
    """
    found, problems = read([run_file])
    for problem in problems:
        if not problem.cut:
            raise RecordError(f"{problem}; mend or remove the line before recording")
        say(f"left out {problem}")
    header = next((r for r in found if isinstance(r, RunHeader)), None)
    gpu = str(header.environment.get("gpu", "")) if header else ""
    kept = _worth_keeping(found)
    if header is None or not gpu or not any(isinstance(r, Race | Tuned) for r in kept):
        raise RecordError(f"{run_file} holds no results of a GPU, so there is nothing to record")
    stamp = re.sub(r"[^0-9TZ]", "", header.started.partition("+")[0]) + "Z"
    target = results_folder() / slug(gpu) / f"{stamp}-{slug(name) or slug(header.run_id)}.jsonl"
    data = b"".join(records.encode(_public(r)) + b"\n" for r in kept)
    if target.exists() and not force and target.read_bytes() != data:
        raise RecordError(f"{target} is there already, with other results: give another --name, or --force")
    _check_room(target, len(data))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        part.write_bytes(data)
        part.replace(target)
    except OSError as fault:
        raise RecordError(f"cannot write {target}: {fault.strerror or fault}") from fault
    return target


def _public(record: Record) -> Record:
    """A header without its machine's name and folders, which tell a reader nothing about the numbers."""
    if not isinstance(record, RunHeader):
        return record
    words = [Path(word).name if word.startswith("/") else word for word in record.command.split(" ")]
    environment = {k: v for k, v in record.environment.items() if k != "host"}
    return msgspec.structs.replace(record, command=" ".join(words), environment=environment)


def _worth_keeping(found: Sequence[Record]) -> list[Record]:
    keys = {c.key for r in found if isinstance(r, Tuned) for c in r.near}
    keys |= {p.key for r in found if isinstance(r, Race) for p in r.participants}
    return [
        r
        for r in found
        if not isinstance(r, Trial | Pruned) and not (isinstance(r, Compiled) and r.key not in keys)
    ]


def _check_room(target: Path, size: int) -> None:
    folder = results_folder()
    others = (p for p in folder.rglob("*.jsonl") if p != target) if folder.is_dir() else ()
    total = size + sum(p.stat().st_size for p in others)
    if total > MOST_BYTES:
        raise RecordError(
            f"{folder} would hold {total / 1e6:.1f} MB, the bound is {MOST_BYTES / 1e6:.0f} MB: "
            "remove superseded files first"
        )


def load_results(path: Path | str | Iterable[Path | str] | None = None) -> pd.DataFrame:
    """The recorded races as a DataFrame, one row a participant, with the columns of :class:`Entry`.

    ``path`` is a file, a folder or several of them; by default ``results/`` and ``runs/``. Lines that cannot
    be read are warned about, with file and number."""
    import warnings

    given = default_paths() if path is None else [path] if isinstance(path, str | Path) else list(path)
    found, problems = read(given)
    for problem in problems:
        warnings.warn(str(problem), stacklevel=2)
    return to_frame(entries(found))
