"""A user's own sizes as text: ``--case m=4096,n=5120``, and the CSV files of ``--cases``.

What the words mean is for the workload to say."""

from __future__ import annotations

import csv
from pathlib import Path

from dsl_bench.errors import UsageError


def parse_case_text(text: str) -> dict[str, str]:
    """``m=4096,n=5120`` as a mapping."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise UsageError(f"--case {text!r}: {part!r} is not name=value")
        if key.lower() in (k.lower() for k in pairs):
            raise UsageError(f"--case {text!r}: {key!r} is given twice")
        pairs[key] = value
    return pairs


def read_case_file(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Line numbers and cases from a CSV file with a header line; empty cells are left out."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            names = [n.strip().lower() for n in reader.fieldnames or ()]
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise UsageError(f"--cases {path}:1: the column {twice[0]!r} is there twice")
            rows = [(reader.line_num, _csv_case(path, reader.line_num, row)) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise UsageError(f"--cases {path}: {getattr(fault, 'strerror', None) or fault}") from fault
    rows = [(line, row) for line, row in rows if row]
    if not rows:
        raise UsageError(f"--cases {path}: no case under the header line")
    return rows


def _csv_case(path: Path, line: int, row: dict[str | None, str | list[str] | None]) -> dict[str, str]:
    if None in row:
        raise UsageError(f"--cases {path}:{line}: more cells than the header line names")
    cells = {str(k).strip(): str(v).strip() for k, v in row.items() if v}
    return {k: v for k, v in cells.items() if v}
