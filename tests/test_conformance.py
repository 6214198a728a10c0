"""The conformance kit on what is in the tree: every backend and workload of ours, and the example plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl_bench.testing import BackendConformance, WorkloadConformance

FIXTURE = Path(__file__).parent / "plugin_fixture" / "dsl_bench_numpyref" / "__init__.py"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def those_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit describes all that is installed: here, what is tested, and a language beside it."""
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "cuda,vendor,cudnn")


class TestExample(BackendConformance):
    backend = "numpyref"
    plugins = (str(FIXTURE),)


class TestVendor(BackendConformance):
    backend = "vendor"


class TestCudnn(BackendConformance):
    backend = "cudnn"


class TestGemm(WorkloadConformance):
    workload = "gemm"


class TestPrefill(WorkloadConformance):
    workload = "attention_prefill"


class TestDecode(WorkloadConformance):
    workload = "attention_decode"


class TestMla(WorkloadConformance):
    workload = "mla_decode"


@pytest.mark.sampled(0)
def test_a_plugin_that_breaks_the_contract_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit itself: a wrong kernel, a foreign id and a silent probe each fail their test."""
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "")
    text = FIXTURE.read_text()
    wrong = {
        "result": ("c[start : start + rows] = (block", "c[start : start + rows] = (2 * block"),
        "id": ('id="numpyref/gemm"', 'id="other/gemm"'),
        "probe": ('"NumPy runs on the CPU only"', '""'),
    }
    failed = {}
    for name, (old, new) in wrong.items():
        assert old in text
        path = tmp_path / name / "plugin.py"
        path.parent.mkdir()
        path.write_text(text.replace(old, new))

        class Broken(BackendConformance):
            backend = "numpyref"
            plugins = (str(path),)

        tests = [getattr(Broken(), t) for t in dir(Broken) if t.startswith("test_")]
        failed[name] = [t.__name__ for t in tests if _fails(t)]
    assert failed["result"] == ["test_a_smoke_case_holds_on_every_target_that_is_ready"]
    assert "test_it_is_found_and_loads" in failed["id"]
    assert failed["probe"] == ["test_probe_is_honest"]


def _fails(test: object) -> bool:
    try:
        test()  # type: ignore[operator]
    except Exception:
        return True
    return False
