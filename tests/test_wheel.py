"""The wheel holds what the tree holds, and works where the tree is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as a GPU host without a network would: by this environment's setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    # builds in place would leave a build/ folder whose stale files get into the next wheel
    copy = folder / "tree"
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    (built,) = folder.glob("*.whl")
    return built


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def tracked() -> list[str]:
    """The tree's files: git's and new ones that git does not ignore; without git, all that look like ours."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    loose = [p for name in ("pyproject.toml", "README.md", "LICENSE") for p in ROOT.glob(name)]
    kept = [p for d in ("dsl_bench", "kernels") for p in (ROOT / d).rglob("*") if "cache" not in str(p)]
    return [str(p.relative_to(ROOT)) for p in (*loose, *kept) if p.is_file()]


def test_the_wheel_holds_the_trees_files_and_nothing_else(wheel: Path) -> None:
    names = tracked()
    expected = {name for name in names if name.startswith("dsl_bench/")}
    expected |= {f"dsl_bench/{name}" for name in names if name.startswith("kernels/")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        meta = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/" in name}
    assert held == expected
    assert {"METADATA", "RECORD", "entry_points.txt"} <= meta
    assert "LICENSE" in meta
    assert {"dsl_bench/py.typed", "dsl_bench/kernels/cuda/gemm.cu"} <= held
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that sees this one's packages, but dsl_bench from the wheel."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    show = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip())
    pip("--python", str(python), "install", "--no-index", "--no-deps", str(wheel))
    # plain lines, so that an editable install of the tree in the other environment stays out of sight
    hosts = [p for p in sys.path if p.endswith("-packages")]
    (site / "_host.pth").write_text("\n".join(hosts) + "\n")
    return folder


def run(elsewhere: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env["DSL_BENCH_CACHE_DIR"] = str(cwd / "cache")
    program = str(elsewhere / "bin" / command[0])
    return subprocess.run(
        [program, *command[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=280
    )


def test_it_is_imported_from_where_it_was_installed(elsewhere: Path, tmp_path: Path) -> None:
    code = "import dsl_bench, dsl_bench.kernels.cuda as c; print(dsl_bench.__file__); print(*c.__path__)"
    done = run(elsewhere, "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert str(elsewhere) in line
        assert str(ROOT) not in line


def test_the_console_script_runs_from_another_folder(elsewhere: Path, tmp_path: Path) -> None:
    done = run(elsewhere, "dsl-bench", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "dsl-bench 0.1.0"), done.stderr
    done = run(elsewhere, "dsl-bench", "run", "no-such-workload", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0, done.stderr
    done = run(elsewhere, "dsl-bench", "list", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    names = {(r["kind"], r["name"]) for r in rows}
    assert {("backend", n) for n in ("cuda", "tilelang", "triton", "vendor")} <= names
    assert ("workload", "gemm") in names


def test_a_kernels_folder_on_the_path_explains_itself(tmp_path: Path) -> None:
    for package in ("triton", "tilelang", "cuda"):
        code = f"import sys; sys.path.insert(0, {str(ROOT / 'kernels')!r}); import {package}"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0
        assert "stands on sys.path" in done.stderr, done.stderr
