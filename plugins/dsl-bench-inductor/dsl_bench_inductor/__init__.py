"""torch.compile as a language of dsl_bench: plain PyTorch, compiled by Inductor with ``max_autotune``.

What is fair. Inductor's own code generation is timed and nothing else: products may be done by its Triton
templates and not by cuBLAS, which is what the others are compared with. Compiling and autotuning happen in
``bind``, outside the clock. The harness captures short kernels in graphs for all participants alike, so
Inductor's own use of CUDA graphs is off. Outputs are those that the harness gives, as for every language.

What is not. Inductor knows every size when it compiles, where other languages mostly serve all sizes with one
binary. It searches by itself: the spaces here are empty, and the shared tuner's budget does not bound it; its
seconds are booked as those of the first trial and not as compile seconds. The work around a call (guards, the
wrapper) is host time, which graphs hide. Where a template cannot write into the output, copying the result is
timed too. Codegen facts are not shown: there is no cubin before the device is there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dsl_bench.plugin import Artifact, Availability, Backend, Kernel, Target
from dsl_bench_inductor import attention, gemm
from dsl_bench_inductor.compiler import Compiled, Eager

__all__ = ["BACKEND", "Inductor"]


class Inductor(Backend):
    """Inductor of the installed torch."""

    name = "inductor"

    def probe(self, target: Target) -> Availability:
        """The device needs a GPU and Triton, the interpreter torch alone."""
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch")
        if target == "compile":
            return Availability(
                False,
                "torch.compile wants the device at hand: it compiles when a kernel is bound there",
                "run on a machine with an NVIDIA GPU",
            )
        return Availability(True) if target == "interpret" else _probe_device()

    def kernels(self) -> Iterator[Kernel]:
        """One kernel a workload."""
        yield from (*gemm.KERNELS, *attention.KERNELS)

    def versions(self) -> dict[str, str]:
        """torch, and the Triton that Inductor generates code for."""
        return {"torch": _version("torch"), "triton": _version("triton")}

    def compile(self, source: str, arch: str, folder: Path) -> Artifact:
        """An empty artifact: without the device there is nothing to compile."""
        return Artifact(folder)

    def load(self, artifact: Artifact) -> Compiled:
        """What ``bind`` compiles with; one for each case, so that none makes another compile again."""
        return Compiled()

    def interpret(self, source: str) -> Eager:
        """The captured graph on the CPU, operator by operator in float32: it shows that the formulation is
        right, not that the generated code is."""
        return Eager()


def _probe_device() -> Availability:
    try:
        import torch

        if not torch.cuda.is_available():
            reason = (
                "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
            )
            return Availability(False, reason, "run on a machine with an NVIDIA GPU and its driver")
    except Exception as fault:  # noqa: BLE001 (a broken torch may raise anything; probe never does)
        return Availability(False, f"torch does not load: {fault}", "reinstall torch")
    if importlib.util.find_spec("triton") is None:
        return Availability(
            False, "Inductor generates Triton code, and triton is not installed", "pip install triton"
        )
    return Availability(True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


BACKEND = Inductor()
