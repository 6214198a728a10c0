"""A disk that is full, a file that may not grow or is read-only, in the middle of a run: one line that names
the file, exit code 1, every record whole, and the next run goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl_bench import store
from dsl_bench.records import Compiled, Interpreted, Record

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
PLUGIN = HERE / "wrong_kernels" / "slow.py"
KERNELS = 30


class Run:
    """The command line on the slow kernels, and what it leaves."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.out = folder / "run.jsonl"
        path = os.pathsep.join(filter(None, [str(HERE / "plugin_fixture"), os.environ.get("PYTHONPATH")]))
        own = {"DSL_BENCH_BACKENDS": "", "DSL_BENCH_CACHE_DIR": str(cache), "PYTHONPATH": path}
        self.env = {**os.environ, **own, "SLOW_KERNELS": str(KERNELS), "SLOW_SECONDS": "0.02"}

    def command(self, *more: str, target: str = "interpret") -> list[str]:
        """The words of a command."""
        flags = ["--plugin", str(PLUGIN), "--target", target, "--case", "m=16,n=32,k=16,dtype=fp16"]
        kernels = [flag for n in range(KERNELS) for flag in ("-k", f"numpyref/slow_{n:03}")]
        code = "from dsl_bench.cli import main; main()"
        return [sys.executable, "-c", code, "run", "gemm", "-b", "numpyref", *flags, *kernels, *more]

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """A command under way."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL, stderr=pipe, text=True
        )

    def finish(self, command: list[str]) -> tuple[int, str]:
        """A command's exit code and what it said."""
        process = self.start(command)
        _, stderr = process.communicate(timeout=200)
        return process.returncode, stderr

    def records(self) -> list[Record]:
        """All records; every line of the file is one."""
        found, problems = store.read([self.out])
        assert not problems
        assert self.out.read_bytes().endswith(b"\n")
        return found

    def kernels(self) -> list[str]:
        """What was interpreted."""
        return [r.kernel for r in self.records() if isinstance(r, Interpreted)]

    def resumed(self, before: bytes) -> None:
        """Where there is room again, the rest is done, and nothing of it twice."""
        code, stderr = self.finish(self.command("--resume", str(self.out)))
        assert code == 0, stderr
        assert self.out.read_bytes().startswith(before)
        assert len(self.kernels()) == len(set(self.kernels())) == KERNELS


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Run:
    return Run(tmp_path, cache)


def wait_for(process: subprocess.Popen[str], path: Path, what: bytes) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and what in path.read_bytes():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {what!r} in {path}")


def assert_told(stderr: str, path: Path) -> None:
    """One line, no trace, the file's name."""
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if line.startswith("dsl-bench: ")]
    assert len(lines) == 1
    assert f"cannot write results to {path}" in lines[0]


@contextlib.contextmanager
def workers_gone(process: subprocess.Popen[str]) -> Iterator[None]:
    """That nobody whom the process started is left afterwards."""
    yield
    deadline = time.monotonic() + 60
    mark = f"DSL_BENCH_PARENT={process.pid}\0".encode()
    while time.monotonic() < deadline and any(_has(p, mark) for p in Path("/proc").glob("[0-9]*")):
        time.sleep(0.05)
    assert not [p for p in Path("/proc").glob("[0-9]*") if _has(p, mark)]


def _has(process: Path, mark: bytes) -> bool:
    try:
        alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return alive and mark in (process / "environ").read_bytes()
    except OSError:
        return False


def forbid_growth(process: subprocess.Popen[str], path: Path, more: int) -> None:
    """From now on the file may grow by ``more`` bytes only: the system refuses the rest, like a full disk."""
    size = path.stat().st_size + more
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("more", [0, 200])
def test_a_file_that_may_not_grow_ends_the_run_and_stays_whole(run: Run, more: int) -> None:
    process = run.start(run.command("--out", str(run.out)))
    with workers_gone(process):
        wait_for(process, run.out, b'"interpret"')
        forbid_growth(process, run.out, more)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 1
    assert_told(stderr, run.out)
    assert 1 <= len(run.kernels()) < KERNELS
    run.resumed(run.out.read_bytes())


def test_the_same_while_the_pool_compiles(run: Run) -> None:
    """Records of compiled artifacts are written by threads: the run must hear of it."""
    process = run.start(run.command("--out", str(run.out), target="compile"))
    with workers_gone(process):
        wait_for(process, run.out, b'"run"')
        forbid_growth(process, run.out, 10)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 1
    assert_told(stderr, run.out)
    assert len([r for r in run.records() if isinstance(r, Compiled)]) < KERNELS


def in_namespace(script: str) -> list[str]:
    """A shell of its own user and mount namespace, where one may mount."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    probe = "d=$(mktemp -d) && mount -t tmpfs -o size=16k tmpfs $d && umount $d && rmdir $d"
    if subprocess.run([*prefix, probe], capture_output=True).returncode:
        pytest.skip("nobody may mount here")
    return [*prefix, script]


def test_a_disk_that_fills_up_ends_the_run_and_the_file_stays_whole(run: Run) -> None:
    small = run.folder / "small"
    small.mkdir()
    out = small / "run.jsonl"
    words = " ".join(f"'{w}'" for w in run.command("--out", str(out)))
    script = (
        f"mount -t tmpfs -o size=8k tmpfs '{small}' || exit 99; {words}; code=$?; "
        f"cp '{out}' '{run.out}'; exit $code"
    )
    code, stderr = run.finish(in_namespace(script))
    assert code == 1, stderr
    assert_told(stderr, out)
    assert "No space left" in stderr
    assert 1 <= len(run.kernels()) < KERNELS
    run.resumed(run.out.read_bytes())


def test_a_file_that_becomes_read_only_is_refused_on_resume_and_not_before(run: Run) -> None:
    process = run.start(run.command("--out", str(run.out)))
    wait_for(process, run.out, b'"interpret"')
    run.out.chmod(0o444)  # what is open stays open
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    before = run.out.read_bytes()
    assert len(run.kernels()) == KERNELS
    command = run.command("--resume", str(run.out))
    if os.geteuid() == 0:  # whom no mode stops
        words = " ".join(f"'{w}'" for w in command)
        folder = run.folder
        script = (
            f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}' || exit 99; "
            f"cd '{folder}'; {words}"
        )
        command = in_namespace(script)
    code, stderr = run.finish(command)
    assert code == 1, stderr
    assert_told(stderr, run.out)
    assert run.out.read_bytes() == before
