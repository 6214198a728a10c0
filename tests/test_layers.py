"""The layers hold: by import-linter, by the kernels' own imports, and by a parent process's sys.modules."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: modules that would mean that a parent process loaded torch or a language
LANGUAGES = (
    "torch",
    "triton",
    "tilelang",
    "tvm",
    "cuda",
    "flashinfer",
    "dsl_bench.kernels",
    "dsl_bench.backends",
)


def test_import_contracts() -> None:
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed")
    code = "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imported(path: Path) -> set[str]:
    """Every absolute module that a file names in an import, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_kernels_import_the_plugin_contract_and_their_own_language(path: Path) -> None:
    language = path.relative_to(ROOT / "kernels").parts[0]
    own = (f"dsl_bench.kernels.{language}", f"dsl_bench.backends.{language}")
    for name in imported(path):
        if name.partition(".")[0] == "dsl_bench":
            assert name == "dsl_bench.plugin" or name.startswith(own), name
        for other in {"triton", "tilelang"} - {language}:
            assert name.partition(".")[0] != other, f"{path} imports {name}"


def test_nothing_names_a_kernel_or_a_workload() -> None:
    for path in (ROOT / "dsl_bench").glob("*.py"):
        for name in imported(path):
            assert not name.startswith(("dsl_bench.kernels", "dsl_bench.workloads", "dsl_bench.backends")), (
                path
            )


COMMANDS = {
    "version": ["--version"],
    "help": ["--help"],
    "list": ["list"],
    "plan": ["plan", "gemm", "--group", "smoke", "--backend", "triton"],
    "doctor": ["doctor"],
    "report": ["report", "--format", "json"],
    "geomean": ["report", "--geomean"],
    "usage": ["run", "no-such-workload"],
    "new": ["new", "kernel", "triton/my_gemm"],
    "inspect": ["inspect", "gemm", "--case", "4096x4096x4096-bf16", "--backend", "triton"],
    "run": [
        "run",
        "gemm",
        "--backend",
        "triton",
        "--target",
        "interpret",
        "--case",
        "m=16,n=32,k=16,dtype=fp16",
    ],
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_parent_imports_neither_torch_nor_a_language(
    name: str, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "list":  # the processes that probe the others take most of the time
        monkeypatch.setenv("DSL_BENCH_BACKENDS", "triton,cuda")
    seen = tmp_path / "modules.json"
    dump = f"atexit.register(lambda: pathlib.Path({str(seen)!r}).write_text(json.dumps(list(sys.modules))))"
    done = cli(*COMMANDS[name], before=f"import atexit, json, pathlib; {dump}")
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    loaded = set(json.loads(seen.read_text()))
    assert "dsl_bench.cli" in loaded
    assert not [m for m in loaded if m in LANGUAGES or m.startswith(tuple(f"{lang}." for lang in LANGUAGES))]


def test_importing_dsl_bench_imports_next_to_nothing() -> None:
    heavy = ("torch", "numpy", "pandas", "typer", "rich")
    code = f"import sys, dsl_bench; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    import dsl_bench
    import dsl_bench.plugin

    assert dsl_bench.__all__ == ["best", "fraction_of", "geomean", "load_results", "run", "tune"]
    assert dsl_bench.plugin.__all__ == [
        "API_VERSION",
        "DTYPES",
        "Artifact",
        "Availability",
        "Backend",
        "Bound",
        "Call",
        "Case",
        "Config",
        "Kernel",
        "KernelFault",
        "Needs",
        "Static",
        "Target",
        "TensorSpec",
        "UsageError",
        "Workload",
        "cubin_facts",
        "int_list",
        "positive_int",
    ]
    for name in dsl_bench.__all__:
        assert callable(getattr(dsl_bench, name)), name
