"""One command over the gemm and attention spaces of all languages, with accidents on purpose. ``-m gpu``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import store
from dsl_bench.records import STATUSES, Failure, Ledger, Trial, Tuned

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PLUGIN = Path(__file__).resolve().parent / "wrong_kernels" / "hazards.py"
CASES = ("4096x4096x4096-bf16", "2x4096-h32-8-d128-causal-bf16", "128x4096-h32-8-p16-bf16")
#: configs that the sweep has to get through
LEAST = 200
#: for each case and language: three cases and three languages make 250 trials and more
TRIALS = 40
#: the longest silence of the device worker and of a compiler, in seconds
DEVICE_S, COMPILER_S = 8.0, 30.0


def hazards() -> Any:
    """The plugin as a module."""
    spec = importlib.util.spec_from_file_location("hazards_under_test", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the one command recorded; kept under DSL_BENCH_SWEEP_OUT where that is set."""
    folder = os.environ.get("DSL_BENCH_SWEEP_OUT") or tmp_path_factory.mktemp("sweep")
    out = Path(folder) / "sweep.jsonl"
    workloads = ("gemm", "attention_prefill", "attention_decode")
    cases = [x for name in CASES for x in ("-c", name)]
    languages = [x for name in ("cuda", "tilelang", "triton") for x in ("-b", name)]
    limits = ["--deadline", str(DEVICE_S), "--compile-deadline", str(COMPILER_S), "--trials", str(TRIALS)]
    command = [sys.executable, "-m", "dsl_bench", "tune", *workloads, *cases, *languages, *limits]
    command += ["--plugin", str(PLUGIN), "--out", str(out)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found, problems = store.read([out], trials=True)
    assert not problems
    return found


def test_every_config_has_a_status(records: list[Any]) -> None:
    trials = [r for r in records if isinstance(r, Trial)]
    assert len(trials) >= LEAST
    assert {t.status for t in trials} <= set(STATUSES)
    tried = Counter((t.case.name, t.kernel, str(sorted(t.config.items())), t.effort) for t in trials)
    assert not [key for key, n in tried.items() if n > 1]
    assert {t.case.workload for t in trials} == {"gemm", "attention_prefill", "attention_decode"}
    assert [r for r in records if isinstance(r, Ledger)], "the command came to its end"


def test_each_accident_is_one_row_with_its_own_status(records: list[Any]) -> None:
    expected = hazards().HAZARDS
    met = {
        (t.kernel.split("/")[0], str(t.config["hazard"])): (t.status, t.reason)
        for t in records
        if isinstance(t, Trial) and t.kernel.endswith("/hazards")
    }
    assert set(met) == {(b, h) for b in ("cuda", "tilelang", "triton") for h in expected}
    wrong = {key: got for key, got in met.items() if got[0] not in expected[key[1]]}
    assert not wrong


def test_the_accidents_cost_nobody_else_a_winner(records: list[Any]) -> None:
    tuned = {(r.case.workload, r.contender) for r in records if isinstance(r, Tuned)}
    languages = ("cuda", "tilelang", "triton")
    workloads = ("gemm", "attention_prefill", "attention_decode")
    assert tuned >= {(w, b) for w in workloads for b in languages}
    assert not [r for r in records if isinstance(r, Failure)]
