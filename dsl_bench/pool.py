"""Worker processes seen from the parent: each in its own process group, with a deadline for every step.

A worker that passes its deadline, or dies, is killed with its whole group and replaced; the job in flight
gets a verdict that names the step it was at. If the parent dies the kernel kills the workers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Literal

from dsl_bench import jobs
from dsl_bench.jobs import Done, Job, Partial, Progress, Refused
from dsl_bench.nursery import Forked, Nursery, Zygote, worker_env

Role = Literal["describe", "compile", "device", "interpret"]
#: seconds that a fresh worker may take beyond the deadline: the start of Python, and of torch where the
#: role needs it
START_SECONDS: dict[Role, float] = {"describe": 10.0, "compile": 60.0, "device": 60.0, "interpret": 60.0}
#: what the environment of a role's workers has beside ours. The C library then fills the memory that it gives
#: out with 0x7f, a very large number in every type: a kernel that relies on zeros there is found out
ROLE_ENV: dict[Role, dict[str, str]] = {"interpret": {"MALLOC_PERTURB_": str(0x7F ^ 0xFF)}}


@dataclass
class Outcome:
    """How a job ended: ``done``, or ``refused`` with a status; ``last`` is the step it was at."""

    done: Done | None = None
    refused: Refused | None = None
    last: Progress = field(default_factory=lambda: Progress("start"))
    died: bool = False
    #: whether the worker died because the process that it was forked from did
    orphaned: bool = False


class Worker:
    """One worker process and the job it is doing. Not shared between threads. It is forked from ``zygote``
    where there is one that can."""

    def __init__(self, role: Role, env: dict[str, str] | None = None, zygote: Zygote | None = None) -> None:
        self.role = role
        self._env = env or {}
        self._zygote = zygote
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._log: IO[bytes] | None = None
        self._buffer = b""
        self._fresh = False
        #: whether the last process was a fork, which sees no GPU
        self.forked = False

    def start(self, stop: threading.Event | None = None) -> None:
        """Start the process unless there is one. It dies with the *thread* that calls this: so a worker that
        several threads use is started by the one that outlives them."""
        if not self.alive:
            self._start(stop)

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.poll() is None

    def run(
        self,
        job: Job,
        deadline: float,
        on_reply: Callable[[Progress | Partial], None] = lambda reply: None,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Send ``job`` and wait; ``deadline`` is the longest silence in seconds between two replies.

        A fork that went with the process that it came from says nothing about the job: it is done again."""
        outcome = self._attempt(job, deadline, on_reply, stop)
        return self._attempt(job, deadline, on_reply, stop) if outcome.orphaned else outcome

    def _attempt(
        self,
        job: Job,
        deadline: float,
        on_reply: Callable[[Progress | Partial], None],
        stop: threading.Event | None,
    ) -> Outcome:
        outcome = Outcome()
        self.start(stop)
        if stop is not None and stop.is_set():
            return self._expired(outcome, deadline, stop)
        if not self._send(job):
            return self._died(outcome, deadline, stop)
        limit = time.monotonic() + deadline + (START_SECONDS[self.role] if self._fresh else 0.0)
        while True:
            line = self._read_line(limit, stop)
            if line is None:
                return self._expired(outcome, deadline, stop)
            if line == b"":
                return self._died(outcome, deadline, stop)
            self._fresh = False
            reply = jobs.reply_decoder.decode(line)
            limit = time.monotonic() + deadline
            if isinstance(reply, Done):
                outcome.done = reply
                return outcome
            if isinstance(reply, Refused):
                outcome.refused = reply
                if reply.fatal:
                    self.kill()
                return outcome
            if isinstance(reply, Progress):
                outcome.last = reply
            on_reply(reply)

    def kill(self) -> None:
        """End the worker and everything in its process group."""
        process, self._process = self._process, None
        if self._log is not None:
            self._log.close()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def log_tail(self, size: int = 2000) -> str:
        """The end of what the worker wrote to stderr."""
        if self._log is None or self._log.closed:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - size))
        return self._log.read().decode(errors="replace").strip()

    def _start(self, stop: threading.Event | None = None) -> None:
        self.kill()
        self._buffer = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self._fresh = True
        if self._zygote is not None:
            self._process = self._zygote.fork(self.role, self._env, self._log, stop)
        self.forked = self._process is not None
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dsl_bench.worker", self.role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=worker_env({**ROLE_ENV.get(self.role, {}), **self._env}),
                start_new_session=True,
                bufsize=0,
            )

    def _send(self, job: Job) -> bool:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(jobs.encoder.encode(job) + b"\n")
        except OSError:
            return False
        return True

    def _read_line(self, limit: float, stop: threading.Event | None) -> bytes | None:
        """The next line; None past the limit or when stopped; empty when the worker is gone."""
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = limit - time.monotonic()
                if left <= 0 or (stop is not None and stop.is_set()):
                    return None
                if not selector.select(min(left, 0.2)):
                    continue
                chunk = os.read(stream.fileno(), 1 << 20)
                if not chunk:
                    return b""
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _expired(self, outcome: Outcome, deadline: float, stop: threading.Event | None) -> Outcome:
        stopped = stop is not None and stop.is_set()
        self.kill()
        outcome.died = True
        reason = "stopped" if stopped else f"no answer for {deadline:.0f} s at {outcome.last.stage!r}; killed"
        status = "compile_timeout" if self.role == "compile" else "hang"
        outcome.refused = Refused(status, reason, check="interrupt" if stopped else "deadline")
        return outcome

    def _died(self, outcome: Outcome, deadline: float, stop: threading.Event | None) -> Outcome:
        if stop is not None and stop.is_set():
            # it went with the process that it came from, before we looked: no word about the job
            return self._expired(outcome, deadline, stop)
        tail = self.log_tail()
        code = self._process.wait() if self._process is not None else None
        outcome.orphaned = isinstance(self._process, Forked) and self._process.orphaned
        self.kill()
        outcome.died = True
        last = tail.splitlines()[-1] if tail else "no message"
        status = "compile_error" if self.role == "compile" else "launch_error"
        reason = f"the worker died ({_exit_words(code)}) at {outcome.last.stage!r}: {last}"
        outcome.refused = Refused(status, reason, check="process", traceback=tail)
        return outcome


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


class Pool:
    """N workers of one role behind a queue; each result is delivered to a callback in a pool thread. A job's
    backend that has a process in ``nursery`` gets workers from there."""

    def __init__(
        self, role: Role, size: int, env: dict[str, str] | None = None, nursery: Nursery | None = None
    ) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Job | None, float, Callable[[Outcome], None]]] = (
            queue.PriorityQueue()
        )
        self._stop = threading.Event()
        self._count = 0
        self._role: Role = role
        self._env = env
        self._nursery = nursery or Nursery()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(size)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, deadline: float, done: Callable[[Outcome], None], priority: int = 0) -> None:
        """Queue ``job``; lower ``priority`` first, then in order of submission."""
        self._count += 1
        self._queue.put((priority, self._count, job, deadline, done))

    def stop(self) -> None:
        """Drop what is queued and under way; to be closed afterwards."""
        self._stop.set()

    def close(self) -> None:
        """Drop what is queued, end the workers and wait for the threads."""
        self._stop.set()
        for _ in self._threads:
            self._count += 1
            self._queue.put((-1, self._count, None, 0.0, lambda outcome: None))
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        workers: dict[Zygote | None, Worker] = {}
        try:
            while not self._stop.is_set():
                _, _, job, deadline, done = self._queue.get()
                if job is None:
                    break
                zygote = self._zygote_of(job)
                worker = workers.setdefault(zygote, Worker(self._role, self._env, zygote))
                done(self._run(worker, job, deadline))
        finally:
            for worker in workers.values():
                worker.kill()

    def _run(self, worker: Worker, job: Job, deadline: float) -> Outcome:
        """The job's outcome. In a thread nobody would hear of an error, and wait for ever."""
        try:
            return worker.run(job, deadline, stop=self._stop)
        except OSError as fault:
            reason = f"no worker process can be started: {fault.strerror or fault}"
            return Outcome(refused=Refused("launch_error", reason, check="start"))

    def _zygote_of(self, job: Job) -> Zygote | None:
        """The process that has the job's language; None, and so one worker for them all, where none can."""
        origins = [job.backend] if isinstance(job, jobs.CompileJob) else []
        origins += job.backends[:1] if isinstance(job, jobs.PreloadJob) else []
        found = [self._nursery.of(origin) for origin in origins]
        return next((z for z in found if z is not None and z.fit(self._stop)), None)
