"""Drops from results/ what no report reads any more: run it when `dsl-bench record` finds the folder full.

    python scripts/tidy_results.py [--dry-run] [FOLDER]

Kept are the races that count for a row of the report, the latest search of each language on each case, the
artifacts that either needs, and all headers, ledgers, skips and failures. Trials (``.jsonl.xz``) stay as they
are. What was dropped is in git's history.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsl_bench import catalog, entry, records, standing, store
from dsl_bench.contest import Memory
from dsl_bench.records import Compiled, Race, Record, RunHeader, Tuned

ROOT = Path(__file__).resolve().parents[1]


def counted(found: Sequence[Record], known: catalog.Catalog) -> list[Race]:
    """The races that stand for some language on some case."""
    cases = {(c.workload, c.name): c for _, w in known.workloads().values() for c in w.cases}
    book = standing.Book(entry.entries(found), found, cases)
    hashes = known.hashes()
    numbers = {e.race for slot in book.slots() for e in standing.stand(slot, book, hashes).entries}
    # entries number the races in the order in which they began
    races = sorted((r for r in found if isinstance(r, Race)), key=lambda r: r.started)
    return [race for number, race in enumerate(races) if number in numbers]


def latest(found: Sequence[Record], known: catalog.Catalog) -> list[Tuned]:
    """The searches whose winners a run would take, or would look at again."""
    gpus = {str(r.environment.get("gpu", "")) for r in found if isinstance(r, RunHeader)}
    kept: list[Tuned] = []
    for gpu in sorted(gpus):
        of_gpu = {r.run_id for r in found if isinstance(r, RunHeader) and r.environment.get("gpu") == gpu}
        memory = Memory.of([r for r in found if r.run_id in of_gpu], known, gpu)
        kept += [*memory.tuned.values(), *(tuned for tuned, _ in memory.stale.values())]
    return kept


def needed(found: Sequence[Record], known: catalog.Catalog) -> list[Record]:
    """The records to keep, in their order."""
    races, searches = counted(found, known), latest(found, known)
    keys = {c.key for t in searches for c in t.near} | {p.key for r in races for p in r.participants}
    drop = {id(r) for r in found if isinstance(r, Race)} - {id(r) for r in races}
    drop |= {id(r) for r in found if isinstance(r, Tuned)} - {id(t) for t in searches}
    drop |= {id(r) for r in found if isinstance(r, Compiled) and r.key not in keys}
    return [r for r in found if id(r) not in drop]


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites the files; says what each lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    given = parser.parse_args(argv)
    files = sorted(given.folder.rglob("*.jsonl"))
    held = {}
    for path in files:
        held[path], problems = store.read([path])
        if problems:
            parser.error(f"{problems[0]}; mend or remove the line first: nothing was changed")
    keep = {records.encode(r) for r in needed([r for rows in held.values() for r in rows], catalog.load())}
    for path, rows in held.items():
        left = [r for r in rows if records.encode(r) in keep]
        sys.stdout.write(f"{path.name}: {len(rows) - len(left)} of {len(rows)} records go\n")
        if len(left) == len(rows) or given.dry_run:
            continue
        if any(isinstance(r, Race | Tuned) for r in left):
            path.write_bytes(b"".join(records.encode(r) + b"\n" for r in left))
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
