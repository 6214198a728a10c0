"""Rows as text: a table for a terminal, Markdown, CSV or JSON. Knows nothing of what the rows mean."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dsl_bench.errors import unknown

FORMATS = ("table", "json", "csv", "md")
Row = Mapping[str, Any]

#: wide enough for any row when nobody's terminal sets a width
_WIDE = 400
#: the fewest characters a long column may be folded to before a table gives way to blocks of lines
_LEAST = 16


def render(rows: Sequence[Row], fmt: str, columns: Sequence[str] | None = None) -> str:
    """The rows in format ``fmt``, without a final newline. ``columns`` selects and orders them; by default
    all, in the order of their first appearance. JSON is one array with an object a line."""
    if fmt not in FORMATS:
        raise unknown("format", fmt, FORMATS)
    names = (
        list(columns) if columns is not None else list(dict.fromkeys(name for row in rows for name in row))
    )
    match fmt:
        case "json":
            return _json(rows, names)
        case "csv":
            return _csv(rows, names)
        case "md":
            return markdown(rows, names)
    return _table(rows, names)


def cell(value: Any, zeros: bool = False) -> str:
    """A value for human eyes: four significant digits, where ``zeros`` to the last; nothing for None and
    NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if abs(value) >= 1000 or not math.isfinite(value):
            return f"{value:.0f}"
        return f"{value:#.4g}".removesuffix(".") if zeros else f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def plain(value: Any) -> Any:
    """A value for JSON: NaN and infinities become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(rows: Sequence[Row], names: Sequence[str]) -> str:
    ascii_only = not _unicode()
    lines = [json.dumps({n: plain(row.get(n)) for n in names}, ensure_ascii=ascii_only) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"


def _csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_cell(row.get(n)) for n in names] for row in rows)
    return out.getvalue().rstrip("\n")


def _csv_cell(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value


def markdown(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A Markdown table; columns of numbers are aligned to the right."""
    numeric = {n for n in names if _numeric([row.get(n) for row in rows])}
    lines = [
        "| " + " | ".join(names) + " |",
        "|" + "|".join("---:" if n in numeric else "---" for n in names) + "|",
    ]
    lines += ["| " + " | ".join(_md_cell(row.get(n)) for n in names) + " |" for row in rows]
    return "\n".join(lines)


def _md_cell(value: Any) -> str:
    return " ".join(cell(value).replace("|", "\\|").split())


def _numeric(values: Sequence[Any]) -> bool:
    present = [v for v in values if v is not None]
    return bool(present) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in present)


def _unicode() -> bool:
    """Whether standard output takes more than ASCII."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def sections(
    rows: Sequence[Row], by: Sequence[str], names: Sequence[str], spare: Sequence[Sequence[str]] = ()
) -> tuple[str, list[str]]:
    """A table for every value of the columns ``by``, which head it, and the columns left out of all of them:
    of ``spare``, set by set, as many as the terminal is too narrow for. Columns without a value go too."""
    kept = [n for n in names if n not in by and any(cell(row.get(n)) for row in rows)]
    gone: list[str] = []
    for those in spare:
        if not _too_narrow(_cells(rows, kept), kept, _width() or _terminal(), _WIDE):
            break
        gone += [n for n in kept if n in those]
        kept = [n for n in kept if n not in those]
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(" ".join(cell(row.get(n)) for n in by), []).append(row)
    texts = ("\n".join([title, _table(held, kept).strip("\n")]) for title, held in parts.items())
    return "\n\n".join(texts), gone


def _cells(rows: Sequence[Row], names: Sequence[str]) -> list[list[str]]:
    return [[cell(row.get(n), zeros=True) for n in names] for row in rows]


def _width() -> int | None:
    """The width of what nobody's terminal limits; None where one does, or COLUMNS says what it is."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else _WIDE


def _terminal() -> int:
    from rich.console import Console

    return Console().width


def _table(rows: Sequence[Row], names: Sequence[str]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = _cells(rows, names)
    out = io.StringIO()
    console = Console(file=out, width=_width(), markup=False, highlight=False, emoji=False)
    if _too_narrow(cells, names, console.width):
        return _blocks(cells, names, console.width)
    plain_box = box.Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
    table = Table(box=box.SIMPLE if _unicode() else plain_box, pad_edge=False)
    for name in names:
        right = _numeric([row.get(name) for row in rows])
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*line)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def _too_narrow(
    cells: Sequence[Sequence[str]], names: Sequence[str], width: int, least: int = _LEAST
) -> bool:
    """Whether the columns would be folded to unreadable ones: each can give way to ``least`` only."""
    columns = range(len(names))
    longest = [max([len(names[i]), *(len(line[i]) for line in cells)]) for i in columns]
    # three blanks lie between columns and one at either end
    return sum(min(n, least) for n in longest) + 3 * len(names) - 1 > width


def _blocks(cells: Sequence[Sequence[str]], names: Sequence[str], width: int) -> str:
    """A row as lines of ``name  value``, folded, for a terminal on which a table would not be readable."""
    pad = max((len(n) for n in names), default=0)
    room = max(_LEAST, width - pad - 2)
    blocks = []
    for line in cells:
        lines = []
        for name, text in zip(names, line, strict=True):
            folded = textwrap.wrap(text, room, break_on_hyphens=False)
            lines += [f"{n:<{pad}}  {t}" for n, t in zip([name, *[""] * len(folded)], folded, strict=False)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
