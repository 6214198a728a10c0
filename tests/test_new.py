"""`dsl-bench new` and `dsl-bench check FILE`: skeletons pass as they are; bad input is one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsl_bench import api, checking, conformance, jobs, skeleton
from dsl_bench.errors import UsageError
from dsl_bench.plugin import Case, TensorSpec, Workload

KERNELS = ("triton/my_gemm", "tilelang/my_gemm", "cuda/my_gemm")
#: what the check of each shows without a GPU
SHOWN = {"triton": {"interpret", "compile"}, "tilelang": {"compile"}, "cuda": {"compile"}}


def made(cli, kind: str, name: str) -> tuple[list[str], str]:
    """The files written, and the command that is said to come next."""
    done = cli("new", kind, name)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr.strip().removeprefix("next: dsl-bench ")


def checked(cli, command: str, *more: str) -> list[dict[str, str]]:
    done = cli(*command.split(), "--format", "json", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_new_kernel_passes_its_check(cli, name: str) -> None:
    language = name.partition("/")[0]
    if language != "cuda":
        pytest.importorskip(language)
    files, following = made(cli, "kernel", name)
    assert files[0] == "my_gemm.py"
    rows = checked(cli, following)
    held = [r for r in rows if r["kernel"] == name and r["status"] == "ok"]
    assert SHOWN[language] <= {r["what"] for r in held}
    assert all(" regs, stack 0" in r["result"] for r in held if r["what"] == "compile")
    assert {r["status"] for r in rows if r["kernel"] == name} <= {"ok", "invalid_config"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_with_a_gpu_its_check_ends_in_a_fraction(cli, name: str) -> None:
    _, following = made(cli, "kernel", name)
    rows = checked(cli, following, "--case", "4096x4096x4096-bf16")
    races = [r for r in rows if r["what"].startswith("race") and r["kernel"] == name]
    assert {r["what"] for r in races} == {"race cold", "race sustained"}
    assert all(r["status"] == "ok" and " of vendor/" in r["result"] for r in races)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_with_a_gpu_it_is_right_on_the_smoke_cases(cli, name: str) -> None:
    _, following = made(cli, "kernel", name)
    rows = checked(cli, following, "--no-race")
    assert [r for r in rows if r["what"] == "tune" and r["kernel"] == name]


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_a_new_workload_passes_its_check(cli) -> None:
    pytest.importorskip("torch")
    _, following = made(cli, "workload", "my_norm")
    rows = [r for r in checked(cli, following) if r["what"] == "workload"]
    assert len(rows) == 3 and {r["status"] for r in rows} == {"ok"}


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_a_new_backend_passes_its_check_and_the_conformance_kit(cli, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    files, following = made(cli, "backend", "my_lang")
    rows = checked(cli, following)
    assert {r["case"] for r in rows if r["what"] == "interpret" and r["status"] == "ok"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", files[-1]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout


def test_a_skeleton_is_short() -> None:
    for name in KERNELS:
        assert _longest(skeleton.kernel(name, Path())) < 60
    assert _longest(skeleton.workload("mine", Path())) < 60
    assert _longest(skeleton.backend("mine", Path())) < 60


def _longest(made: skeleton.Skeleton) -> int:
    assert not any(re.search(r"@\w+@", text) for text in made.files.values())
    return max(len(text.splitlines()) for text in made.files.values())


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("kernel", "my_gemm", "triton/my_gemm"),
        ("kernel", "My Gemm!", "triton/my_gemm"),
        ("kernel", "tritn/my_gemm", "did you mean triton"),
        ("kernel", "triton/", "kernel name ''"),
        ("kernel", "triton/Gemm", "'Gemm'"),
        ("kernel", "triton/a/b", "'a/b'"),
        ("kernel", "triton/../x", "'../x'"),
        ("kernel", "triton/lambda", "word of Python"),
        ("kernel", "cuda/json", "would hide it"),
        ("workload", "9lives", "'9lives'"),
        ("workload", "x" * 41, "40"),
        ("backend", "my-lang", "'my-lang'"),
    ],
)
def test_names_are_validated(tmp_path: Path, kind: str, name: str, words: str) -> None:
    if words == "40":
        words = "up to 39"
    with pytest.raises(UsageError) as caught:
        getattr(skeleton, kind)(name, tmp_path)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.cu").write_text("precious")
    with pytest.raises(UsageError, match=r"mine\.cu exists already"):
        skeleton.kernel("cuda/mine", tmp_path).write()
    assert [p.name for p in tmp_path.iterdir()] == ["mine.cu"]
    assert (tmp_path / "mine.cu").read_text() == "precious"


@pytest.mark.slow
def test_a_name_that_is_taken_is_refused(cli, tmp_path: Path) -> None:
    for kind, name in (("workload", "gemm"), ("backend", "triton")):
        done = cli("new", kind, name)
        assert done.returncode == 2 and "is taken: dsl-bench" in done.stderr
    assert not list(tmp_path.glob("*.py"))


@pytest.mark.slow
def test_a_file_that_cannot_be_used_says_why(cli, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    done = cli("check", "broken.py")
    assert done.returncode == 1 and "nothing_like_this" in done.stderr
    (tmp_path / "empty.py").write_text("")
    done = cli("check", "empty.py")
    assert done.returncode == 1 and "none of BACKEND, WORKLOAD, KERNELS" in done.stderr
    done = cli("check", "none.py")
    assert done.returncode == 2 and "'none.py'" in done.stderr


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_a_wrong_kernel_fails_its_check(cli, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    made(cli, "kernel", "triton/my_gemm")
    path = tmp_path / "my_gemm.py"
    path.write_text(path.read_text().replace("tl.dot(x, y.T, acc)", "tl.dot(x, y.T, acc) * 1.01"))
    done = cli("check", "my_gemm.py", "--format", "json")
    assert done.returncode == 1
    assert {r["status"] for r in json.loads(done.stdout) if r["what"] == "interpret"} == {"incorrect"}


class Flawed(Workload):
    """Everything that can be wrong with a workload."""

    name = "flawed"

    def cases(self) -> list[Case]:
        smoke = Case("flawed", "a-fp16", {}, "fp16", ("smoke",))
        return [smoke, smoke, Case("other", "b-fp8", {}, "fp8", ())]

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        return (TensorSpec("x", (2,), "fp16", "value"), TensorSpec("y", (2,), "fp16", "output"))

    def reference(self, case, inputs):
        return {"y": inputs["x"]}

    def flops(self, case: Case) -> float:
        return 0.0

    def bytes(self, case: Case) -> float:
        return float("nan")


def test_what_is_wrong_with_a_workload_is_named() -> None:
    pytest.importorskip("torch")
    lines = [" ".join(found) for found in conformance.examine(Flawed())]
    text = "\n".join(lines)
    for words in ("two cases", "'fp8'", "'other'", "no group", "flops = 0.0", "bytes = nan", "not float64"):
        assert words in text


def fake_run(targets: list[api.Request], target: str, failed: int = 0):
    def run(request: api.Request, show: object, catalog: object) -> api.Report:
        targets.append(request)
        return api.Report(Path("a.jsonl"), [], failed=failed, target=target, held=1)

    return run


@pytest.mark.parametrize(
    ("target", "failed", "groups", "runs"),
    [
        ("offline", 0, (), [["smoke"]]),
        ("device", 1, (), [["smoke"]]),
        ("device", 0, (), [["smoke"], ["quick"]]),
        ("device", 0, ("llm",), [["llm"], ["llm"]]),
    ],
)
def test_only_what_is_right_on_a_device_is_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, failed: int, groups: tuple, runs: list
) -> None:
    (tmp_path / "mine.py").write_text("")
    place = str(tmp_path / "mine.py")
    origin = jobs.Origin("file", "mine", place, "file")
    ours = SimpleNamespace(id="triton/mine", workload="gemm", origin=origin)
    info = SimpleNamespace(cases=[SimpleNamespace(groups=("smoke", "quick", "llm"))], name="gemm")
    catalog = SimpleNamespace(
        described=[jobs.Described(origin, "ready")],
        kernels=lambda: {"triton/mine": ours},
        workloads=lambda: {"gemm": (origin, info)},
        backend=lambda name: (origin, None),
        workload=lambda name: (origin, info),
    )
    asked: list[api.Request] = []
    monkeypatch.setattr(checking.catalogs, "load", lambda *args: catalog)
    monkeypatch.setattr(checking.api, "run", fake_run(asked, target, failed))
    done = checking.check_files(api.Request(groups=groups, plugins=[place]), [place])
    assert [list(r.groups) for r in asked] == runs
    assert [r.race for r in asked] == [False, True][: len(runs)]
    assert all(list(r.kernels) == ["triton/mine"] for r in asked)
    assert done.failed == failed
    if len(asked) == 2:
        assert asked[1].resume == Path("a.jsonl") and asked[0].settings.trial_seconds < 0.01
        assert asked[1].settings.trial_seconds > 0.01 and done.report is not None and done.report.held == 2
