"""Rewrites the measured table of every page in docs/kernels/ from the recorded results.

    python scripts/kernel_pages.py [FOLDER]

A page ``<backend>-<topic>.md`` holds pairs of markers, each naming a workload; what stands between them is
generated.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from dsl_bench import catalog, report, store, tables

ROOT = Path(__file__).resolve().parents[1]
MARKS = re.compile(r"(<!-- measured:begin (\w+) -->\n).*?(<!-- measured:end -->)", re.DOTALL)
COLUMNS = ["group", "case", "kernel", "config", "cold", "sustained"]


def rows(backend: str, workload: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a case: the winner, its µs and its fraction with the verdict in each regime."""
    lines: dict[str, dict[str, Any]] = {}
    for row in table:
        if (row["backend"], row["workload"]) != (backend, workload) or row["group"] in ("quick", "edge"):
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
        backend = page.stem.partition("-")[0]

        def measured(found: re.Match[str], backend: str = backend) -> str:
            lines = rows(backend, found[2], table)
            body = tables.markdown(lines, COLUMNS) if lines else "Not measured yet."
            return f"{found[1]}{body}\n{found[3]}"

        page.write_text(MARKS.sub(measured, page.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "kernels")
