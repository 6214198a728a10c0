"""Two sets of results against each other: what became faster, slower, or cannot be told.

What is compared is never a time but the fraction of one vendor kernel, and only where both sides raced
against the same version of it. The verdict is that of every report (:func:`dsl_bench.stats.verdict`).
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsl_bench import stats, store
from dsl_bench.errors import RecordError, UsageError
from dsl_bench.records import Record, RunHeader
from dsl_bench.standing import Book, Numbers, Standing, stand
from dsl_bench.store import Entry, Problem

Row = dict[str, Any]
FIELDS = (
    "workload case regime backend verdict change change_lo change_hi before after baseline kernel_before "
    "kernel_after reason"
).split()
WORDS: Mapping[str, str] = {"win": "faster", "loss": "slower", "tie": "same", "ambiguous": "ambiguous"}
#: below this a launch is short: processes differ more, so their spread is pooled apart
SHORT_US = 50.0
#: spread between processes (relative standard deviation) where no slot of either side was raced twice
UNKNOWN_SPREAD = 0.01

Key = tuple[str, str, str, str]


@dataclass
class Side:
    """One of the two: its records, and by workload, case, regime and language each slot's standing, and the
    ratios of those that have any."""

    name: str
    records: list[Record]
    problems: list[Problem]
    entries: list[Entry]
    standings: dict[Key, Standing]
    numbers: dict[Key, Numbers]


def load(name: str, paths: Sequence[Path | str] = ()) -> Side:
    """A side by the name of a file, a folder, a run (its id) or a git revision (its ``results`` folder).

    Runs are looked up in ``paths`` (recorded results and the user's own runs). UsageError for anything
    else, RecordError for a side without races."""
    records, problems = _records(name, paths)
    entries = store.entries(records)
    if not entries:
        raise RecordError(f"{name}: holds no race")
    book = Book(entries, records, {})
    standings = {
        (s.case.workload, s.case.name, s.regime, s.backend): stand(s, book, None) for s in book.slots()
    }
    held = {key: Numbers(st, book) for key, st in standings.items() if st.status == "ok" and st.entries}
    numbers = {key: n for key, n in held.items() if n.baseline is not None}
    return Side(name, records, problems, entries, standings, numbers)


def _records(name: str, paths: Sequence[Path | str]) -> tuple[list[Record], list[Problem]]:
    if Path(name).exists():
        return store.read([Path(name)])
    records, problems = store.read(paths or store.default_paths())
    mine = [r for r in records if getattr(r, "run_id", None) == name]
    if mine:
        return mine, problems
    files = _of_revision(name)
    if files is not None:
        return files
    runs = sorted({r.run_id for r in records if isinstance(r, RunHeader)})
    raise UsageError(
        f"{name!r} is no file, run or git revision with results; runs here: {', '.join(runs[-5:]) or 'none'}"
    )


def _of_revision(name: str) -> tuple[list[Record], list[Problem]] | None:
    """The records under ``results`` in a revision of the repository around the results; None for no such."""
    root = store.results_folder().parent

    def git(*args: str) -> bytes | None:
        command = ["git", "-C", str(root), *args]
        try:
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    if name.startswith("-") or git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") is None:
        return None
    listed = git("ls-tree", "-r", "--name-only", name, "--", "results") or b""
    files = [f for f in listed.decode().splitlines() if f.endswith(".jsonl")]
    if not files:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            data = git("show", f"{name}:{file}") or b""
            (Path(folder) / f"{number}-{Path(file).name}").write_bytes(data)
        return store.read([Path(folder)])


def environments(before: Side, after: Side) -> list[str]:
    """What differs between the machines and toolchains of two sides, a line each."""
    ours, theirs = (_facts(side) for side in (before, after))
    return [
        f"{name}: {_text(ours.get(name))} before, {_text(theirs.get(name))} after"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def _text(values: set[str] | None) -> str:
    return ", ".join(sorted(values)) if values else "not recorded"


def _facts(side: Side) -> dict[str, set[str]]:
    facts: dict[str, set[str]] = {}
    runs = {e.run_id for e in side.entries}
    for record in side.records:
        if isinstance(record, RunHeader) and record.run_id in runs:
            for name in ("gpu", "driver", "cuda", "python"):
                if name in record.environment:
                    facts.setdefault(name, set()).add(str(record.environment[name]))
    for entry in side.entries:
        facts.setdefault(entry.backend, set()).add(entry.version)
    return facts


def compare(before: Side, after: Side, threshold: float = 0.0) -> list[Row]:
    """One row a workload, case, regime and language of either side, with the fields ``FIELDS``.

    ``verdict``: same, faster, slower, ambiguous, or missing (on one side only, or never measured).
    ``threshold`` is the relative loss that still counts as the same (0.02: two per cent)."""
    spread = Spreads((before, after))
    keys = list(dict.fromkeys((*before.standings, *after.standings)))
    return [_row(key, before, after, spread, threshold) for key in keys]


class Spreads:
    """How far processes lie apart, case by case: from the case's own processes (all its languages, both
    sides), drawn towards what launches of its kind (short or long) show in the same regime."""

    def __init__(self, sides: Iterable[Side]) -> None:
        self._cases: dict[Key, list[list[float]]] = {}
        self._kinds: dict[tuple[str, bool], list[list[float]]] = {}
        for side in sides:
            for key, numbers in side.numbers.items():
                centres = [float(np.median(v / o)) for v, o in _pairs(numbers, numbers.baseline)]
                self.add(key, numbers.mean("time_us"), centres)

    def add(self, key: Key, time_us: float, centres: list[float]) -> None:
        """Count a slot's medians, one a process."""
        self._cases.setdefault((*key[:3], ""), []).append(centres)
        self._kinds.setdefault((key[2], time_us < SHORT_US), []).append(centres)

    def of(self, key: Key, time_us: float) -> float:
        """The relative standard deviation between processes to reckon with."""
        kind = stats.Spread.of(self._kinds.get((key[2], time_us < SHORT_US), ()))
        found = stats.Spread.of(self._cases.get((*key[:3], ""), ())).within(kind)
        return found.deviation if found.freedom else UNKNOWN_SPREAD


def _pairs(numbers: Numbers, baseline: str | None) -> list[tuple[Any, Any]]:
    """Samples of a baseline and of ours, race by race, on the rounds that pick no baseline."""
    assert baseline is not None
    return [
        (stats.split(rivals[baseline].samples)[1], stats.split(entry.samples)[1])
        for entry, rivals in zip(numbers.entries, numbers.rivals, strict=True)
    ]


def _row(key: Key, before: Side, after: Side, spread: Spreads, threshold: float) -> Row:
    row: Row = dict.fromkeys(FIELDS)
    row |= dict(zip(("workload", "case", "regime", "backend"), key, strict=True))
    old, new = before.numbers.get(key), after.numbers.get(key)
    for name, numbers in (("before", old), ("after", new)):
        if numbers is not None and numbers.estimate is not None:
            row |= {name: numbers.estimate.value, f"kernel_{name}": numbers.entries[-1].kernel}
    if old is None or new is None:
        return row | {"verdict": "missing", "reason": _absence(key, before, after)}
    baseline, why = _common(old, new)
    if baseline is None:
        return row | {"verdict": "ambiguous", "reason": why}
    return (
        row
        | {"baseline": baseline}
        | _verdict(old, new, baseline, spread.of(key, old.mean("time_us")), threshold)
    )


def _absence(key: Key, before: Side, after: Side) -> str:
    said = []
    for side in (before, after):
        if key not in side.numbers:
            standing = side.standings.get(key)
            what = "not there" if standing is None else f"{standing.status} {standing.reason}".strip()
            said.append(f"{side.name}: {what}")
    return "; ".join(said)


def _common(old: Numbers, new: Numbers) -> tuple[str | None, str]:
    """The baseline to measure by: the fastest before, where both sides raced the same version of it."""
    name = old.baseline
    assert name is not None
    if any(name not in rivals for rivals in new.rivals):
        return None, f"{name} was not raced after"
    versions: list[set[str]] = [{r[name].version for r in n.rivals} for n in (old, new)]
    if versions[0] != versions[1]:
        return None, f"{name} is another version: {_text(versions[0])} before, {_text(versions[1])} after"
    return name, ""


def _verdict(old: Numbers, new: Numbers, baseline: str, between: float, threshold: float) -> Row:
    estimate = stats.change(_pairs(old, baseline), _pairs(new, baseline), between)
    floor = max(old.floor or 0.0, new.floor or 0.0)
    width = max(stats.band(floor), threshold)
    word = WORDS[stats.verdict(estimate.lo, estimate.hi, width)]
    return {
        "verdict": word,
        "change": estimate.value,
        "change_lo": estimate.lo,
        "change_hi": estimate.hi,
    }


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows have each verdict."""
    found = dict.fromkeys(("faster", "slower", "same", "ambiguous", "missing"), 0)
    for row in rows:
        found[row["verdict"]] += 1
    return found
