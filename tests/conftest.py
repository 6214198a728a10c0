"""What all tests share: GPU tests skip without a GPU, and no test touches the user's caches or results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

Cli = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of artifacts and plugin descriptions for this session alone."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command line in an empty folder, in a process of its own."""
    monkeypatch.setenv("DSL_BENCH_CACHE_DIR", str(cache))
    monkeypatch.delenv("DSL_BENCH_RESULTS", raising=False)

    def call(*args: str, timeout: float = 280, before: str = "") -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.argv[0] = 'dsl-bench'; {before}\nfrom dsl_bench.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True, timeout=timeout
        )

    return call
