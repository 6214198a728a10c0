"""The conformance kit on the installed plugin, and what is particular about Inductor."""

from __future__ import annotations

import ast
import math
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dsl_bench.plugin import Case, KernelFault
from dsl_bench.testing import BackendConformance, KernelConformance

torch = pytest.importorskip("torch")
if "inductor" not in entry_points(group="dsl_bench.backends").names:
    pytest.skip(
        "the plugin is not installed: pip install ./plugins/dsl-bench-inductor", allow_module_level=True
    )

import dsl_bench_inductor  # noqa: E402
from dsl_bench_inductor import attention, compiler  # noqa: E402

#: autotuning a case on a device is silent for long
DEADLINE = 600.0


class TestBackend(BackendConformance):
    backend = "inductor"
    deadline = DEADLINE


class TestKernels(KernelConformance):
    """One kernel as its author would look at it; the others' smoke cases are the backend's."""

    kernels = ("inductor/gemm",)
    deadline = DEADLINE


def test_only_the_public_api_is_used() -> None:
    allowed = {"dsl_bench.plugin"}
    for path in Path(dsl_bench_inductor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] != "dsl_bench" or name in allowed, f"{path.name}: {name}"


def test_describing_it_does_not_import_torch() -> None:
    """A worker that only lists kernels should not wait for torch."""
    import subprocess

    code = "import sys, dsl_bench_inductor as d; list(d.BACKEND.kernels()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_batch_that_would_not_fit_is_refused() -> None:
    kernels = {k.workload: k for k in dsl_bench_inductor.BACKEND.kernels()}
    huge = {"lens": "1048576+1*255", "hq": 32, "hkv": 8, "page": 16, "d": 128, "h": 128, "sq": 1}
    small = {**huge, "lens": "4096*64"}
    for workload in ("attention_decode", "mla_decode"):
        valid = kernels[workload].valid
        reason = valid(Case(workload, "huge", huge, "bf16"), {})
        assert reason is not None and "GiB" in reason
        assert valid(Case(workload, "small", small, "bf16"), {}) is None


def test_inductors_own_code_is_right_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where Inductor writes C++: the same graph, its own fusion, its compilers ended."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = set(threading.enumerate())
    torch.manual_seed(0)
    q = torch.randn(3, 4, 128).half()
    caches = [torch.randn(5, 16, 2, 128).half() for _ in range(2)]
    table = torch.tensor([[0, 1], [2, 3], [0, 0]], dtype=torch.int32)
    lengths = torch.tensor([20, 5, 0], dtype=torch.int32)
    out = {}
    for module in (compiler.Compiled(), compiler.Eager()):
        o = torch.full_like(q, math.nan)
        module.call(attention.decode, o, q, *caches, table, lengths, 128**-0.5)()
        out[type(module)] = o
    assert bool((out[compiler.Compiled][2] == 0).all())
    torch.testing.assert_close(out[compiler.Compiled], out[compiler.Eager], rtol=1e-3, atol=1e-3)
    assert set(threading.enumerate()) == before


def test_a_product_is_never_left_to_the_vendors_library() -> None:
    """Without a template of Inductor's own (on the CPU there is none) it is refused: nothing stands in."""
    from dsl_bench_inductor.gemm import product

    a, b, c = torch.randn(64, 32), torch.randn(48, 32), torch.empty(64, 48)
    with pytest.raises(KernelFault, match="no template of its own") as caught:
        compiler.Compiled().call(product, c, a, b)
    assert caught.value.status == "invalid_config"
