"""What a command starts before it knows what for: nobody is left behind, and nothing is taken for granted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dsl_bench import catalog, headstart, jobs
from dsl_bench.headstart import HeadStart
from dsl_bench.jobs import Origin

BACKEND = """
import os
from dsl_bench.plugin import Availability, Backend

class Toy(Backend):
    name = "toy"
    ahead = ("json",)

    def probe(self, target):
        seen = "CUDA_VISIBLE_DEVICES" not in os.environ
        return Availability(target == "compile" or seen, "" if seen else "no GPU in sight")

BACKEND = Toy()
"""


def pid_of(head: HeadStart) -> int:
    process = head.device._process
    assert process is not None
    return process.pid


def test_without_a_gpu_no_device_worker_is_started() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there may be a GPU")
    with HeadStart() as head:
        head.torch()
        assert head.device._process is None
        assert list(head.timeline()) == ["finished"]


def test_the_device_worker_imports_without_touching_the_gpu_and_outlives_the_threads() -> None:
    pytest.importorskip("torch")
    with HeadStart() as head:
        head.warm(jobs.PreloadJob((), context=False), 60.0, "torch imported")
        first = pid_of(head)
        head.warm(jobs.PreloadJob((), context=False), 60.0, "once more")
        head.settled()
        time.sleep(0.2)
        assert pid_of(head) == first
        assert head.device._process is not None
        assert head.device._process.poll() is None
        files = [str(p.readlink()) for p in Path(f"/proc/{first}/fd").iterdir()]
        assert not [name for name in files if name.startswith("/dev/nvidia")]
        when = head.timeline()
        assert list(when) == ["torch imported", "once more", "finished"]
        assert 0 < when["torch imported"] <= when["finished"]


def test_a_device_worker_that_dies_while_it_warms_up_is_not_started_by_a_thread_that_ends() -> None:
    with HeadStart() as head:
        head.warm(jobs.PreloadJob((), context=False), 60.0, "torch imported")
        first = pid_of(head)
        head.settled()
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        head.warm(jobs.PreloadJob((), context=False), 60.0, "once more")
        head.settled()
        assert pid_of(head) == first and not head.device.alive
        head.device.start()
        assert pid_of(head) != first and head.device.alive


def test_it_ends_while_it_is_at_it() -> None:
    head = HeadStart()
    head.languages(["triton", "no such language"])
    head.warm(jobs.PreloadJob((), context=False), 60.0, "torch imported")
    pids = [pid_of(head), *(z._process.pid for z in head.nursery.zygotes())]
    began = time.monotonic()
    head.close()
    assert time.monotonic() - began < 20
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert "torch imported" not in head.marks


def test_seconds_are_counted_from_the_start_of_the_process() -> None:
    first = headstart.process_seconds()
    time.sleep(0.05)
    assert 0.04 < headstart.process_seconds() - first < 20


def test_what_a_fork_cannot_see_is_asked_of_a_process_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_backend.py").write_text(BACKEND)
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.syspath_prepend(tmp_path)  # the description's name takes in the module's file
    monkeypatch.setenv("DSL_BENCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    origin = Origin("backend", "toy", "toy_backend:BACKEND", "toy 1")
    with HeadStart() as head:
        head.nursery.open([origin])
        describer = catalog._Describer(lambda text: None, True, head.nursery)
        describer.foresee([origin])
        described = describer.describe(origin, ())
        describer.close()
        (zygote,) = head.nursery.zygotes()
        assert not zygote.reason
        assert zygote.told is not None
    assert described.backend is not None, described
    assert described.backend.ahead
    assert {name: t.ready for name, t in described.backend.targets.items()} == {
        "device": True,
        "interpret": True,
        "compile": True,
    }


def test_a_relative_cache_lies_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSL_BENCH_CACHE_DIR", "cache")
    assert catalog.cache_dir() == tmp_path / "cache"  # a worker whose plugin changes directory is told this


def test_what_killed_compiles_left_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BENCH_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "artifacts"
    for name in ("whole", ".key-new", ".key-old"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.cubin").touch()
    for name in ("whole", ".key-old"):
        os.utime(folder / name, (0, 0))
    catalog.require_cache()
    assert sorted(path.name for path in folder.iterdir()) == [".key-new", "whole"]
