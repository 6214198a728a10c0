"""Plugins that break in every way known to us cost themselves and nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
from dsl_bench.plugin import Availability, Backend

class Toy(Backend):
    name = "{name}"
    def probe(self, target):
        return Availability(False, "a toy has no device", "none helps")
    def kernels(self):
        return iter(())

BACKEND = Toy()
"""
BROKEN = {
    "raises": ("raise RuntimeError('broken on purpose')", "failed", "broken on purpose"),
    "exits": ("raise SystemExit(3)", "failed", "SystemExit"),
    "aborts": ("import os; os.abort()", "failed", "SIGABRT"),
    "oldapi": (GOOD.format(name="oldapi") + "\nToy.api_version = 99\n", "incompatible", "plugin API 99"),
    "notone": ("BACKEND = 7\n", "incompatible", "plugin API None"),
    "badprobe": (GOOD.format(name="badprobe") + "\nToy.probe = lambda self, target: 1 / 0\n", "failed", "ZeroDivision"),
}


def install(site: Path, dist: str, entries: dict[str, str], modules: dict[str, str]) -> None:
    """A distribution as pip would leave it: modules and metadata with entry points."""
    info = site / f"{dist.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[dsl_bench.backends]\n{lines}\n")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def dsl_bench(site: Path, *args: str, allow: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(site),
        "DSL_BENCH_CACHE_DIR": str(site / "cache"),
        "DSL_BENCH_BACKENDS": allow,
    }
    command = [sys.executable, "-m", "dsl_bench.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=site, timeout=timeout)


def listed(site: Path, allow: str) -> dict[str, dict[str, str]]:
    done = dsl_bench(site, "list", "--format", "json", allow=allow)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_a_row_with_its_reason(tmp_path, name):
    text, state, reason = BROKEN[name]
    install(tmp_path, f"toy-{name}", {name: f"toy_{name}:BACKEND"}, {f"toy_{name}": text})
    install(tmp_path, "toy-good", {"good": "toy_good:BACKEND"}, {"toy_good": GOOD.format(name="good")})
    rows = listed(tmp_path, f"{name},good")
    assert rows[name]["state"] == state
    assert reason in rows[name]["reason"]
    assert rows["good"]["state"] == "unavailable"
    assert "a toy has no device" in rows["good"]["reason"]


def test_two_plugins_of_one_name_are_both_refused_and_both_named(tmp_path):
    for owner in ("one", "two"):
        install(tmp_path, f"toy-{owner}", {"same": f"toy_{owner}:BACKEND"}, {f"toy_{owner}": GOOD.format(name="same")})
    done = dsl_bench(tmp_path, "list", "--format", "json", allow="same")
    rows = [r for r in json.loads(done.stdout) if r["name"] == "same"]
    assert [r["state"] for r in rows] == ["duplicate", "duplicate"]
    assert all("toy-one 1.0" in r["reason"] and "toy-two 1.0" in r["reason"] for r in rows)


def test_one_backend_name_under_two_entry_names_is_refused(tmp_path):
    for owner in ("one", "two"):
        install(tmp_path, f"toy-{owner}", {owner: f"toy_{owner}:BACKEND"}, {f"toy_{owner}": GOOD.format(name="same")})
    rows = listed(tmp_path, "one,two")
    assert {rows["one"]["state"], rows["two"]["state"]} == {"duplicate"}


def test_strict_makes_list_fail(tmp_path):
    install(tmp_path, "toy-raises", {"raises": "toy_raises:BACKEND"}, {"toy_raises": BROKEN["raises"][0]})
    done = dsl_bench(tmp_path, "list", "--strict", allow="raises")
    assert done.returncode == 1


def test_an_unknown_backend_message_says_what_failed_to_load(tmp_path):
    install(tmp_path, "toy-raises", {"raises": "toy_raises:BACKEND"}, {"toy_raises": BROKEN["raises"][0]})
    done = dsl_bench(tmp_path, "run", "gemm", "--backend", "raises", allow="raises")
    assert done.returncode == 2
    assert "raises (failed)" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_probe_that_hangs_is_killed(tmp_path, monkeypatch):
    from dsl_bench import catalog

    hang = GOOD.format(name="hangs") + "\nimport time\nToy.probe = lambda self, target: time.sleep(600)\n"
    install(tmp_path, "toy-hangs", {"hangs": "toy_hangs:BACKEND"}, {"toy_hangs": hang})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "hangs")
    monkeypatch.setenv("DSL_BENCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(catalog, "DESCRIBE_SECONDS", 3.0)
    monkeypatch.setattr("dsl_bench.pool.START_SECONDS", 5.0)
    found = {d.origin.name: d for d in catalog.load().described}
    assert found["hangs"].state == "failed"
    assert "killed" in found["hangs"].reason
    assert found["gemm"].state == "ready"


def test_a_plugin_file_brings_a_workload_or_a_backend(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GOOD.format(name="mine"))
    done = dsl_bench(tmp_path, "list", "--format", "json", "--plugin", str(path), allow="")
    rows = {r["name"]: r for r in json.loads(done.stdout)}
    assert rows["mine"]["state"] == "unavailable"


def test_a_plugin_file_that_is_not_there_is_a_usage_error(tmp_path):
    done = dsl_bench(tmp_path, "list", "--plugin", "nowhere.py", allow="")
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr
