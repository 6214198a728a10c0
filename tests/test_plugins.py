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

from dsl_bench import registry
from dsl_bench.jobs import Origin

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
    "is no backend": (r"BACKEND = .*", "BACKEND = 7", "failed", "not an instance of Backend"),
    "raises in probe": ("ready = target", "raise OSError('bad probe') or target", "failed", "bad probe"),
    "dies in probe": ("ready = target", "__import__('os')._exit(9); ready = target", "failed", "."),
}


def test_broken_plugins_are_shown_and_cost_nobody_else(
    install: Install, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    broken = {how.replace(" ", "_"): told for how, told in BREAKAGES.items()}
    for name, (find, put, _, _) in broken.items():
        install(name, find=find, put=put)
    monkeypatch.setenv("DSL_BENCH_BACKENDS", ",".join(["numpyref", *broken]))
    rows = listed(cli)
    assert rows["numpyref"][0]["state"] == "ready"
    for name, (_, _, state, reason) in broken.items():
        (row,) = rows[name]
        assert re.fullmatch(state, row["state"]), row
        assert re.search(reason, row["reason"]), row
    done = cli(*RUN)
    assert done.returncode == 0, done.stderr
    for name in broken:
        monkeypatch.setenv("DSL_BENCH_BACKENDS", f"numpyref,{name}")
        assert cli("list", "--strict").returncode == 1
    done = cli("run", "gemm", "--backend", name, "--case", "m=16,n=32,k=16,dtype=fp16")
    assert done.returncode == 2
    assert f"not loaded: {name} (" in done.stderr, "an unknown backend's message says which plugins failed"


def test_a_plugin_whose_probe_hangs_is_cut_off(install: Install, cli: Any) -> None:
    install()
    install("other", find="ready = target", put="__import__('time').sleep(999); ready = target")
    # with that plugin alone: the others may be slow, on a machine that does something else besides
    impatient = (
        "from dsl_bench import pool; patient = pool.Worker.run\n"
        "def run(self, job, deadline, *args, **more):\n"
        "    other = getattr(getattr(job, 'origin', None), 'name', '') == 'other'\n"
        "    deadline = 6.0 - pool.START_SECONDS['describe'] if other else deadline\n"
        "    return patient(self, job, deadline, *args, **more)\n"
        "pool.Worker.run = run"
    )
    rows = listed(cli, before=impatient)
    assert [r["state"] for r in rows["numpyref"]] == ["ready"]
    (row,) = rows["other"]
    assert row["state"] == "failed"
    assert "killed" in row["reason"]
    assert cli(*RUN, before=impatient).returncode == 0


def test_two_plugins_of_one_name_are_both_refused(install: Install, cli: Any) -> None:
    install()
    install("other", entry="numpyref")
    rows = listed(cli)["numpyref"]
    assert [r["state"] for r in rows] == ["duplicate", "duplicate"]
    for row in rows:
        assert "dsl-bench-numpyref" in row["reason"]
        assert "dsl-bench-other" in row["reason"]


def test_a_file_replaces_the_installed_plugin_that_it_is_the_source_of(
    install: Install, single: Single, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "numpyref")
    path = single(name="numpyref")
    given = ("--plugin", str(path), "--format", "json")
    rows = rows_of(cli, "list", "--strict", *given)
    installed, file = (row(rows, "numpyref", kind) for kind in ("backend", "file"))
    assert installed["state"] == "replaced" and str(path) in installed["reason"]
    assert file["state"] == "ready"
    (kernel,) = (r for r in rows if r["name"] == "numpyref/gemm")
    assert (kernel["state"], kernel["from"]) == ("ready", "file")
    done = cli("run", "gemm", "--backend", "numpyref", "--target", "interpret", *SMALL, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {(r["what"], r["status"]) for r in json.loads(done.stdout)} == {("interpret", "ok")}


def test_a_plugin_can_be_one_file(single: Single, cli: Any) -> None:
    single()
    # the same file twice is one plugin
    done = cli(*MINE, "--plugin", "./mine.py")
    assert done.returncode == 0, done.stderr
    done = cli("list", "--plugin", "missing.py")
    assert done.returncode == 2
    assert "missing.py" in done.stderr


# -- plugins of one file ----------------------------------------------------------------------------------

MINE = (
    "run",
    "gemm",
    "--plugin",
    "mine.py",
    "--target",
    "interpret",
    "--out",
    "run.jsonl",
    "--format",
    "json",
)
SMALL = ("--case", "m=16,n=32,k=16,dtype=fp16")
KERNEL = """
from mine_base import GEMM
import dataclasses
from dsl_bench.plugin import Kernel
def make(**changes):
    return dataclasses.replace(GEMM, **changes)
"""
Single = Callable[..., Path]


@pytest.fixture
def single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Single:
    """Writes the plugin as one file, ``mine.py`` with the backend ``mine``, changed by plain replacements."""
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "")

    def write(changes: dict[str, str] | None = None, name: str = "mine") -> Path:
        text = (FIXTURE / PACKAGE / "__init__.py").read_text().replace("numpyref", name)
        for old, new in (changes or {}).items():
            assert old in text, "the text is not in the plugin any more"
            text = text.replace(old, new)
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    return write


def rows_of(cli: Any, *args: str, code: int = 0) -> list[dict[str, Any]]:
    done = cli(*args)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def row(rows: list[dict[str, Any]], name: str, kind: str = "") -> dict[str, Any]:
    (found,) = (r for r in rows if r.get("name") == name and (not kind or r["kind"] == kind))
    return found


def kept(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["type"] == kind]


LIST = ("list", "--format", "json", "--plugin", "mine.py")


@pytest.mark.sampled(0)
def test_a_folder_of_a_packages_name_hides_nothing(single: Single, cli: Any, tmp_path: Path) -> None:
    single()
    for name in ("triton", "kernels", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    for path in ("", os.pathsep):
        command = [sys.executable, "-P", "-m", "dsl_bench", *MINE, *SMALL]
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_not_ready_is_asked_again(single: Single, cli: Any, tmp_path: Path) -> None:
    there = f'__import__("os").path.exists({str(tmp_path / "ok")!r})'
    single({'target == "interpret"': f'target == "interpret" and {there}'})
    assert row(rows_of(cli, *LIST), "mine")["state"] == "unavailable"
    (tmp_path / "ok").touch()
    assert row(rows_of(cli, *LIST), "mine")["state"] == "ready"


@pytest.mark.sampled(0)
def test_a_helper_file_counts_into_the_hash(single: Single, cli: Any, tmp_path: Path) -> None:
    single({'    summary="blocks': '    files=("table.txt",),\n    summary="blocks'})
    hashes = set()
    for text in ("one", "two"):
        (tmp_path / "table.txt").write_text(text)
        assert cli(*MINE, *SMALL).returncode == 0
        hashes = {r["kernel_hash"] for r in kept(tmp_path, "interpret")}
    assert len(hashes) == 2
    (tmp_path / "table.txt").unlink()
    lost = row(rows_of(cli, *LIST), "mine")
    assert lost["state"] == "failed"
    assert "table.txt" in lost["reason"]


def test_a_module_beside_the_file_counts_into_the_hash(single: Single, cli: Any, tmp_path: Path) -> None:
    beside = "import sys; sys.path.insert(0, __file__.rpartition('/')[0])\nimport beside\nBACKEND ="
    path = single({"\nBACKEND =": f"\n{beside}"})
    (tmp_path / "beside.py").write_text("import further")
    hashes = set()
    for summary in ("one", "another"):
        (tmp_path / "further.py").write_text(f"SUMMARY = {summary!r}")
        assert cli(*MINE, *SMALL).returncode == 0
        hashes |= {r["kernel_hash"] for r in kept(tmp_path, "interpret")}
    assert len(hashes) == 2
    assert registry.siblings(path) == [tmp_path / "beside.py", tmp_path / "further.py"]


def test_an_edit_within_the_second_that_leaves_the_size_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for text, moment in (("one", 100), ("two", 900)):
        path.write_text(f"raise ValueError({text!r})\n")
        os.utime(path, ns=(0, (1_700_000_000_000 + moment) * 1_000_000))
        with pytest.raises(ValueError, match=text):
            registry.Shelf().load(Origin("file", "mine", str(path), "file"))


def test_a_workload_is_read_again_when_a_module_beside_it_changes(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys; sys.path.insert(0, __file__.rpartition('/')[0])\n"
        "import dataclasses, sizes\n"
        "from dsl_bench.workloads.gemm import Gemm\n"
        "class Mine(Gemm):\n"
        "    name = 'mine'\n"
        "    def cases(self):\n"
        "        return list(super().cases())[: sizes.COUNT]\n"
        "WORKLOAD = Mine()\n"
    )
    for count in (2, 13):
        (tmp_path / "sizes.py").write_text(f"COUNT = {count}")
        assert row(rows_of(cli, *LIST), "mine")["reason"].startswith(f"{count} cases")


@pytest.fixture
def package(single: Single, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backend whose kernels lie in modules of a package, one of which is broken."""
    site = tmp_path / "site"
    folder = site / "mine_kernels"
    folder.mkdir(parents=True)
    base = single().read_text().replace("BACKEND = NumpyRef()", "")
    (site / "mine_base.py").write_text(base)
    single(
        {'name = "mine"': 'name = "mine"\n    kernel_package = "mine_kernels"', "def kernels": "def _unused"}
    )
    (folder / "__init__.py").touch()
    (folder / "good.py").write_text(KERNEL + "KERNELS = (GEMM,)")
    (folder / "other.py").write_text(KERNEL + "KERNELS = (make(id='mine/other'),)")
    (folder / "bad.py").write_text("\nKERNELS = (no_such_name,)\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return folder


def test_a_broken_kernel_file_costs_its_own_kernels_only(package: Path, cli: Any, tmp_path: Path) -> None:
    listed = rows_of(cli, *LIST)
    assert row(listed, "mine", "file")["state"] == "failed"
    assert re.search(r"mine_kernels\.bad.*NameError.*bad\.py:2", row(listed, "mine", "file")["reason"])
    assert {r["name"] for r in listed if r["kind"] == "kernel"} == {"mine/gemm", "mine/other"}
    assert cli("list", "--strict", "--plugin", "mine.py").returncode == 1
    shown = rows_of(cli, *MINE, *SMALL, code=1)
    assert [r["kernel"] for r in shown if r["what"] == "interpret"] == ["mine/gemm", "mine/other"]
    (failure,) = (r for r in shown if r["what"] == "failure")
    assert "bad.py:2" in failure["result"]
    done = cli("plan", "gemm", "-k", "mine/bad", "--plugin", "mine.py")
    assert done.returncode == 2
    assert "not loaded: mine" in done.stderr
    (package / "bad.py").write_text("KERNELS = ()")
    assert row(rows_of(cli, *LIST), "mine", "file")["state"] == "ready", "no problem is cached"


@pytest.mark.sampled(0)
def test_a_kernel_that_cannot_be_planned_is_a_failure_and_the_rest_goes_on(
    package: Path, cli: Any, tmp_path: Path
) -> None:
    (package / "bad.py").write_text(KERNEL + "KERNELS = (make(id='mine/bad', default=lambda case: 1 / 0),)")
    shown = rows_of(cli, *MINE, *SMALL, code=1)
    assert [r["kernel"] for r in shown if r["what"] == "interpret"] == ["mine/gemm", "mine/other"]
    (failure,) = kept(tmp_path, "failure")
    assert (failure["kernel"], failure["where"]) == ("mine/bad", "plan")
    assert "ZeroDivisionError" in failure["reason"]
    done = cli(*MINE, *SMALL, "-k", "mine/gemm")
    assert done.returncode == 0, done.stdout
    # the worst: the process that plans is gone
    (package / "bad.py").write_text(
        KERNEL + "import os\nKERNELS = (make(id='mine/bad', default=lambda case: os._exit(7)),)"
    )
    shown = rows_of(cli, *MINE, *SMALL, code=1)
    assert all("cannot be planned" in r["result"] for r in shown if r["what"] == "failure")
    assert {r["kernel"] for r in shown if r["what"] == "failure"} == {"mine/bad", "mine/gemm", "mine/other"}


def test_a_second_kernel_of_a_name_is_left_out(
    single: Single, package: Path, cli: Any, tmp_path: Path
) -> None:
    (package / "bad.py").unlink()
    (tmp_path / "more.py").write_text(
        KERNEL
        + "KERNELS = (make(id='mine/gemm', summary='mine'), make(id='mine/new'), make(id='nobody/gemm'))"
    )
    listed = rows_of(cli, *LIST, "--plugin", "more.py")
    more = row(listed, "more")
    assert more["state"] == "failed"
    assert "mine/gemm" in more["reason"]
    assert "mine.py" in more["reason"]
    assert row(listed, "mine", "file")["state"] == "ready"
    assert "blocks of rows" in row(listed, "mine/gemm")["reason"], "the backend's own stays"
    assert row(listed, "mine/new")["state"] == "ready"
    assert row(listed, "nobody/gemm")["state"] == "unavailable"
    assert "no backend 'nobody'" in row(listed, "nobody/gemm")["reason"]
    shown = rows_of(cli, *MINE, *SMALL, "--plugin", "more.py", code=1)
    assert sorted(r["kernel"] for r in shown if r["what"] == "interpret") == [
        "mine/gemm",
        "mine/new",
        "mine/other",
    ]
    done = cli("check", "-k", "nobody/gemm", "--plugin", "mine.py", "--plugin", "more.py")
    assert done.returncode == 2
    assert "unknown backend 'nobody'" in done.stderr


@pytest.mark.parametrize("text", ["raise RuntimeError('no such luck')", "import os; os._exit(3)", "x = 1"])
def test_a_broken_file_beside_a_good_one_costs_nobody_else(
    single: Single, cli: Any, tmp_path: Path, text: str
) -> None:
    single()
    (tmp_path / "broken.py").write_text(text)
    shown = rows_of(cli, *MINE, *SMALL, "--plugin", "broken.py", code=1)
    assert [r["status"] for r in shown if r["what"] == "interpret"] == ["ok"]
    assert [r["kernel"] for r in shown if r["what"] == "failure"] == ["broken"]


def test_what_an_interpreter_cannot_do_is_no_failure(single: Single, cli: Any) -> None:
    single(
        {
            "return None if case.dtype": "return None  #",
            "import Availability": "import KernelFault, Availability",
            "    a, b, c = inputs": "    if case.dtype == 'bf16':\n"
            "        raise KernelFault('unavailable', 'it knows no bf16')\n    a, b, c = inputs",
        }
    )
    shown = rows_of(cli, *MINE, "--case", "m=16,n=32,k=16")
    (skip,) = (r for r in shown if r["case"] == "16x32x16-bf16")
    assert (skip["what"], skip["status"]) == ("skip", "unavailable")
    assert "it knows no bf16" in skip["result"]
    assert "dtype=fp16" in skip["result"]


def test_the_interpreter_takes_the_data_asked_for(single: Single, cli: Any, tmp_path: Path) -> None:
    single()
    assert cli(*MINE, *SMALL, "--data", "uniform").returncode == 0
    (verdict,) = kept(tmp_path, "interpret")
    assert [a["data"] for a in verdict["accuracy"]] == ["uniform", "outliers"]


def test_a_resumed_run_repeats_nothing_and_names_cut_lines(single: Single, cli: Any, tmp_path: Path) -> None:
    single()
    offline = [a for a in MINE if a not in ("--target", "interpret")]
    cases = ("--case", "m=16,n=32,k=16,dtype=fp16", "--case", "m=16,n=16,k=16")
    assert cli(*offline, *cases).returncode == 0
    before = (tmp_path / "run.jsonl").read_text()
    assert '"type":"skip"' in before
    again = [a for a in offline if a not in ("--out", "run.jsonl")]
    (tmp_path / "run.jsonl").write_text(before + before.splitlines()[-1][:50])
    done = cli(*again, *cases, "--resume", "run.jsonl")
    assert done.returncode == 0, done.stderr
    assert "run.jsonl:" in done.stderr
    assert "cut off" in done.stderr
    added = (tmp_path / "run.jsonl").read_text()[len(before) :].splitlines()[1:]
    assert [json.loads(line)["type"] for line in added] == ["run"]
    done = cli(*again, *cases, "--resume", "run.jsonl", "--out", "other.jsonl")
    assert done.returncode == 2
    assert "other.jsonl" in done.stderr
    assert not (tmp_path / "other.jsonl").exists()


def test_a_runs_table_sums_up_first_and_leaves_refusals_out(single: Single, cli: Any) -> None:
    single()
    args = [*MINE[:-2], *SMALL, "--case", "m=16,n=16,k=16"]
    done = cli(*args)
    assert done.stdout.startswith("interpret: 1 ok")
    assert "refused cases: 1 (--verbose" in done.stdout
    assert "NumPy has no bf16" not in done.stdout
    assert "NumPy has no bf16" in cli(*args, "--verbose").stdout


def test_a_plan_never_refuses_more_than_there_is(single: Single, cli: Any) -> None:
    single()
    rows = rows_of(
        cli, "plan", "gemm", "-b", "mine", "--plugin", "mine.py", "-f", "json", "--case", "m=4,n=4,k=4"
    )
    assert [(r["candidates"], r["pruned"]) for r in rows] == [(0, 2)]


def test_a_backend_is_implied_by_its_kernel(single: Single, cli: Any) -> None:
    single()
    single(name="second")
    both = ("--plugin", "second.py", *SMALL)
    shown = rows_of(cli, *MINE, *both, "-k", "second/gemm")
    assert [r["kernel"] for r in shown if r["what"] == "interpret"] == ["second/gemm"]
    done = cli(*MINE, *both, "-k", "second/gemm", "-b", "mine")
    assert done.returncode == 2
    assert "second/gemm" in done.stderr


def test_a_language_without_a_kernel_for_a_workload_says_so(single: Single, cli: Any, tmp_path: Path) -> None:
    single()
    other = (
        'from dsl_bench.workloads.gemm import Gemm\nWORKLOAD = type("Other", (Gemm,), {"name": "other"})()'
    )
    (tmp_path / "other.py").write_text(other)
    args = (
        "run",
        "other",
        "--plugin",
        "mine.py",
        "--plugin",
        "other.py",
        "--target",
        "interpret",
        "-f",
        "json",
    )
    (skip,) = rows_of(cli, *args)
    assert (skip["what"], skip["kernel"]) == ("skip", "mine")
    assert skip["result"] == "mine has no kernel for other"
    done = cli(*args, "-k", "mine/gemm")
    assert done.returncode == 2
    assert "kernel mine/gemm does gemm, not other" in done.stderr
    # a group or pattern need not be in every workload, where none is named
    shown = rows_of(
        cli, *MINE[:1], *MINE[2:], "--plugin", "other.py", "-c", "16x128x64-fp16", "-k", "mine/gemm"
    )
    assert [r["case"] for r in shown if r["what"] == "interpret"] == ["16x128x64-fp16"]
    done = cli(*MINE[:1], *MINE[2:], "--plugin", "other.py", "--case", "m=4,n=4,k=4")
    assert done.returncode == 2
    assert "name it, one of" in done.stderr
