"""Triton 3.6, with which the recorded results were made, compiles every Triton kernel for sm_90a.

Runs ``compile_triton36.py`` in the environment that `make test` makes for it
(``DSL_BENCH_TRITON36_PYTHON``, or ``.venv36``): Triton 3.6 without torch and without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 280


def interpreter() -> Path | None:
    given = os.environ.get("DSL_BENCH_TRITON36_PYTHON")
    path = Path(given) if given else ROOT / ".venv36" / "bin" / "python"
    return path if path.is_file() else None


@pytest.mark.slow
@pytest.mark.timeout(BUDGET_S + 10)
def test_every_triton_kernel_compiles_with_3_6() -> None:
    python = interpreter()
    if python is None:
        pytest.skip("no environment with Triton 3.6; `make test` makes one")
    done = subprocess.run(
        [python, ROOT / "tests" / "compile_triton36.py"], capture_output=True, text=True, timeout=BUDGET_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout)
    assert built["triton"].startswith("3.6.")
    assert built["kernels"], "no kernel was found"
    for kernel, found in built["kernels"].items():
        assert found["case"], f"{kernel} does no case of its workload"
        assert found["cubin"] > 0, kernel
        assert found["assembler"].startswith("ptxas 12.8"), kernel
