"""plugins/dsl-bench-inductor, installed beside the product: it appears everywhere, and its own tests pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "plugins" / "dsl-bench-inductor"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("inductor")
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    tree = shutil.copytree(PLUGIN, folder / "tree", ignore=ignore)
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *flags, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture
def with_plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "inductor,triton")


def test_it_is_a_language_like_any_other(with_plugin: None, cli) -> None:
    rows = json.loads(cli("list", "--format", "json").stdout)
    (backend,) = [r for r in rows if r["kind"] == "backend" and r["name"] == "inductor"]
    assert backend["state"] == "ready" and "interpret" in backend["targets"]
    assert len([r for r in rows if r["name"].startswith("inductor/")]) == 4
    done = cli("run", "gemm", "-b", "inductor", "--case", "m=16,n=24,k=32,dtype=fp16", "--format", "json")
    assert done.returncode == 0, done.stderr
    held = [r for r in json.loads(done.stdout) if r["what"] == "interpret" and r["status"] == "ok"]
    assert [r["kernel"] for r in held] == ["inductor/gemm"]


def test_its_results_are_reported_like_any_others(with_plugin: None, cli, tmp_path: Path) -> None:
    """A recorded race with Triton's rows under the plugin's name: table, geomeans, page and plots."""
    (recorded, *_) = sorted((ROOT / "results").rglob("*gemm*-race-*.jsonl"))
    text = recorded.read_text().replace('"triton/', '"inductor/').replace('"triton"', '"inductor"')
    (tmp_path / "race.jsonl").write_text(text)
    rows = json.loads(cli("report", "-r", "race.jsonl", "--format", "json").stdout)
    assert {r["backend"] for r in rows} >= {"cuda", "inductor", "tilelang"}
    means = json.loads(cli("report", "-r", "race.jsonl", "--geomean", "--format", "json").stdout)
    assert [m for m in means if m["backend"] == "inductor" and m["geomean"]]
    page = cli("report", "-r", "race.jsonl", "--format", "html")
    assert page.returncode == 0, page.stderr
    assert "inductor" in page.stdout and "<svg" in page.stdout


@pytest.mark.sampled(0)
@pytest.mark.timeout(900)
def test_its_own_tests_pass(with_plugin: None) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests")]
    done = subprocess.run(command, cwd=PLUGIN, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
