"""The vendor's kernels as a backend: what the languages are compared with. Nothing is compiled here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsl_bench.backends import _cublaslt
from dsl_bench.plugin import (
    Artifact,
    Availability,
    Backend,
    Call,
    Case,
    Config,
    Kernel,
    KernelFault,
    Static,
    Target,
)

#: places in the heuristic's list that the tuner tries
ALGORITHMS = 16


def _no_source(static: Static, arch: str) -> str:
    return ""


def _no_static(case: Case, config: Config) -> Static:
    return {}


def _bind_cublas(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """torch.mm into ``c``: the algorithm is cuBLAS's own pick, the workspace torch's."""
    import torch

    a, b, c = inputs["a"], inputs["b"].t(), outputs["c"]

    def run() -> None:
        torch.mm(a, b, out=c)

    return Call(run, keep=(a, b, c))


def _bind_cublaslt(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The heuristic's algorithm number ``algo``; KernelFault ``invalid_config`` beyond its list."""
    import torch

    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    plan = module.plan(a, b, c, module.workspace(a.device))
    found = module.heuristics(plan)
    index = int(config["algo"])
    if index >= len(found):
        reason = f"the heuristic offers {len(found)} algorithms for {case.name}; there is no number {index}"
        raise KernelFault("invalid_config", reason, "heuristic")

    def stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    run = module.runner(plan, found[index], stream)
    return Call(run, keep=(plan, a, b, c))


CUBLAS = Kernel(
    id="vendor/cublas",
    workload="gemm",
    space={},
    default=lambda case: {},
    source=_no_source,
    bind=_bind_cublas,
    static=_no_static,
    summary="cuBLAS as torch.mm calls it",
)

CUBLASLT = Kernel(
    id="vendor/cublaslt",
    workload="gemm",
    space={"algo": tuple(range(ALGORITHMS))},
    default=lambda case: {"algo": 0},
    # the heuristic ranks them: its order is the one to try them in
    seeds=lambda case: tuple({"algo": k} for k in range(1, ALGORITHMS)),
    source=_no_source,
    bind=_bind_cublaslt,
    static=_no_static,
    files=("_cublaslt.py",),
    summary="cublasLt, its heuristic's algorithms tuned by the same tuner",
)

KERNELS = (CUBLAS, CUBLASLT)


class VendorBackend(Backend):
    """cuBLAS and cublasLt of the installed torch."""

    name = "vendor"
    role = "vendor"

    def probe(self, target: Target) -> Availability:
        """Ready on a CUDA device through torch; artifacts are empty, so ``compile`` is ready everywhere."""
        if target == "compile":
            return Availability(True)
        if target == "interpret":
            return Availability(False, "vendor libraries have no interpreter")
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch (with CUDA)")
        try:
            import torch

            if not torch.cuda.is_available():
                built = torch.version.cuda
                reason = "torch sees no CUDA device" if built else "this torch was built without CUDA"
                return Availability(False, reason, "run on a machine with an NVIDIA GPU and its driver")
        except Exception as fault:
            return Availability(False, f"torch does not load: {fault}", "reinstall torch")
        return Availability(True)

    def kernels(self) -> Iterator[Kernel]:
        """The kernels of this module."""
        yield from KERNELS

    def versions(self) -> dict[str, str]:
        """torch, cuBLAS, and whether torch lets bf16 and fp16 products reduce in their own precision."""
        found = {"torch": _version("torch"), "cublas": _cublas_version()}
        with contextlib.suppress(ImportError):
            import torch

            flags = torch.backends.cuda.matmul
            found["bf16_reduced_precision_reduction"] = str(flags.allow_bf16_reduced_precision_reduction)
            found["fp16_reduced_precision_reduction"] = str(flags.allow_fp16_reduced_precision_reduction)
        return found

    def toolchain(self) -> str:
        """What a baseline's speed depends on; the same in every process, with and without a GPU."""
        return f"cublas {_cublas_version()}, torch {_version('torch')}"

    def compile(self, source: Any, arch: str, folder: Path) -> Artifact:
        """An empty artifact: there is nothing to compile."""
        return Artifact(folder)

    def load(self, artifact: Artifact) -> _cublaslt.CublasLt:
        """cublasLt with its handle (``vendor/cublas`` needs none of it, but shares the library)."""
        return _cublaslt.library()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cublas_version() -> str:
    try:
        return _cublaslt.library().version
    except KernelFault:
        return "none"


BACKEND = VendorBackend()
