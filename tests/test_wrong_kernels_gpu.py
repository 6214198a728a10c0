"""The wall on a real device: every kind's GPU form, and the kernels that must not pay for it. ``-m gpu``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import jobs, pool, registry
from dsl_bench.artifacts import compile_artifact
from dsl_bench.jobs import Origin, Partial
from dsl_bench.records import CaseRef, Choice, Race, Trial

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FOLDER = Path(__file__).resolve().parent / "wrong_kernels"
GEMM = Origin("workload", "gemm", "dsl_bench.workloads.gemm:WORKLOAD")
WRONG = Origin("file", "on_gpu", str(FOLDER / "on_gpu.py"), "file")
LIBRARIES = ("is_a_library_fast_in_bursts",)


def load(name: str) -> Any:
    """A file of tests/wrong_kernels as a module."""
    spec = importlib.util.spec_from_file_location(f"wrong_gpu_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kinds = load("kinds")


def case(m: int, n: int, k: int) -> CaseRef:
    return CaseRef("gemm", f"{m}x{n}x{k}-bf16", {"m": m, "n": n, "k": k}, "bf16")


SMALL, LARGE, RAGGED = case(512, 512, 512), case(8192, 8192, 8192), case(333, 616, 520)
CASES = {
    "right_on_round_shapes_only": RAGGED,
    "is_fast_in_bursts": LARGE,
    "is_a_library_fast_in_bursts": LARGE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one artifact that all share: there is nothing in it."""
    path = tmp_path_factory.mktemp("artifact") / "empty"
    static = {"kind": "holds"}
    job = jobs.CompileJob(WRONG, (), "wrong/holds", "empty", static, "sm_90a", str(path))
    compile_artifact(registry.Shelf(), job)
    return path


@pytest.fixture(scope="module")
def worker() -> Iterator[pool.Worker]:
    """One device worker for all: what a kernel leaves behind would show in the next one's verdict."""
    made = pool.Worker("device", {"CUDA_MODULE_LOADING": "EAGER"})
    yield made
    made.kill()


def racer(name: str, folder: Path, role: str = "language") -> jobs.Racer:
    choice = Choice(f"wrong/{name}", "hash", {"kind": name}, name)
    return jobs.Racer(WRONG, (), role, choice, str(folder))


def trial(worker: pool.Worker, given: jobs.Racer, at: CaseRef, deadline: float = 60.0) -> Trial:
    """The record that the answer to a job of one trial becomes."""
    kept: list[Any] = []
    job = jobs.TrialsJob("run", GEMM, at, [given])
    outcome = worker.run(job, deadline, lambda r: kept.append(r.record) if isinstance(r, Partial) else None)
    if kept:
        return kept[0]
    assert outcome.refused is not None
    refused, c = outcome.refused, given.choice
    return Trial(
        "run",
        at,
        c.kernel,
        c.kernel_hash,
        c.config,
        refused.status,
        check=refused.check,
        reason=refused.reason,
    )


NAMES = [(name, verdicts) for kind in kinds.KINDS for name, verdicts in kind.gpu.items()]


@pytest.mark.parametrize(("name", "verdicts"), NAMES, ids=[name for name, _ in NAMES])
def test_a_wrong_kernel_is_caught_and_the_next_one_is_not_blamed(
    worker: pool.Worker, folder: Path, name: str, verdicts: tuple[Any, ...]
) -> None:
    control = racer("holds", folder)
    before = trial(worker, control, SMALL)
    assert (before.status, before.reason) == ("ok", "")
    role = "vendor" if name in LIBRARIES else "language"
    at = CASES.get(name, SMALL)
    # the worker is warm, so that only the step itself is waited for
    got = trial(worker, racer(name, folder, role), at, 5.0 if name.startswith("hangs") else 60.0)
    assert kinds.Verdict(got.status, got.check) in verdicts, got
    assert got.reason
    assert got.median_ns == 0.0
    after = trial(worker, control, SMALL)
    assert (after.status, after.reason) == ("ok", "")
    assert after.median_ns > 0


def test_a_race_goes_on_without_those_that_fail(worker: pool.Worker, folder: Path) -> None:
    wrong = ("writes_zeros", "leaves_no_graph", "ignores_the_stream", "writes_out_of_bounds", "raises")
    people = [racer("holds", folder, "vendor"), racer("holds", folder)]
    people += [racer(name, folder) for name in wrong]
    kept: list[Any] = []
    job = jobs.RaceJob("run", GEMM, SMALL, ("cold", "sustained"), people, 0.2)
    outcome = worker.run(job, 60.0, lambda r: kept.append(r.record) if isinstance(r, Partial) else None)
    assert outcome.done is not None, outcome.refused
    races = [r for r in kept if isinstance(r, Race)]
    assert [r.regime for r in races] == ["cold", "sustained"]
    for race in races:
        assert race.racers == [0, 1, 7]
        assert [p.status for p in race.participants[:2]] == ["ok", "ok"]
        caught = [(p.status, p.check) for p in race.participants[2:7]]
        assert caught[0] == ("incorrect", "rms")
        assert caught[1][1] == "capture"
        assert caught[2:] == [
            ("unwritten", "stream"),
            ("illegal_access", "canary"),
            ("launch_error", "exception"),
        ]


def test_every_kernel_of_the_file_is_of_a_kind() -> None:
    listed = {name for kind in kinds.KINDS for name in kind.gpu}
    assert set(load("on_gpu").WRONG) - {"holds"} == listed
