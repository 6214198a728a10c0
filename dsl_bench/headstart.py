"""What a command starts before it knows what for: a process for each language, and the device worker.

Both import for seconds what will be needed whatever is read in the meantime: plugins, results, the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsl_bench import jobs, registry
from dsl_bench.errors import UsageError
from dsl_bench.nursery import Nursery
from dsl_bench.pool import Worker

#: longest silence of the device worker while it imports torch
IMPORT_SECONDS = 60.0


class HeadStart:
    """Processes of one command that outlive its phases; closed by ``with``, after whoever used them."""

    def __init__(self) -> None:
        self.nursery = Nursery()
        self.device = Worker("device", {"CUDA_MODULE_LOADING": "EAGER"})
        self.marks: dict[str, float] = {}
        self._warming: threading.Thread | None = None
        self._stop = threading.Event()

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def languages(self, names: Iterable[str]) -> None:
        """Start the processes of the installed backends with these names."""
        wanted = set(names)
        self.nursery.open(o for o in registry.origins() if o.kind == "backend" and o.name in wanted)

    def torch(self) -> None:
        """Have the device worker import torch, where there may be a GPU, without touching it."""
        if Path("/dev/nvidiactl").exists():
            self.warm(jobs.PreloadJob((), context=False), IMPORT_SECONDS, "torch imported")

    def warm(self, job: jobs.PreloadJob, deadline: float, then: str) -> None:
        """Have the device worker do ``job`` after what it does already, and note ``then``. Its process is
        started here: it dies with the calling thread."""
        before = self._warming
        if before is None:
            self.device.start()

        def work() -> None:
            if before is not None:
                before.join()
            if not self.device.alive:  # started from here, another would end with this thread
                return
            if self.device.run(job, deadline, stop=self._stop).done is not None:
                self.mark(then)

        self._warming = threading.Thread(target=work, daemon=True)
        self._warming.start()

    def settled(self) -> Worker:
        """The device worker, when it is free."""
        if self._warming is not None:
            self._warming.join()
        return self.device

    def mark(self, name: str) -> None:
        """Note that something happened for the first time, in seconds since the start of this process."""
        self.marks.setdefault(name, round(process_seconds(), 3))

    def latest(self, name: str) -> None:
        """Note that something happened, for the last time so far."""
        self.marks[name] = round(process_seconds(), 3)

    def timeline(self) -> dict[str, float]:
        """What was noted so far, in order, and when the languages were imported (or why no worker was forked
        from there)."""
        self.latest("finished")
        ago = process_seconds() - time.monotonic()
        for zygote in self.nursery.zygotes():
            if zygote.told is not None:
                what = f"no forks ({zygote.reason})" if zygote.reason else "imported"
                self.marks[f"{zygote.origin.name} {what}"] = round(zygote.told + ago, 3)
        return dict(sorted(self.marks.items(), key=lambda mark: mark[1]))

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        self.nursery.close()
        self.settled().kill()


@contextlib.contextmanager
def gpu_lock(uuid: str) -> Iterator[None]:
    """Hold the one lock of a GPU; it goes with the process that holds it."""
    path = Path(tempfile.gettempdir()) / f"dsl_bench-{uuid}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            file.seek(0)
            raise UsageError(
                f"GPU {uuid} is in use by another dsl-bench run (pid {file.read() or '?'})"
            ) from fault
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def process_seconds() -> float:
    """Wall time since this process was started, seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
