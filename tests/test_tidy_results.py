"""scripts/tidy_results.py drops what no report reads, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dsl_bench import catalog, records, report, store
from dsl_bench.records import RunHeader, Tuned

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "tidy_results.py"


def tidy(folder: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    shutil.copytree(ROOT / "results", folder, ignore=shutil.ignore_patterns("*.xz"))
    tidy(folder)
    return folder


def test_a_second_time_there_is_nothing_to_drop(results: Path) -> None:
    lines = tidy(results).splitlines()
    assert lines and all(": 0 of " in line for line in lines)


@pytest.mark.sampled(0)
def test_a_replaced_search_goes_and_the_report_stays(results: Path) -> None:
    found = catalog.load()
    cases = [c for _, w in found.workloads().values() for c in w.cases]
    before = report.rows(store.read([results])[0], found.hashes(), cases)
    tuned = next(r for r in store.read([results])[0] if isinstance(r, Tuned))
    headers = [r for r in store.read([results])[0] if isinstance(r, RunHeader) and r.run_id == tuned.run_id]
    old = msgspec.structs.replace(headers[0], run_id="old", started="2020-01-01T00:00:00+00:00")
    lines = [old, msgspec.structs.replace(tuned, run_id="old")]
    path = results / "old.jsonl"
    path.write_bytes(b"".join(records.encode(r) + b"\n" for r in lines))
    assert "old.jsonl: 1 of 2 records go" in tidy(results, "--dry-run")
    assert path.exists()
    tidy(results)
    assert not path.exists()
    assert report.rows(store.read([results])[0], found.hashes(), cases) == before
