"""The process that imports a language once and forks workers: ``python -m dsl_bench.zygote SOCKET``.

It has no thread beside its own and no GPU in sight, or it refuses to fork: a fork copies the calling thread
alone, with every lock as the others held it, and a CUDA context does not survive one.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from dsl_bench import registry, worker
from dsl_bench.artifacts import one_line
from dsl_bench.jobs import Origin
from dsl_bench.nursery import Answer, Fork, Prepared, request_decoder


def prepare(origin: Origin) -> str:
    """Import what the backend's compiler needs. Returns why this process may not fork, or an empty string."""
    try:
        ahead = registry.Shelf().backend(origin).ahead
        for name in ahead:
            importlib.import_module(name)
    except BaseException as fault:  # noqa: BLE001 (a plugin may raise anything)
        return one_line(fault)
    if not ahead:
        return "nothing to import ahead"
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return "its import starts threads"
    if any("/dev/nvidia" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir()):
        return "its import opens the GPU"
    return ""


def serve(control: socket.socket) -> None:
    """Fork workers and tell how they ended, until the parent is gone."""
    while True:
        data, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            return
        request = request_decoder.decode(data)
        if isinstance(request, Fork):
            us, pid = os.getpid(), os.fork()
            if pid == 0:
                control.close()
                _become_worker(request, files, us)
            os.setpgid(pid, pid)  # here as well: whoever hears of it may kill its group at once
            for file in files:
                os.close(file)
            answer = Answer(pid)
        else:
            answer = Answer(request.pid, _exit_code(request.pid))
        control.send(msgspec.json.encode(answer))


def _exit_code(pid: int) -> int | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else None


def _become_worker(request: Fork, files: list[int], parent: int) -> None:
    """Serve the role's jobs in this process, a fork; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.update(request.env)
        worker.main(request.role, parent)
        code = 0
    finally:
        os._exit(code)  # what the language registered for the end of its process was not meant for this one


def main(number: int) -> None:
    """Prepare, say so, serve."""
    worker.follow_parent(int(os.environ["DSL_BENCH_PARENT"]))
    worker.leave_nobody()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=number)
    reason = prepare(msgspec.json.decode(control.recv(1 << 16), type=Origin))
    control.send(msgspec.json.encode(Prepared(reason)))
    if not reason:
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, what forks share
        serve(control)


if __name__ == "__main__":
    main(int(sys.argv[1]))
