"""A run that is stopped keeps what it had, and goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsl_bench import store
from dsl_bench.records import Interpreted

pytest.importorskip("triton", reason="the interpreter is Triton's: pip install 'dsl-bench[triton]'")


def command(out: Path, *more: str) -> list[str]:
    kernel = ("-k", "triton/gemm")
    args = ("run", "gemm", "-b", "triton", *kernel, "--target", "interpret", "-f", "csv", *more)
    return [sys.executable, "-m", "dsl_bench.cli", *args]


def start(cwd: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(out, "--out", str(out)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_result(out: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if out.exists() and b'"interpret"' in out.read_bytes():
            return
        time.sleep(0.02)


def interpreted(out: Path) -> list[tuple[str, str]]:
    records, problems = store.read([out])
    assert not problems
    return [(r.kernel, r.case.name) for r in records if isinstance(r, Interpreted)]


def workers_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"DSL_BENCH_PARENT={pid}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_run_keeps_its_records_and_resumes(tmp_path, number, code):
    out = tmp_path / "run.jsonl"
    process = start(tmp_path, out)
    wait_for_result(out, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=200)
    finished_early = process.returncode == 0
    assert finished_early or process.returncode == code, stderr
    kept = interpreted(out)
    assert kept
    deadline = time.monotonic() + 60
    while workers_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers_of(process.pid)
    done = subprocess.run(
        command(out, "--resume", str(out)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    everything = interpreted(out)
    assert everything[: len(kept)] == kept
    assert len(everything) == len(set(everything)) > 3


def test_a_time_limit_lists_what_is_left(tmp_path):
    out = tmp_path / "run.jsonl"
    done = subprocess.run(
        [*command(out, "--out", str(out), "--time-limit", "0")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    assert "not finished within the time limit: interpret triton/gemm on" in done.stderr
    assert interpreted(out) == []
