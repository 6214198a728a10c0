"""SIGKILL at any moment, to the parent or to a worker: nothing recorded is lost, nothing is done twice, and
nobody is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl_bench import store
from dsl_bench.records import Interpreted, Record

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).resolve().parent
PLUGIN = HERE / "wrong_kernels" / "slow.py"
CASES = ("m=16,n=32,k=16,dtype=fp16", "m=17,n=33,k=16,dtype=fp16")
KERNELS = 60
#: moments at which the parent is killed, in all
MOMENTS = 30

Slot = tuple[str, str]


class Run:
    """Runs of one results file, each in a process of its own that may be killed."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.out = folder / "run.jsonl"
        path = os.pathsep.join(filter(None, [str(HERE / "plugin_fixture"), os.environ.get("PYTHONPATH")]))
        own = {"DSL_BENCH_BACKENDS": "", "DSL_BENCH_CACHE_DIR": str(cache), "PYTHONPATH": path}
        self.env = {**os.environ, **own, "SLOW_KERNELS": str(KERNELS), "SLOW_SECONDS": "0.02"}

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """The next run: it goes on where there is a file already."""
        cases = [flag for case in CASES for flag in ("--case", case)]
        where = ("--resume" if self.out.exists() else "--out", str(self.out))
        words = ("run", "gemm", "-b", "numpyref", "--plugin", str(PLUGIN), "--target", "interpret", *cases)
        code = "from dsl_bench.cli import main; main()"
        kernels = more or [flag for n in range(KERNELS) for flag in ("-k", f"numpyref/slow_{n:03}")]
        return subprocess.Popen(
            [sys.executable, "-c", code, *words, *where, *kernels],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def content(self) -> bytes:
        """What is in the file."""
        return self.out.read_bytes() if self.out.exists() else b""

    def records(self) -> list[Record]:
        """All records; there must be nothing else in the file."""
        found, problems = store.read([self.out])
        assert not problems
        return found

    def slots(self) -> list[Slot]:
        """What was interpreted, in order."""
        return [(r.kernel, r.case.name) for r in self.records() if isinstance(r, Interpreted)]

    def wait_for_more(self, process: subprocess.Popen[bytes], size: int) -> None:
        """Until the file has grown by an interpreted kernel, or the process is gone."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if b'"interpret"' in self.content()[size:]:
                return
            time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Everything alive that ``pid`` or its workers started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"DSL_BENCH_PARENT={pid}\0".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def assert_nobody_left(pid: int) -> None:
    deadline = time.monotonic() + 60
    while children_of(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not children_of(pid)


def end(process: subprocess.Popen[bytes]) -> str:
    """Wait for it; what it said."""
    _, stderr = process.communicate(timeout=200)
    return stderr.decode()


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Iterator[Run]:
    # the slow plugin's kernels depend on the environment, which no description's name knows
    made = Run(tmp_path, cache / "kill")
    yield made


def killed(run: Run, rng: random.Random, startup: float) -> float:
    """Start, kill at a moment by chance, look at what is left. Returns how long it took to the first record,
    where it came so far; ``startup`` is what that took before (0: not known yet)."""
    before = run.content()
    process = run.start()
    began = time.monotonic()
    try:
        if not startup or rng.random() < 0.5:
            run.wait_for_more(process, len(before))
            startup = time.monotonic() - began
            time.sleep(rng.uniform(0.0, 0.3))
        else:
            time.sleep(rng.uniform(0.0, startup))
        gone = process.poll()
    finally:
        process.kill()
        text = end(process)
    assert gone in (None, 0), f"it ended by itself: exit {gone}: {text}"
    assert_nobody_left(process.pid)
    after = run.content()
    assert after.startswith(before), "what was recorded has changed"
    assert not after or after.endswith(b"\n")
    return startup


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_parent_killed_at_any_moment_loses_nothing_that_was_recorded(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    startup, reached = 0.0, 0
    for _ in range(MOMENTS // 2):
        startup = killed(run, rng, startup)
        slots = run.slots() if run.out.exists() else []
        assert len(slots) == len(set(slots)), "something was done twice"
        reached = max(reached, len(slots))
    assert reached, "no run came as far as a record"
    process = run.start()
    text = end(process)
    assert process.returncode == 0, text
    slots = run.slots()
    assert len(slots) == len(set(slots)) == KERNELS * len(CASES)
    assert all(r.status == "ok" for r in run.records() if isinstance(r, Interpreted))
    assert_nobody_left(process.pid)


def test_a_parent_killed_while_its_worker_hangs_leaves_nobody(run: Run) -> None:
    process = run.start("-k", "numpyref/hangs")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(map(is_sleep, children_of(process.pid))):
        time.sleep(0.05)
    assert any(map(is_sleep, children_of(process.pid))), "it does not hang"
    process.kill()
    end(process)
    assert_nobody_left(process.pid)
    assert run.slots() == [], "the job in flight is the one that is lost"
    process = run.start("-k", "numpyref/slow_000")
    text = end(process)
    assert process.returncode == 0, text
    assert len(run.slots()) == len(CASES)


def is_sleep(pid: int) -> bool:
    """Whether the hanging kernel's own program runs as ``pid``."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except OSError:
        return False


def test_a_killed_worker_costs_the_job_in_flight(run: Run) -> None:
    process = run.start(*(flag for n in range(40) for flag in ("-k", f"numpyref/slow_{n:03}")))
    run.wait_for_more(process, 0)
    (worker,) = (pid for pid in children_of(process.pid) if is_leader(pid))
    os.kill(worker, signal.SIGKILL)
    text = end(process)
    assert process.returncode == 1, text
    verdicts = [r for r in run.records() if isinstance(r, Interpreted)]
    assert len(verdicts) == len(set(run.slots())) == 40 * len(CASES)
    (lost,) = (r for r in verdicts if r.status != "ok")
    assert (lost.status, lost.check) == ("launch_error", "process")
    assert "SIGKILL" in lost.reason
    assert_nobody_left(process.pid)


def is_leader(pid: int) -> bool:
    """Whether ``pid`` is a worker itself, not a process that it started."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
