"""An installed plugin works; a broken one is shown with its reason and costs the others nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIXTURE = Path(__file__).resolve().parent / "plugin_fixture"
PACKAGE = "dsl_bench_numpyref"
RUN = ("run", "gemm", "--backend", "numpyref", "--target", "interpret", "--case", "m=16,n=32,k=16,dtype=fp16")

pytestmark = pytest.mark.slow

Install = Callable[..., Path]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fixture installed by pip, as its author's users would."""
    folder = tmp_path_factory.mktemp("plugin")
    tree = shutil.copytree(FIXTURE, folder / "tree", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *flags, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture
def install(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts copies of the plugin on the path, under names of their own and changed by a regular expression."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "numpyref,other")

    def copy(name: str = "numpyref", entry: str = "", find: str = "", put: str = "") -> Path:
        package = site / f"dsl_bench_{name}"
        text = (installed / PACKAGE / "__init__.py").read_text()
        changed = re.sub(find, put, text, count=1) if find else text
        assert not find or changed != text, "the pattern is not in the plugin any more"
        package.mkdir()
        (package / "__init__.py").write_text(changed.replace("numpyref/", f"{name}/"))
        (dist,) = installed.glob("*.dist-info")
        target = shutil.copytree(dist, site / dist.name.replace("numpyref", name))
        for file, old, new in (
            ("METADATA", "Name: dsl-bench-numpyref", f"Name: dsl-bench-{name}"),
            ("entry_points.txt", f"numpyref = {PACKAGE}", f"{entry or name} = dsl_bench_{name}"),
        ):
            (target / file).write_text((target / file).read_text().replace(old, new))
        return package

    return copy


def listed(cli: Any, before: str = "") -> dict[str, list[dict[str, Any]]]:
    """`list` as rows of backends by name."""
    done = cli("list", "--format", "json", before=before)
    assert done.returncode == 0, done.stderr
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(done.stdout):
        if row["kind"] == "backend":
            rows.setdefault(row["name"], []).append(row)
    return rows


def test_an_installed_plugin_is_listed_and_runs(install: Install, cli: Any, tmp_path: Path) -> None:
    install()
    (row,) = listed(cli)["numpyref"]
    assert row["state"] == "ready"
    assert "dsl-bench-numpyref 0.1.0" in row["from"]
    done = cli(*RUN, "--out", "run.jsonl")
    assert done.returncode == 0, done.stderr
    kept = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    verdicts = [r for r in kept if r["type"] == "interpret"]
    assert [(r["kernel"], r["status"]) for r in verdicts] == [("numpyref/gemm", "ok")]


def test_a_wrong_plugin_kernel_is_caught(install: Install, cli: Any) -> None:
    install(find=r"\.astype\(np\.float16\)", put=".astype(np.float16) * np.float16(1.01)")
    done = cli(*RUN, "--format", "json")
    assert done.returncode == 1, done.stderr
    assert "incorrect" in done.stdout


BREAKAGES = {
    "raises at import": (r"BACKEND = .*", "raise RuntimeError('no such luck')", "failed", "no such luck"),
    "exits at import": (r"BACKEND = .*", "raise SystemExit(3)", "failed", "SystemExit"),
    "imports what is not there": (
        r"import numpy as np",
        "import no_such_package",
        "failed",
        "no_such_package",
    ),
    "speaks another API": (r'name = "numpyref"', 'name = "other"; api_version = 99', "incompatible", "99"),
    "is no backend": (r"BACKEND = .*", "BACKEND = 7", "incompatible|failed", "API|not a Backend"),
    "raises in probe": ("ready = target", "raise OSError('bad probe') or target", "failed", "bad probe"),
    "dies in probe": ("ready = target", "__import__('os')._exit(9); ready = target", "failed", "."),
}


@pytest.mark.parametrize("how", BREAKAGES)
def test_a_broken_plugin_is_shown_and_costs_nobody_else(install: Install, cli: Any, how: str) -> None:
    find, put, state, reason = BREAKAGES[how]
    install()
    install("other", find=find, put=put)
    rows = listed(cli)
    assert rows["numpyref"][0]["state"] == "ready"
    (row,) = rows["other"]
    assert re.fullmatch(state, row["state"]), row
    assert re.search(reason, row["reason"]), row
    assert cli("list", "--strict").returncode == 1
    done = cli(*RUN)
    assert done.returncode == 0, done.stderr
    done = cli("run", "gemm", "--backend", "other", "--case", "m=16,n=32,k=16,dtype=fp16")
    assert done.returncode == 2
    assert "other" in done.stderr
    assert "not loaded" in done.stderr, "an unknown backend's message says which plugins failed"


def test_a_plugin_whose_probe_hangs_is_cut_off(install: Install, cli: Any) -> None:
    install()
    install("other", find="ready = target", put="__import__('time').sleep(999); ready = target")
    impatient = (
        "from dsl_bench import catalog, pool; "
        "catalog.DESCRIBE_SECONDS = 5.0; pool.START_SECONDS['describe'] = 5.0"
    )
    (row,) = listed(cli, before=impatient)["other"]
    assert row["state"] == "failed"
    assert row["reason"]
    assert cli(*RUN, before=impatient).returncode == 0


def test_two_plugins_of_one_name_are_both_refused(install: Install, cli: Any) -> None:
    install()
    install("other", entry="numpyref")
    rows = listed(cli)["numpyref"]
    assert [r["state"] for r in rows] == ["duplicate", "duplicate"]
    for row in rows:
        assert "dsl-bench-numpyref" in row["reason"]
        assert "dsl-bench-other" in row["reason"]


def test_a_plugin_can_be_one_file(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "numpyref")
    (tmp_path / "mine.py").write_text((FIXTURE / PACKAGE / "__init__.py").read_text())
    done = cli(*RUN, "--plugin", "mine.py")
    assert done.returncode == 0, done.stderr
    done = cli("list", "--plugin", "missing.py")
    assert done.returncode == 2
    assert "missing.py" in done.stderr
