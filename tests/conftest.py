"""What all tests share: GPU tests skip without a GPU, and no test touches the user's caches or results."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
if "PYTEST_XDIST_WORKER" in os.environ:
    # a process a core: threads of torch and NumPy beside it would only wait for each other
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

Cli = Callable[..., subprocess.CompletedProcess[str]]
#: (kernel's id, what is baked in) to the artifact and its facts
Compiled = Callable[[str, Mapping[str, Any]], tuple[Any, Any]]


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what `sampled` tests leave out of a short run")


def pytest_configure(config: pytest.Config) -> None:
    # who names a test wants all of it; workers of pytest-xdist are given the same arguments
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.all = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left = left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What a short run leaves out: of a test marked ``sampled(n)`` it does n cases, spread over all."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for cases in by_test.values():
        (count,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {i * len(cases) // count for i in range(count)}
        left |= {case for i, case in enumerate(cases) if i not in kept}
    return left


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


@pytest.fixture(scope="session")
def compiled(cache: Path) -> Iterator[Compiled]:
    """Compiles one specialisation of an installed kernel, as a run does: in a worker, of which each language
    has one that lasts the session (what a compiler does to its process ends no test but the one that asked).
    What any test of the session has compiled is not compiled again."""
    from dsl_bench import artifacts, jobs, pool, registry

    sources = {o.name: o for o in registry.origins() if o.kind == "backend"}
    workers: dict[str, pool.Worker] = {}

    def build(kernel: str, static: Mapping[str, Any], arch: str = "sm_90a") -> tuple[Any, Any]:
        name = kernel.partition("/")[0]
        known = json.dumps([kernel, sorted(static.items()), arch])
        key = hashlib.sha256(known.encode()).hexdigest()[:24]
        folder = cache / "compiled" / key
        job = jobs.CompileJob(sources[name], (), kernel, key, dict(static), arch, str(folder))
        if name not in workers:
            workers[name] = pool.Worker("compile", {"CUDA_VISIBLE_DEVICES": ""})
        outcome = workers[name].run(job, 400.0)
        refused = outcome.refused
        assert outcome.done is not None, (kernel, refused and (refused.reason, refused.traceback))
        artifact, built = artifacts.read_manifest(folder)
        return artifact, built.facts

    yield build
    for worker in workers.values():
        worker.kill()


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


def _module(path: Path) -> ModuleType:
    """A module or package of tests/, which is on no path."""
    package = path.name == "__init__.py"
    name = path.parent.name if package else f"{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        places = [str(path.parent)] if package else None
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
        assert spec is not None
        assert spec.loader is not None
        # submodules and dataclasses look it up
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def ptx_on_cpu() -> ModuleType:
    """Runs the PTX that Triton made."""
    return _module(ROOT / "tests" / "ptx_on_cpu" / "__init__.py")


@pytest.fixture(scope="session")
def cuda_on_cpu() -> ModuleType:
    """Compiles CUDA kernels for the CPU."""
    return _module(ROOT / "tests" / "cuda_on_cpu" / "__init__.py")


@pytest.fixture(scope="session")
def tilelang_on_cpu(cuda_on_cpu: ModuleType) -> ModuleType:
    """Runs a GEMM that TileLang made."""
    return importlib.import_module(f"{cuda_on_cpu.__name__}.generated")


class Processes:
    """What became of processes, by their ids."""

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether it runs: one that nobody has waited for does not."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    @classmethod
    def assert_gone(cls, *pids: int) -> None:
        """They have ended, or do within a minute."""
        deadline = time.monotonic() + 60
        while any(map(cls.alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in pids if cls.alive(pid)]


@pytest.fixture
def processes() -> type[Processes]:
    return Processes


@pytest.fixture
def lingering(tmp_path: Path) -> tuple[str, Path]:
    """A plugin's text that starts a process and is silent ever after; where that process's id will stand."""
    mark = tmp_path / "pid"
    text = (
        "import subprocess, time, pathlib\n"
        "p = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    return text, mark
