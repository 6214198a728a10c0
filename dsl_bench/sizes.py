"""A user's own sizes as text: ``--case m=4096,n=5120``, and the CSV files of ``--cases``.

What the words mean is for the workload to say."""

from __future__ import annotations

import csv
import io
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
    """Line numbers and cases from a CSV file with a header line; empty cells are left out.

    Raises UsageError that says where something is wrong (line and column, from 1), what stands there and what
    may stand there."""
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), skipinitialspace=True)
    try:
        names = [n.strip() for n in reader.fieldnames or ()]
        if not any(names):
            raise UsageError(f"--cases {path}:1: no header line; it names the parameters, as m,n,k,dtype")
        _check_header(f"--cases {path}:1", names)
        rows = [(reader.line_num, _csv_case(path, reader.line_num, names, row)) for row in reader]
    except csv.Error as fault:
        raise UsageError(f"--cases {path}:{reader.line_num}: {fault}; cells are split by commas") from fault
    rows = [(line, row) for line, row in rows if row]
    if not rows:
        raise UsageError(f"--cases {path}: no case under the header line {','.join(names)}; a case is a line")
    return rows


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise UsageError(f"--cases {path}: {fault.strerror or fault}") from fault
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = data[: fault.start].count(b"\n") + 1
        column = data[: fault.start].rpartition(b"\n")[2].count(b",") + 1
        byte = f"byte 0x{data[fault.start]:02x}"
        raise UsageError(f"--cases {path}:{line}: column {column}: {byte} is not UTF-8") from fault


def _check_header(where: str, names: list[str]) -> None:
    lower = [n.lower() for n in names]
    for column, name in enumerate(lower, start=1):
        if ";" in name or "\t" in name:
            raise UsageError(f"{where}: column {column}: {name!r} is no name; cells are split by commas")
        if name and name in lower[: column - 1]:
            raise UsageError(f"{where}: the column {name!r} is there twice, as {_place(lower, name)}")


def _place(names: list[str], name: str) -> str:
    return " and ".join(f"column {i}" for i, n in enumerate(names, start=1) if n == name)


def _csv_case(
    path: Path, line: int, names: list[str], row: dict[str | None, str | list[str] | None]
) -> dict[str, str]:
    beyond = row.pop(None, None) or []
    cells = [str(v or "").strip() for v in row.values()] + [v.strip() for v in beyond]
    for column, text in enumerate(cells, start=1):
        if text and (column > len(names) or not names[column - 1]):
            known = ", ".join(filter(None, names))
            raise UsageError(
                f"--cases {path}:{line}: column {column}: {text!r} has no name; the header line names {known}"
            )
    return {name: text for name, text in zip(names, cells, strict=False) if text}
