"""Many kernels that are right and take their time: what the tests kill, and what fills their disks.

``--plugin tests/wrong_kernels/slow.py``, with the backend of tests/plugin_fixture importable. The environment
says how many (``SLOW_KERNELS``) and how many seconds a call takes (``SLOW_SECONDS``).
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from dsl_bench_numpyref import GEMM, NumpyRef

from dsl_bench.plugin import Artifact, Availability, Call, Case, Config, Kernel, Static, Target

SECONDS = float(os.environ.get("SLOW_SECONDS", "0.02"))


def source(static: Static, arch: str) -> int:
    """The block size."""
    return int(static["rows"])


def bind(module: Any, case: Case, config: Config, inputs: Any, outputs: Any) -> Call:
    """The fixture's kernel, after a while."""
    call = GEMM.bind(module, case, config, inputs, outputs)

    def run() -> None:
        time.sleep(SECONDS)
        call.run()

    return Call(run)


def hang(module: Any, case: Case, config: Config, inputs: Any, outputs: Any) -> Call:
    """Starts a program that would go on without it, and never comes back."""

    def run() -> None:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
        while True:
            pass

    return Call(run)


class SlowBackend(NumpyRef):
    """The fixture's backend, with a compiler that has nothing to do."""

    def probe(self, target: Target) -> Availability:
        """Ready for all but a device."""
        return Availability(target != "device", "" if target != "device" else "made for the host")

    def compile(self, source: Any, arch: str, folder: Path) -> Artifact:
        """An empty artifact, after a while."""
        time.sleep(SECONDS)
        return Artifact(folder)


def kernel(name: str, **changes: Any) -> Kernel:
    """The fixture's kernel under another name."""
    return dataclasses.replace(GEMM, id=f"numpyref/{name}", source=source, **changes)


BACKEND = SlowBackend()
KERNELS = (
    *(kernel(f"slow_{n:03}", bind=bind) for n in range(int(os.environ.get("SLOW_KERNELS", "20")))),
    kernel("hangs", bind=hang),
)
