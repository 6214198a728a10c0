"""An example of a plugin: NumPy as a language, for the interpreter alone. Needs the plugin contract only.

The harness finds ``BACKEND`` through the entry point in pyproject.toml and imports it in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from dsl_bench.plugin import Availability, Backend, Call, Case, Config, Kernel, Static, Target


def _valid(case: Case, config: Config) -> str | None:
    return None if case.dtype == "fp16" else f"NumPy has no {case.dtype}"


def _source(static: Static, arch: str) -> int:
    return int(static["rows"])


def _bind(
    rows: int, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    a, b, c = inputs["a"].numpy(), inputs["b"].numpy(), outputs["c"].numpy()

    def run() -> None:
        for start in range(0, case["m"], rows):
            block = a[start : start + rows].astype(np.float32)
            c[start : start + rows] = (block @ b.astype(np.float32).T).astype(np.float16)

    return Call(run)


GEMM = Kernel(
    id="numpyref/gemm",
    workload="gemm",
    space={"rows": (16, 64)},
    default=lambda case: {"rows": 16},
    valid=_valid,
    source=_source,
    bind=_bind,
    summary="blocks of rows, accumulated in fp32",
)


class NumpyRef(Backend):
    """Runs kernels in this process, on the CPU."""

    name = "numpyref"

    def probe(self, target: Target) -> Availability:
        """Ready to interpret; NumPy has neither a compiler nor a device."""
        ready = target == "interpret"
        return Availability(ready, "" if ready else "NumPy runs on the CPU only")

    def kernels(self) -> Iterator[Kernel]:
        """The one kernel of this file."""
        yield GEMM

    def versions(self) -> dict[str, str]:
        """The version of NumPy."""
        return {"numpy": version("numpy")}

    def interpret(self, source: Any) -> Any:
        """The block size is all there is to it."""
        return source


BACKEND = NumpyRef()
