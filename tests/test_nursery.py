"""Workers that are forked where a language is imported already: as separate, and as mortal, as any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsl_bench import jobs, nursery, pool
from dsl_bench.jobs import Origin

WORKLOAD = Origin("workload", "gemm", "dsl_bench.workloads.gemm:WORKLOAD")
BACKEND = """
from dsl_bench.plugin import Availability, Backend

class Toy(Backend):
    name = "toy"
    ahead = {ahead}

    def probe(self, target):
        return Availability(True)

BACKEND = Toy()
"""

Born = Callable[..., nursery.Zygote]


@pytest.fixture
def born(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Born]:
    """Makes the process of a backend whose module has this text."""
    held = nursery.Nursery()
    # beside whatever the tests' own environment has there
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )

    def make(ahead: str = "('json',)", first: str = "") -> nursery.Zygote:
        (tmp_path / "toy_backend.py").write_text(first + BACKEND.format(ahead=ahead))
        origin = Origin("backend", "toy", "toy_backend:BACKEND", "toy 1")
        held.open([origin])
        made = held.of(origin)
        assert made is not None
        return made

    yield make
    held.close()


@pytest.fixture
def worker(born: Born) -> Iterator[pool.Worker]:
    made = pool.Worker("describe", zygote=born())
    yield made
    made.kill()


def parse(worker: pool.Worker, m: int = 1) -> str:
    outcome = worker.run(jobs.ParseCases(WORKLOAD, [{"m": str(m), "n": "2", "k": "3"}]), 30.0)
    assert outcome.done is not None, outcome.refused
    return str(msgspec.json.decode(outcome.done.value)[0]["name"])


def plugin(tmp_path: Path, text: str) -> jobs.Describe:
    path = tmp_path / "plugin.py"
    path.write_text(text)
    return jobs.Describe(Origin("file", "plugin", str(path), "file"))


def pid_of(worker: pool.Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


def test_a_fork_serves_one_job_after_another_in_a_group_of_its_own(worker: pool.Worker) -> None:
    assert parse(worker, 1) == "1x2x3-bf16"
    assert worker.forked
    assert parse(worker, 4) == "4x2x3-bf16"
    assert os.getpgid(pid_of(worker)) == pid_of(worker)


def test_what_was_imported_is_there_and_no_gpu(worker: pool.Worker, tmp_path: Path) -> None:
    seen = "'toy_backend' in sys.modules, os.environ['CUDA_VISIBLE_DEVICES']"
    text = f"import os, sys\nraise ValueError({seen})"
    outcome = worker.run(plugin(tmp_path, text), 30.0)
    assert outcome.done is not None
    assert msgspec.json.decode(outcome.done.value, type=jobs.Described).reason == "ValueError: (True, '')"


def test_what_one_fork_does_is_not_seen_in_the_next(born: Born, tmp_path: Path) -> None:
    zygote = born()
    text = "import json\nwas = hasattr(json, 'mine')\njson.mine = 1\nraise ValueError(was)"
    for _ in range(2):
        worker = pool.Worker("describe", zygote=zygote)
        outcome = worker.run(plugin(tmp_path, text), 30.0)
        worker.kill()
        assert outcome.done is not None
        assert msgspec.json.decode(outcome.done.value, type=jobs.Described).reason == "ValueError: False"


def test_a_fork_that_dies_names_the_signal_and_is_replaced(worker: pool.Worker, tmp_path: Path) -> None:
    outcome = worker.run(plugin(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"), 30.0)
    assert outcome.died
    assert outcome.refused is not None
    assert "SIGSEGV" in outcome.refused.reason
    assert parse(worker)
    assert worker.forked


def test_its_last_words_are_kept(worker: pool.Worker, tmp_path: Path) -> None:
    outcome = worker.run(plugin(tmp_path, "import os\nos.write(2, b'no more')\nos._exit(7)\n"), 30.0)
    assert outcome.refused is not None
    assert "exit code 7" in outcome.refused.reason
    assert outcome.refused.reason.endswith("no more")


def test_a_silent_fork_goes_with_all_that_it_started(
    worker: pool.Worker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lingering: tuple[str, Path],
    processes: Any,
) -> None:
    monkeypatch.setitem(pool.START_SECONDS, "describe", 5.0)
    text, mark = lingering
    outcome = worker.run(plugin(tmp_path, text), 1.0)
    assert outcome.refused is not None
    assert (outcome.refused.status, outcome.refused.check) == ("hang", "deadline")
    processes.assert_gone(int(mark.read_text()))
    assert parse(worker)


def test_a_fork_that_is_ended_at_once_is_gone(born: Born, processes: Any) -> None:
    zygote = born()
    for _ in range(20):
        worker = pool.Worker("compile", zygote=zygote)
        worker.start()
        pid = pid_of(worker)
        worker.kill()
        assert not processes.alive(pid)


@pytest.mark.parametrize(
    ("ahead", "first", "reason"),
    [
        ("()", "", "nothing to import ahead"),
        ("('no_such_module',)", "", "no_such_module"),
        (
            "('json',)",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
            "threads",
        ),
        ("('json',)", "import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("('json',)", "import os\nos._exit(3)\n", "ended the process"),
    ],
    ids=["nothing", "missing", "threads", "exits", "dies"],
)
def test_where_forking_will_not_do_workers_start_the_long_way(
    born: Born, ahead: str, first: str, reason: str
) -> None:
    zygote = born(ahead, first)
    worker = pool.Worker("describe", zygote=zygote)
    try:
        assert parse(worker)
        assert not worker.forked
        assert reason in zygote.reason
    finally:
        worker.kill()


def test_an_import_that_hangs_holds_nobody_up_for_ever(born: Born, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "IMPORT_SECONDS", 1.0)
    zygote = born(first="import time\ntime.sleep(600)\n")
    stop = threading.Event()
    stop.set()
    assert not zygote.fit(stop)  # nor one that is told to stop
    worker = pool.Worker("describe", zygote=zygote)
    try:
        assert parse(worker)
    finally:
        worker.kill()


def test_a_device_worker_is_never_a_fork(born: Born) -> None:
    with Path(os.devnull).open("wb") as log:
        assert born().fork("device", {}, log) is None


def test_when_their_origin_dies_its_workers_do_and_others_start(worker: pool.Worker, processes: Any) -> None:
    parse(worker)
    first = pid_of(worker)
    assert worker._zygote is not None
    os.kill(worker._zygote._process.pid, signal.SIGKILL)
    processes.assert_gone(first)
    assert parse(worker)
    assert not worker.forked


def test_forks_die_with_the_parent(born: Born, tmp_path: Path, processes: Any) -> None:
    born()  # writes the backend
    script = (
        "import time\n"
        "from dsl_bench import jobs, nursery, pool\n"
        "from dsl_bench.jobs import Origin\n"
        "held = nursery.Nursery()\n"
        "origin = Origin('backend', 'toy', 'toy_backend:BACKEND', 'toy 1')\n"
        "held.open([origin])\n"
        "worker = pool.Worker('describe', zygote=held.of(origin))\n"
        f"w = Origin('workload', 'gemm', {WORKLOAD.value!r})\n"
        "worker.run(jobs.ParseCases(w, [{'m': '1', 'n': '1', 'k': '1'}]), 30.0)\n"
        "assert worker.forked\n"
        "print(worker._process.pid, held.of(origin)._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(processes.alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    processes.assert_gone(*pids)


def test_a_pool_takes_its_workers_from_there(born: Born) -> None:
    zygote = born()
    origin = Origin("backend", "toy", "toy_backend:BACKEND", "toy 1")
    held = nursery.Nursery()
    held._zygotes[origin] = zygote
    outcomes: list[pool.Outcome] = []
    finished = threading.Event()

    def done(outcome: pool.Outcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 6:
            finished.set()

    made = pool.Pool("compile", 3, {"CUDA_VISIBLE_DEVICES": ""}, held)
    for _ in range(6):
        made.submit(jobs.PreloadJob((origin,)), 30.0, done)
    assert finished.wait(60)
    made.close()
    assert all(o.done is not None for o in outcomes), [o.refused for o in outcomes]


def test_a_job_that_a_stop_cuts_short_is_not_blamed(born: Born, tmp_path: Path) -> None:
    zygote = born()
    begun = tmp_path / "begun"
    text = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    job = plugin(tmp_path, text)
    stop = threading.Event()
    outcomes: list[pool.Outcome] = []
    worker = pool.Worker("describe", zygote=zygote)
    thread = threading.Thread(target=lambda: outcomes.append(worker.run(job, 60.0, stop=stop)))
    thread.start()
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    stop.set()
    zygote.close()  # as a session ends: with its forks, which the thread hears of before it looks at `stop`
    thread.join(30)
    assert outcomes[0].refused is not None
    assert outcomes[0].refused.check == "interrupt"


def test_a_job_whose_worker_went_with_its_origin_is_done_again(born: Born, tmp_path: Path) -> None:
    zygote = born()
    begun = tmp_path / "begun"
    text = (
        "import pathlib, time\n"
        f"begun = pathlib.Path({str(begun)!r})\n"
        "if not begun.exists():\n    begun.touch()\n    time.sleep(600)\n"
        "raise ValueError('the second time')\n"
    )
    job = plugin(tmp_path, text)
    outcomes: list[pool.Outcome] = []
    worker = pool.Worker("describe", zygote=zygote)
    thread = threading.Thread(target=lambda: outcomes.append(worker.run(job, 60.0)))
    thread.start()
    while not begun.exists():
        time.sleep(0.01)
    os.kill(zygote._process.pid, signal.SIGKILL)  # as the system does where memory is short
    thread.join(60)
    worker.kill()
    assert outcomes[0].done is not None, outcomes[0].refused
    assert "the second time" in msgspec.json.decode(outcomes[0].done.value, type=jobs.Described).reason
