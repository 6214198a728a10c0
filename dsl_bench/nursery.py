"""Processes that have a language imported already, from which workers are forked: the parent's half.

Importing a language takes seconds, and a pool that does so in every process at once takes several times as
long. A nursery does it once a language, in a process with no thread but its own and with CUDA hidden; its
workers are processes of their own in every respect (group, deadline, log, death), ready in milliseconds.
Where a language does not lend itself to that, workers are started the long way. The other half is
``zygote.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from typing import IO, TypeVar

import msgspec

from dsl_bench.jobs import Origin

T = TypeVar("T")
#: seconds that a language's import may take before workers are started without it
IMPORT_SECONDS = 60.0
#: seconds for one answer of a process that forks
ANSWER_SECONDS = 10.0
#: what keeps an import from starting threads (of a linear algebra library) and from asking the CUDA driver
#: whether there is a GPU: neither survives a fork
FORKABLE = {
    "CUDA_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
#: roles whose workers see no GPU and may be forked
ROLES = ("describe", "compile")


def worker_env(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker process."""
    env = {**os.environ, **more, "DSL_BENCH_PARENT": str(os.getpid())}
    # a folder called triton or kernels where the command is run must not hide the package of that name:
    # not the working directory (-P), nor an empty entry of PYTHONPATH, which means the same
    path = filter(None, env.pop("PYTHONPATH", "").split(os.pathsep))
    return env | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


class Prepared(msgspec.Struct, frozen=True):
    """What a zygote says once: ready, or why it may not fork."""

    reason: str


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Ask for a worker; its stdin, stdout and log come along as file descriptors."""

    role: str
    env: dict[str, str]


class Poll(msgspec.Struct, frozen=True, tag="poll"):
    """Ask whether a worker has ended; once that was told, its process id may be another's."""

    pid: int


class Answer(msgspec.Struct, frozen=True):
    """The process id of a new worker; the exit code of one that has ended (below zero: the signal)."""

    pid: int = 0
    code: int | None = None


request_decoder = msgspec.json.Decoder(Fork | Poll)


class Forked:
    """A forked worker, as far as one started by subprocess would be used."""

    def __init__(self, zygote: Zygote, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self._zygote = zygote
        self._code: int | None = None
        #: whether it went with the process that it came from
        self.orphaned = False

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            answer = self._zygote.ask(Poll(self.pid))
            self.orphaned = answer is None
            self._code = -signal.SIGKILL if answer is None else answer.code
        return self._code

    def wait(self) -> int:
        """The exit code, when it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code


class Zygote:
    """One language's process. Workers may be asked for by several threads at once; they die with the thread
    that made this."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        #: why it cannot fork; empty where it can, and while that is open
        self.reason = ""
        #: when that was known, on the monotonic clock
        self.told: float | None = None
        self._lock = threading.Lock()
        self._fit: bool | None = None
        self._closed = threading.Event()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        env = worker_env(FORKABLE)
        command = [sys.executable, "-P", "-m", "dsl_bench.zygote", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=env,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._socket.send(msgspec.json.encode(origin))
        self._asked = time.monotonic()

    def fit(self, stop: threading.Event | None = None) -> bool:
        """Whether it can fork workers; waits until it knows, or is told to ``stop``."""
        with self._lock:
            while self._fit is None and not (stop is not None and stop.is_set()):
                if self._closed.is_set() or time.monotonic() - self._asked > IMPORT_SECONDS:
                    self._known("its import takes too long")
                    break
                self._socket.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    got = self._receive(Prepared)
                    self._known("its import ended the process" if got is None else got.reason)
            return bool(self._fit)

    def _known(self, reason: str) -> None:
        self._fit, self.reason, self.told = not reason, reason, time.monotonic()

    def fork(
        self, role: str, env: Mapping[str, str], log: IO[bytes], stop: threading.Event | None = None
    ) -> Forked | None:
        """A new worker; None where it has to be started the long way."""
        if role not in ROLES or not self.fit(stop):
            return None
        (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
        try:
            answer = self.ask(Fork(role, dict(env)), (their_in, their_out, log.fileno()))
        finally:
            os.close(their_in)
            os.close(their_out)
        if answer is None:
            os.close(our_out)
            os.close(our_in)
            return None
        return Forked(self, answer.pid, os.fdopen(our_out, "wb", 0), os.fdopen(our_in, "rb", 0))

    def ask(self, request: Fork | Poll, files: tuple[int, ...] = ()) -> Answer | None:
        """Its answer; None where there is none: then it is ended, and its workers with it."""
        with self._lock:
            if not self._fit:
                return None
            try:
                self._socket.settimeout(ANSWER_SECONDS)
                socket.send_fds(self._socket, [msgspec.json.encode(request)], list(files))
                answer = self._receive(Answer)
            except OSError:
                answer = None
            if answer is None:
                self._fit = False
                self._end()
            return answer

    def close(self) -> None:
        """End it and the workers that came from it."""
        self._closed.set()
        self._end()
        with self._lock:
            self._fit = False
            self._socket.close()
            self._log.close()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self, kind: type[T]) -> T | None:
        """The next message; None when the process is gone. TimeoutError where none came in time."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError:
            return None
        return msgspec.json.decode(data, type=kind) if data else None


class Nursery:
    """Every language's process of one command. Closed after the workers that came from it."""

    def __init__(self) -> None:
        self._zygotes: dict[Origin, Zygote] = {}

    def open(self, origins: Iterable[Origin]) -> None:
        """Start processes for these backends, where there are none yet. They die with the calling thread."""
        for origin in origins:
            if origin not in self._zygotes:
                self._zygotes[origin] = Zygote(origin)

    def of(self, origin: Origin) -> Zygote | None:
        """The process of a backend."""
        return self._zygotes.get(origin)

    def zygotes(self) -> list[Zygote]:
        """All of them."""
        return list(self._zygotes.values())

    def only(self) -> Zygote | None:
        """The one process there is: where a plugin that names no backend yet most likely belongs."""
        return self.zygotes()[0] if len(self._zygotes) == 1 else None

    def close(self) -> None:
        """End all of them."""
        for zygote in self.zygotes():
            zygote.close()
