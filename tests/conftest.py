"""What all tests share: GPU tests skip without a GPU, and no test touches the user's caches or results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if "PYTEST_XDIST_WORKER" in os.environ:
    # a process a core: threads of torch and NumPy beside it would only wait for each other
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

Cli = Callable[..., subprocess.CompletedProcess[str]]


#: what takes longest, in order (beginnings of node ids)
LONGEST = (
    "tests/test_authoring.py::test_the_page",
    "tests/test_recorded.py::test_a_seeded",
    "tests/test_kill.py::test_a_parent",
    "tests/test_new.py::test_a_new",
    "tests/test_inductor_plugin.py",
    "tests/test_attention_triton.py::test_interpreter",
    "tests/test_plugins.py",
    "tests/test_attention_tilelang.py::test_mla_keeps",
    "tests/test_tilelang_pitch.py",
    "tests/test_notebooks.py::test_it_runs[04",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def dealt(items: list[pytest.Item], hands: int) -> list[pytest.Item]:
    """Each process is given one piece of the list and steals from the others' ends: every piece begins with
    its share of what takes longest, so that nothing long is left for the end."""
    by_place: dict[int, list[pytest.Item]] = {}
    for item in items:
        place = next((i for i, long in enumerate(LONGEST) if item.nodeid.startswith(long)), len(LONGEST))
        by_place.setdefault(place, []).append(item)
    rest = by_place.pop(len(LONGEST), [])
    long = [by_place[place] for place in sorted(by_place)]
    made: list[pytest.Item] = []
    for k in range(hands):
        mine = [item for group in long[k::hands] for item in group]
        # as pytest-xdist cuts the list
        size = (len(items) - len(made)) // (hands - k)
        filled = max(0, size - len(mine))
        made += [*mine, *rest[:filled]]
        del rest[:filled]
    return [*made, *rest]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of artifacts and plugin descriptions for this session alone, whose processes share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSL_BENCH_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command line in an empty folder, in a process of its own."""
    monkeypatch.delenv("DSL_BENCH_RESULTS", raising=False)

    def call(*args: str, timeout: float = 280, before: str = "") -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.argv[0] = 'dsl-bench'; {before}\nfrom dsl_bench.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True, timeout=timeout
        )

    return call
