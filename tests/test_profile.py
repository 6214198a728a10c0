"""``profile``: ncu's CSV, and what it says where there is no ncu or no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import profile
from dsl_bench.errors import UsageError
from dsl_bench.jobs import Origin, ProfileJob, Racer
from dsl_bench.records import CaseRef, Choice

ROOT = Path(__file__).parent.parent
CSV = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","gemm(CUtensorMap, int)","gpu__time_duration.sum","ns","181,248"
"0","7","gemm(CUtensorMap, int)","lts__t_sector_hit_rate.pct","%","81.25"
"0","7","gemm(CUtensorMap, int)","dram__bytes_read.sum","byte","100663296"
"0","7","gemm(CUtensorMap, int)","some__thing.else","","1"
"1","7","combine(float*)","gpu__time_duration.sum","ns","2000"
"1","7","combine(float*)","launch__registers_per_thread","register/thread","n/a"
"""


def test_a_row_a_launch_in_our_units() -> None:
    first, second = profile.parse(CSV)
    assert (first["launch"], first["function"], second["function"]) == (0, "gemm", "combine")
    assert first["time_us"] == pytest.approx(181.248)
    assert first["dram_read_mb"] == pytest.approx(100.663296)
    assert first["l2_hit_pct"] == 81.25 and first["tensor_pct"] is None
    assert second["registers"] is None


def test_nothing_is_parsed_from_an_error() -> None:
    assert profile.parse("==ERROR== ERR_NVGPUCTRPERM - no permission\n") == []
    assert "administrators" in profile._why("==ERROR== ERR_NVGPUCTRPERM - no permission\n", b"")


@pytest.mark.parametrize("path", ["", "with ncu"])
def test_without_ncu_or_a_gpu_it_says_so_in_one_line(path: str, tmp_path: Path) -> None:
    if path:
        (tmp_path / "ncu").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "ncu").chmod(0o755)
    elif shutil.which("ncu", path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute"):
        pytest.skip("this machine has ncu beside the PATH")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}" if path else str(tmp_path)}
    command = [sys.executable, "-m", "dsl_bench", "profile", "gemm", "-g", "smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=env)
    last = done.stderr.strip().splitlines()[-1]
    if path:
        assert done.returncode in (0, 2) and ("nothing to profile" in last or done.returncode == 0)
    else:
        assert "ncu is not on the PATH" in last and done.returncode == 2


FAKE = """#!{python}
import subprocess, sys, time
log = sys.argv[sys.argv.index("--log-file") + 1]
start = next(i for i, a in enumerate(sys.argv) if a == {python!r})
{body}
"""


def fake_ncu(folder: Path, body: str) -> str:
    """A program that takes ncu's options and does ``body``."""
    path = folder / "ncu"
    path.write_text(FAKE.format(python=sys.executable, body=body))
    path.chmod(0o755)
    return str(path)


def any_job() -> ProfileJob:
    case = CaseRef("gemm", "c", {"m": 8, "n": 8, "k": 8}, "fp16", ())
    nowhere = Origin("backend", "none", "nowhere:X")
    racer = Racer(nowhere, (), "language", Choice("triton/gemm", "0", {}), "")
    return ProfileJob(Origin("workload", "none", "nowhere:X"), case, racer)


def test_the_worker_under_ncu_does_not_end_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "csv").write_text(CSV)
    body = f"""
subprocess.run(sys.argv[start:], stdin=subprocess.DEVNULL, check=True)
time.sleep(0.5)
open(log, "w").write(open({str(tmp_path / "csv")!r}).read())"""
    rows = profile.measure(fake_ncu(tmp_path, body), any_job(), 60.0)
    assert [r["function"] for r in rows] == ["gemm", "combine"]


def test_a_metric_that_ncu_does_not_know_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "csv").write_text(CSV)
    name = profile.METRICS["tensor_pct"][0]
    body = f"""
known = {name!r} not in sys.argv[sys.argv.index("--metrics") + 1]
text = open({str(tmp_path / "csv")!r}).read() if known else "==ERROR== Failed to find metric {name}\\n"
open(log, "w").write(text)"""
    rows = profile.measure(fake_ncu(tmp_path, body), any_job(), 60.0)
    assert [r["tensor_pct"] for r in rows] == [None, None] and rows[0]["l2_hit_pct"] == 81.25


def test_what_the_worker_refuses_under_ncu_is_told(tmp_path: Path) -> None:
    body = "subprocess.run(sys.argv[start:], check=True)"
    with pytest.raises(UsageError, match="triton/gemm under ncu: "):
        profile.measure(fake_ncu(tmp_path, body), any_job(), 60.0)


def test_an_ncu_that_hangs_is_ended_with_all_it_started(tmp_path: Path, processes: Any) -> None:
    pid = tmp_path / "pid"
    body = f"""
child = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(child.pid))
child.wait()"""
    with pytest.raises(UsageError, match="did not end within 2 s"):
        profile.measure(fake_ncu(tmp_path, body), any_job(), 2.0)
    processes.assert_gone(int(pid.read_text()))


@pytest.mark.gpu
def test_a_gemm_under_ncu() -> None:
    command = [
        sys.executable,
        "-m",
        "dsl_bench",
        "profile",
        "gemm",
        "-c",
        "m=1024,n=1024,k=1024",
        "-b",
        "triton",
    ]
    done = subprocess.run([*command, "-f", "csv"], capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "tensor_pct" in done.stdout and "triton/" in done.stdout
