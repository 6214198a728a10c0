"""Bad input ends in one line and the documented exit code, through the installed console script's entry."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsl_bench import console, sizes, tables
from dsl_bench.errors import UsageError


def dsl_bench(*args, cwd, env=None, timeout=240):
    command = [sys.executable, "-m", "dsl_bench.cli", *args]
    full = {**os.environ, "DSL_BENCH_BACKENDS": "", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=full)


@pytest.mark.sampled(12)
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
        (("run", "gemm", "--case", "*4096*", "--case", "16x16-bf16"), 3, ("'16x16-bf16'",)),
        (("run", "gemm", "--case", ""), 2, ("--case",)),
        (("run", "gemm", "--case", "m=4,n=4,k=4,M=5"), 2, ("'M'", "twice")),
        (("run", "gemm", "--time-limit", "-1"), 2, ("--time-limit",)),
        (("run", "gemm", "--winners", "none.jsonl"), 2, ("none.jsonl",)),
        (("run", "gemm", "--resume", "none.jsonl", "--out", "b.jsonl"), 2, ("none.jsonl",)),
        (("plan", "gemm"), 3, ("no language backend",)),
        (("inspect", "gemm"), 3, ("no language backend",)),
        (("report", "-g", "skiny"), 2, ("'skiny'", "skinny")),
        (("report", "--readme", "none.md"), 2, ("none.md",)),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"m,n,k\n4,4,4,5\n", "cases.csv:2: column 4: '5' has no name; the header line names m, n, k"),
        (b",n,k\n4,4,4\n", "cases.csv:2: column 1: '4' has no name; the header line names n, k"),
        (b"m,n,k,M\n4,4,4,5\n", "cases.csv:1: the column 'm' is there twice, as column 1 and column 4"),
        (b"m;n;k\n4;4;4\n", "cases.csv:1: column 1: 'm;n;k' is no name; cells are split by commas"),
        (b"m,n,k\n", "cases.csv: no case under the header line m,n,k"),
        (b"", "cases.csv:1: no header line"),
        (b"m,n,k\n4,\xff,4\n", "cases.csv:2: column 2: byte 0xff is not UTF-8"),
    ],
)
def test_case_files_name_line_and_column_at_fault(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    Path("cases.csv").write_bytes(text)
    with pytest.raises(UsageError, match=f"^--cases {re.escape(words)}"):
        sizes.read_case_file(Path("cases.csv"))


def test_what_a_workload_refuses_in_a_case_file_names_the_line(tmp_path):
    for text, words in (
        ("M,N,K\n4,4,4\n4,x,4\n", "--cases cases.csv:3: gemm: n='x' is not a positive integer"),
        ("m,n,q\n4,4,4\n", "--cases cases.csv:2: gemm: a case takes m, n, k, dtype; unknown q; missing k"),
    ):
        (tmp_path / "cases.csv").write_text(text)
        done = dsl_bench("plan", "gemm", "--cases", "cases.csv", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr


def test_own_sizes_may_be_given_by_the_name_that_results_show(tmp_path):
    args = ("plan", "gemm", "--case", "40x56x72-fp16", "-b", "cuda", "-f", "json")
    done = dsl_bench(*args, cwd=tmp_path, env={"DSL_BENCH_BACKENDS": "cuda"})
    assert done.returncode == 0, done.stderr
    assert {r["case"] for r in json.loads(done.stdout)} == {"40x56x72-fp16"}


def test_a_file_that_is_no_results_file_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.md").write_text("# mine\n")
    env = {"DSL_BENCH_BACKENDS": "cuda"}
    for option in ("--out", "--resume"):
        done = dsl_bench("run", "gemm", option, "notes.md", cwd=tmp_path, env=env)
        assert done.returncode == 2
        assert "notes.md is not a results file" in done.stderr
    assert (tmp_path / "notes.md").read_text() == "# mine\n"


def test_a_backend_that_the_environment_leaves_out_is_told_apart_from_none(tmp_path):
    done = dsl_bench("run", "gemm", "-b", "triton", cwd=tmp_path)
    assert done.returncode == 2
    assert "DSL_BENCH_BACKENDS='' leaves out all others" in done.stderr


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    env = {"DSL_BENCH_BACKENDS": "cuda", "DSL_BENCH_CACHE_DIR": str(tmp_path / "file")}
    done = dsl_bench("run", "gemm", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert f"cannot write to the cache {tmp_path / 'file'}" in done.stderr
    assert "DSL_BENCH_CACHE_DIR" in done.stderr


def test_warnings_about_a_foreign_file_are_few(tmp_path):
    (tmp_path / "notes.md").write_text("text\n" * 100)
    done = dsl_bench("report", "-r", "notes.md", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.count("warning:") == 6
    assert "95 more" in done.stderr


def test_a_full_disk_a_closed_pipe_and_an_ascii_terminal_give_no_traceback(tmp_path):
    command = [sys.executable, "-m", "dsl_bench", "list"]
    env = {**os.environ, "DSL_BENCH_BACKENDS": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "dsl-bench: cannot write the output: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    command += ["--plugin", "mine.py"]  # which is said on standard error: its reader too has gone
    (tmp_path / "mine.py").write_text("KERNELS = 1")
    for stdout, code in ((subprocess.PIPE, 0), (subprocess.STDOUT, 141)):
        reader, writer = os.pipe()
        os.close(reader)
        out = writer if stdout is subprocess.STDOUT else stdout
        done = subprocess.run([*command, "-v"], stdout=out, stderr=writer, text=True, env=env, cwd=tmp_path)
        os.close(writer)
        assert done.returncode == code, (stdout, done.stdout)


def test_streams_that_are_closed_are_no_error(tmp_path):
    command = f"{sys.executable} -m dsl_bench list -f csv"
    for closed in ("<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, cwd=tmp_path
        )
        assert (done.returncode, done.stderr) == (0, ""), closed
        assert (not done.stdout) == (">&-" in closed)


def test_a_run_whose_reader_has_gone_loses_no_record(tmp_path):
    command = [sys.executable, "-m", "dsl_bench", "run", "gemm", "--target", "interpret"]
    env = {**os.environ, "DSL_BENCH_BACKENDS": "cuda"}
    command += ["--case", "m=64,n=64,k=64", "--out", "run.jsonl"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=writer, env=env, cwd=tmp_path)
    os.close(writer)
    assert done.returncode == 141
    kinds = [json.loads(line)["type"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert kinds[0] == "run" and len(kinds) > 1, kinds
    done = dsl_bench("list", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "?" not in done.stdout


@pytest.mark.parametrize("seconds", [0.15, 0.6])
def test_an_early_interrupt_is_one_line(tmp_path, seconds):
    # before this line Python itself was starting, which answers as it likes
    # (the handler is set anew: what a shell starts in the background begins with interrupts ignored)
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{handler}; from dsl_bench.__main__ import main; print('here', flush=True); main()"
    command = [sys.executable, "-c", code, "list"]
    env = {**os.environ, "DSL_BENCH_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    # Python makes an interrupt of an import a death by the signal: a shell shows 130 for both
    assert process.returncode in (130, -signal.SIGINT), stderr
    assert (stdout, stderr) == ("", "dsl-bench: interrupted\n")


def test_plain_progress_reaches_its_end(capsys):
    advance = console.plain_lines()
    for done in range(24):
        advance("compiled", done, 23)
    advance("compiled", 23, 23)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "compiled 23/23"
    assert lines.count("compiled 23/23") == 1
    assert len(lines) <= 13


def test_a_narrow_terminal_gets_blocks_of_lines(monkeypatch):
    row = dict.fromkeys("abcdef", "a long text that would be folded")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True, raising=False)
    text = tables.render([row, row], "table")
    assert text.splitlines()[0] == "a  a long text that would be folded"
    # a pipe has no width, unless it was given one
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: False, raising=False)
    text = tables.render(
        [dict.fromkeys("abcdef", "a long text that has to be folded once, at a blank")], "table"
    )
    assert text.splitlines()[:2] == ["a  a long text that has to be folded", "   once, at a blank"]
    assert tables.render([row], "csv").splitlines()[1] == ",".join(row.values())
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    assert tables.render([row, row], "table").count("a long text that would be folded") == 12


def test_the_package_completes_its_public_names():
    import dsl_bench

    assert set(dsl_bench.__all__) <= set(dir(dsl_bench))


def test_a_run_without_any_language_says_so(tmp_path):
    done = dsl_bench("run", "gemm", cwd=tmp_path)
    assert done.returncode == 3
    assert "no language backend to run" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="for machines without a GPU")
def test_doctor_fails_where_speed_cannot_be_measured(tmp_path):
    done = dsl_bench("doctor", "-f", "json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)[-1]["verdict"] == "not fit"
