"""The wall: every kind of wrong kernel gets the verdict of kinds.py, and costs nobody else theirs."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import jobs, pool
from dsl_bench.jobs import Origin, Partial
from dsl_bench.records import CaseRef, Choice, Interpreted

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "wrong_kernels"
FIXTURE = HERE / "plugin_fixture"
PAGE = HERE.parent / "docs" / "measuring.md"

pytest.importorskip("torch")


def load(name: str) -> Any:
    """A file of tests/wrong_kernels as a module."""
    spec = importlib.util.spec_from_file_location(f"wrong_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kinds = load("kinds")

GEMM = Origin("workload", "gemm", "dsl_bench.workloads.gemm:WORKLOAD")
TRITON = Origin("backend", "triton", "dsl_bench.backends.triton:BACKEND")
#: ragged, and long enough in K for low precision to show
CASE = CaseRef("gemm", "33x61x512-fp16", {"m": 33, "n": 61, "k": 512}, "fp16")
#: K not a multiple of the Triton kernels' step
RAGGED_K = CaseRef("gemm", "33x61x200-fp16", {"m": 33, "n": 61, "k": 200}, "fp16")
LAST_ONES = ("hangs_in_python", "exits_at_once", "aborts", "segfaults")


def file_origin(path: Path) -> Origin:
    return Origin("file", path.stem, str(path), "file")


def racer(kernel: str, *, extra: tuple[Origin, ...] = ()) -> jobs.Racer:
    """The kernel called ``kernel``: of the Triton file where its name says so, else of the CPU's."""
    kind = kernel.rpartition("/")[2]
    if kernel.startswith("triton/"):
        backend, mine = TRITON, (file_origin(FOLDER / "in_triton.py"),)
        config = {"kind": "" if kind == "holds" else kind}
    else:
        backend = file_origin(FOLDER / "on_cpu.py")
        mine, kernel = (backend,), f"numpyref/{kind}"
        config = {"rows": 16} if kind == "gemm" else {"kind": kind}
    return jobs.Racer(backend, (*mine, *extra), "language", Choice(kernel, "hash", config, kind), "")


def interpret(worker: pool.Worker, given: jobs.Racer, deadline: float = 60.0) -> Interpreted:
    """The record that an interpreter worker's answer becomes."""
    case = RAGGED_K if given.backend == TRITON else CASE
    config = dict(given.choice.config)
    job = jobs.InterpretJob("run", GEMM, case, given, config)
    kept: list[Any] = []
    outcome = worker.run(job, deadline, lambda r: kept.append(r.record) if isinstance(r, Partial) else None)
    if kept:
        return kept[0]
    assert outcome.refused is not None
    refused = outcome.refused
    c = given.choice
    return Interpreted(
        "run", case, c.kernel, c.kernel_hash, c.config, refused.status, 0.0, [], refused.check, refused.reason
    )


@pytest.fixture(scope="module")
def worker() -> Iterator[pool.Worker]:
    """One worker for all: what one kernel leaves behind would show in the next one's verdict."""
    path = os.pathsep.join(filter(None, [str(FIXTURE), os.environ.get("PYTHONPATH")]))
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    made = pool.Worker("interpret", env)
    yield made
    made.kill()


NAMES = [(name, verdicts) for kind in kinds.KINDS for name, verdicts in kind.cpu.items()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "verdicts"), NAMES, ids=[name for name, _ in NAMES])
def test_a_wrong_kernel_is_caught_and_the_next_one_is_not_blamed(
    worker: pool.Worker, name: str, verdicts: tuple[Any, ...]
) -> None:
    if name.startswith("triton/"):
        pytest.importorskip("triton")
    control = "triton/holds" if name.startswith("triton/") else "gemm"
    before = interpret(worker, racer(control))
    assert (before.status, before.reason) == ("ok", "")
    # the worker is warm, so that only the step itself is waited for
    got = interpret(worker, racer(name), 2.0 if name.startswith("hangs") else 60.0)
    assert kinds.Verdict(got.status, got.check) in verdicts, got
    assert got.reason
    after = interpret(worker, racer(control))
    assert (after.status, after.reason) == ("ok", "")


def test_what_a_file_changes_at_import_is_held_against_its_own_kernels(
    worker: pool.Worker, tmp_path: Path
) -> None:
    text = """
import time, torch
from dsl_bench_numpyref import GEMM
import dataclasses
genuine = time.perf_counter
time.perf_counter = lambda: genuine() / 2
def source(static, arch):
    return 16
KERNELS = (dataclasses.replace(GEMM, id="numpyref/from_elsewhere", source=source),)
"""
    path = tmp_path / "elsewhere.py"
    path.write_text(text)
    extra = (file_origin(path),)
    right = interpret(worker, racer("gemm", extra=extra))
    assert right.status == "ok", right.reason
    given = racer("gemm", extra=extra)
    choice = Choice("numpyref/from_elsewhere", "hash", {"rows": 16}, "x")
    theirs = interpret(worker, jobs.Racer(given.backend, given.extra, "language", choice, ""))
    assert (theirs.status, theirs.check) == ("launch_error", "tamper")
    assert "time.perf_counter" in theirs.reason


def test_every_kernel_of_the_files_is_of_a_kind() -> None:
    listed = {name for kind in kinds.KINDS for name in kind.cpu}
    text = (FOLDER / "on_cpu.py").read_text()
    written = {line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("def ")}
    wrong = {
        line.partition("(")[0].split()[1]
        for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False)
        if before == "@wrong"
    }
    assert wrong <= written
    assert wrong - {"hangs_with_a_child"} == {name for name in listed if "/" not in name}


def test_the_page_on_measuring_lists_every_kind() -> None:
    page = PAGE.read_text()
    assert kinds.rendered(page) == page, "run `make docs`"


def test_a_run_goes_on_behind_wrong_kernels(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, [str(FIXTURE), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    names = ("writes_zeros", "aborts", "works_in_another_thread", "exits", "gemm")
    flags = [flag for name in names for flag in ("-k", f"numpyref/{name}")]
    run = ("run", "gemm", "-b", "numpyref", "--target", "interpret", "--case", "m=16,n=32,k=16,dtype=fp16")
    plugin = ("--plugin", str(FOLDER / "on_cpu.py"))
    done = cli(*run, *flags, *plugin, "--out", "run.jsonl", "--format", "json")
    assert done.returncode == 1, done.stderr
    kept = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    found = {r["kernel"]: (r["status"], r["check"]) for r in kept if r["type"] == "interpret"}
    assert found == {
        "numpyref/writes_zeros": ("incorrect", "rms"),
        "numpyref/aborts": ("launch_error", "process"),
        "numpyref/works_in_another_thread": ("launch_error", "threads"),
        "numpyref/exits": ("launch_error", "exception"),
        "numpyref/gemm": ("ok", ""),
    }
