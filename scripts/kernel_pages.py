"""Rewrites the measured table of every page in docs/kernels/ from the recorded results.

    python scripts/kernel_pages.py [FOLDER]

A page ``<backend>-<workload>.md`` holds the markers below; what stands between them is generated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dsl_bench import catalog, report, store, tables

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def rows(backend: str, workload: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a case: the winner, its µs and its fraction with the verdict in each regime."""
    lines: dict[str, dict[str, Any]] = {}
    for row in table:
        if (row["backend"], row["workload"]) != (backend, workload) or row["group"] == "quick":
            continue
        line = lines.setdefault(row["case"], {"group": row["group"], "case": row["case"]})
        line["kernel"] = row["kernel"].partition("/")[2]
        line["config"] = " ".join(f"{k}={v}" for k, v in (row["config"] or {}).items())
        regime = row["regime"]
        if row["fraction"] is None:
            line[regime] = row["status"]
        else:
            line[regime] = f"{row['time_us']:.4g} µs, {row['fraction']:.3f} {row['verdict']}"
    return list(lines.values())


def main(folder: Path) -> None:
    """Every page that has the markers."""
    records, _ = store.read([ROOT / "results"])
    found = catalog.load()
    cases = [c for _, w in found.workloads().values() for c in w.cases]
    table = report.rows(records, found.hashes(), cases)
    for page in sorted(folder.glob("*.md")):
        text = page.read_text()
        head, begin, rest = text.partition(BEGIN)
        _, end, tail = rest.partition(END)
        backend, _, workload = page.stem.partition("-")
        if begin and end:
            body = tables.markdown(
                rows(backend, workload, table), ["group", "case", "kernel", "config", "cold", "sustained"]
            )
            page.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "kernels")
