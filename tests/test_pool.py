"""Workers die, hang and go on: nobody is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dsl_bench import jobs, pool
from dsl_bench import session as session_module
from dsl_bench.catalog import Catalog
from dsl_bench.contest import Contender, Contest, Memory
from dsl_bench.errors import DslBenchError
from dsl_bench.jobs import Origin
from dsl_bench.session import Progressor, Session, Settings

WORKLOAD = Origin("workload", "gemm", "dsl_bench.workloads.gemm:WORKLOAD")


def file_origin(tmp_path: Path, text: str) -> Origin:
    path = tmp_path / "plugin.py"
    path.write_text(text)
    return Origin("file", "plugin", str(path), "file")


@pytest.fixture
def worker():
    made = pool.Worker("describe")
    yield made
    made.kill()


def parse(worker, sizes, **options):
    outcome = worker.run(jobs.ParseCases(WORKLOAD, [sizes]), 30.0, **options)
    assert outcome.done is not None, outcome.refused
    return msgspec.json.decode(outcome.done.value)


def test_a_worker_serves_one_job_after_another(worker):
    assert parse(worker, {"m": "1", "n": "2", "k": "3"})[0]["name"] == "1x2x3-bf16"
    assert parse(worker, {"m": "4", "n": "2", "k": "3"})[0]["name"] == "4x2x3-bf16"


def test_a_refused_job_leaves_the_worker_alive(worker):
    outcome = worker.run(jobs.ParseCases(WORKLOAD, [{"m": "x"}]), 30.0)
    assert outcome.refused is not None
    assert not outcome.died
    assert parse(worker, {"m": "1", "n": "2", "k": "3"})


def test_a_worker_outlives_a_thread_that_used_it(worker):
    worker.start()
    first = worker._process.pid
    thread = threading.Thread(target=parse, args=(worker, {"m": "1", "n": "2", "k": "3"}))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert parse(worker, {"m": "4", "n": "2", "k": "3"})
    assert worker._process.pid == first


def test_a_silent_worker_is_killed_at_its_deadline_and_replaced(worker, tmp_path, monkeypatch):
    monkeypatch.setitem(pool.START_SECONDS, "describe", 5.0)
    origin = file_origin(tmp_path, "import time\ntime.sleep(600)\n")
    start = time.monotonic()
    outcome = worker.run(jobs.Describe(origin), 1.0)
    assert outcome.died
    assert outcome.refused is not None
    assert outcome.refused.status == "hang"
    assert outcome.refused.check == "deadline"
    assert time.monotonic() - start < 120
    assert parse(worker, {"m": "1", "n": "2", "k": "3"})


def test_a_worker_that_is_killed_names_the_signal(worker, tmp_path):
    origin = file_origin(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    outcome = worker.run(jobs.Describe(origin), 30.0)
    assert outcome.died
    assert outcome.refused is not None
    assert "SIGSEGV" in outcome.refused.reason


def test_what_a_plugin_prints_does_not_reach_the_protocol(worker, tmp_path):
    text = """
import os
print("{}")
os.write(1, b"noise" + bytes([10]))
raise ValueError("seen")
"""
    outcome = worker.run(jobs.Describe(file_origin(tmp_path, text)), 30.0)
    assert outcome.done is not None
    described = msgspec.json.decode(outcome.done.value, type=jobs.Described)
    assert described.state == "failed"
    assert "seen" in described.reason


def test_a_grandchild_goes_with_its_worker(worker, tmp_path, monkeypatch, lingering, processes):
    monkeypatch.setitem(pool.START_SECONDS, "describe", 8.0)
    text, mark = lingering
    worker.run(jobs.Describe(file_origin(tmp_path, text)), 2.0)
    pid = int(mark.read_text())
    processes.assert_gone(pid)


def test_workers_die_with_their_parent(processes):
    script = (
        "from dsl_bench import jobs, pool\n"
        "from dsl_bench.jobs import Origin\n"
        f"w = Origin('workload', 'gemm', {WORKLOAD.value!r})\n"
        "worker = pool.Worker('describe')\n"
        "worker.run(jobs.ParseCases(w, [{'m': '1', 'n': '1', 'k': '1'}]), 30.0)\n"
        "print(worker._process.pid, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert processes.alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    processes.assert_gone(pid)


def test_a_pool_does_every_job_and_closes(tmp_path):
    outcomes: list[pool.Outcome] = []
    finished = threading.Event()

    def done(outcome: pool.Outcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 5:
            finished.set()

    made = pool.Pool("describe", 2)
    for m in range(1, 6):
        made.submit(jobs.ParseCases(WORKLOAD, [{"m": str(m), "n": "1", "k": "1"}]), 30.0, done)
    assert finished.wait(60)
    made.close()
    assert all(o.done is not None for o in outcomes)


def test_a_pool_answers_where_no_process_can_be_started(monkeypatch):
    def full(*args, **how):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(pool.subprocess, "Popen", full)
    outcomes: list[pool.Outcome] = []
    answered = threading.Event()
    made = pool.Pool("compile", 1)
    for _ in range(2):
        made.submit(
            jobs.PreloadJob(()), 5.0, lambda o: (outcomes.append(o), len(outcomes) == 2 and answered.set())
        )
    in_time = answered.wait(20)
    made.close()
    assert in_time
    assert {o.refused.check for o in outcomes} == {"start"}
    assert "Resource temporarily unavailable" in outcomes[0].refused.reason


def test_a_run_ends_where_no_process_can_be_started(tmp_path):
    catalog = Catalog(())
    with Session(catalog, [].append, "r", Settings(), Progressor()) as session:
        refused = jobs.Refused("launch_error", "no worker process can be started: full", check="start")
        origin = Origin("backend", "b", "b:B", "d")
        job = jobs.CompileJob(origin, (), "b/k", "key", msgspec.Raw(b"{}"), "sm_90a", str(tmp_path))
        session._compiled(job, pool.Outcome(refused=refused))
        with pytest.raises(DslBenchError, match="can be started: full"):
            session.built("key")


def test_ctrl_c_does_not_wait_for_a_plan_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "COMPILE_SECONDS", 15.0)
    text = (
        "import time\n"
        "from dsl_bench.plugin import Backend\n"
        "class Toy(Backend):\n    name = 'toy'\n    def toolchain(self):\n        time.sleep(600)\n"
        "BACKEND = Toy()\n"
    )
    ready = {"device": jobs.TargetInfo(True, "", "")}
    info = jobs.BackendInfo("toy", "language", ready, {}, "", [], [], False)
    catalog = Catalog((jobs.Described(file_origin(tmp_path, text), "ready", backend=info),))
    kept: list[object] = []
    sink = SimpleNamespace(write=kept.append)
    with Session(catalog, sink, "r", Settings(), Progressor()) as session:
        monkeypatch.setattr(session, "preload", lambda backends: None)
        here = threading.get_ident()
        threading.Timer(2.0, signal.pthread_kill, (here, signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Contest(session).prepare([], [Contender("toy", "toy", "language")], 1, Memory())
    assert time.monotonic() - begun < 10.0
    assert not kept
