"""Bad input ends in one line and the documented exit code, through the installed console script's entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def dsl_bench(*args, cwd, env=None, timeout=240):
    command = [sys.executable, "-m", "dsl_bench.cli", *args]
    full = {**os.environ, "DSL_BENCH_BACKENDS": "", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=full)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("run", "gem"), 2, ("'gem'", "gemm")),
        (("run", "gemm", "-b", "tritn"), 2, ("'tritn'",)),
        (("run", "gemm", "-g", "skiny"), 2, ("'skiny'", "skinny")),
        (("run", "gemm", "-k", "triton/gem"), 2, ("'triton/gem'",)),
        (("run", "gemm", "-f", "tabel"), 2, ("'tabel'", "table")),
        (("run", "gemm", "--regime", "warm"), 2, ("'warm'", "sustained")),
        (("run", "gemm", "--data", "ones"), 2, ("'ones'", "zeros")),
        (("run", "gemm", "--case", "m=4"), 2, ("missing", "n")),
        (("run", "gemm", "--case", "m=4,n=x,k=4"), 2, ("n='x'",)),
        (("run", "gemm", "--case", "m=0,n=4,k=4"), 2, ("m='0'",)),
        (("run", "gemm", "--case", "m=4,n=4,k=4,dtype=fp8"), 2, ("fp8", "bf16")),
        (("run", "gemm", "--case", "m=4,n"), 2, ("'n'", "name=value")),
        (("run", "gemm", "--cases", "none.csv"), 2, ("none.csv",)),
        (("run", "gemm", "--resume", "none.jsonl"), 2, ("none.jsonl",)),
        (("run", "gemm", "--case", "nothing-like-this*"), 3, ("nothing-like-this",)),
        (("tune", "gemm", "--strategy", "anneal"), 2, ("'anneal'", "random")),
        (("run", "--target", "moon"), 2, ("moon",)),
        (("runn",), 2, ("runn",)),
        (("report", "-r", "none.jsonl"), 2, ("none.jsonl",)),
    ],
)
def test_bad_input_is_one_line_with_the_right_exit_code(tmp_path, args, code, words):
    done = dsl_bench(*args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("dsl-bench:")]) == 1
    assert "Traceback" not in done.stderr


def test_an_unwritable_results_file_is_said_before_anything_runs(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    env = {"DSL_BENCH_BACKENDS": "cuda"}
    done = dsl_bench("run", "gemm", "--out", str(blocker / "x.jsonl"), cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "cannot write results" in done.stderr


def test_a_case_file_with_named_columns_is_read(tmp_path):
    (tmp_path / "cases.csv").write_text("m,n,k,dtype\n32,48,64,fp16\n16,16,16,\n")
    done = dsl_bench(
        "plan", "gemm", "--cases", "cases.csv", "-f", "json", cwd=tmp_path, env={"DSL_BENCH_BACKENDS": "cuda"}
    )
    assert done.returncode == 0, done.stderr
    assert {r["case"] for r in json.loads(done.stdout)} == {"32x48x64-fp16", "16x16x16-bf16"}


def test_help_lists_every_command(tmp_path):
    done = dsl_bench("--help", cwd=tmp_path, env={"COLUMNS": "120"})
    assert done.returncode == 0
    for command in ("list", "plan", "doctor", "run", "tune", "check", "inspect", "report", "record"):
        assert command in done.stdout


def test_a_run_without_any_language_says_so(tmp_path):
    done = dsl_bench("run", "gemm", cwd=tmp_path)
    assert done.returncode == 3
    assert "no language backend to run" in done.stderr
