"""What vendor libraries share as backends: nothing to compile, and torch tensors in and out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsl_bench.plugin import (
    Artifact,
    Availability,
    Backend,
    Call,
    Case,
    Config,
    Kernel,
    Needs,
    Static,
    Target,
)

Bind = Callable[[Any, Case, Config, Mapping[str, Any], Mapping[str, Any]], Call]


def version(package: str) -> str:
    """The installed version of a package, ``none`` where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def baseline(
    id: str,
    workload: str,
    bind: Bind,
    summary: str,
    valid: Callable[[Case, Config], str | None] | None = None,
    archs: tuple[str, ...] = (),
) -> Kernel:
    """A vendor kernel without a space: one call, chosen by the library itself."""
    refuse = valid or (lambda case, config: None)
    return Kernel(
        id=id,
        workload=workload,
        space={},
        default=lambda case: {},
        source=_no_source,
        bind=bind,
        valid=refuse,
        static=_no_static,
        needs=Needs(archs=archs),
        files=("_baseline.py",),
        summary=summary,
    )


def _no_source(static: Static, arch: str) -> str:
    return ""


def _no_static(case: Case, config: Config) -> Static:
    return {}


class Library(Backend):
    """A vendor library found by its package: ``package`` as the index names it, ``module`` as it imports."""

    role = "vendor"
    package = ""
    module = ""
    install = ""
    offers: tuple[Kernel, ...] = ()

    def probe(self, target: Target) -> Availability:
        """Ready where the package is installed and, but for ``compile``, torch sees a CUDA device."""
        if target == "interpret":
            return Availability(False, "vendor libraries have no interpreter")
        if importlib.util.find_spec(self.module) is None:
            return Availability(False, f"{self.package} is not installed", self.install)
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch (with CUDA)")
        if target == "compile":
            return Availability(True)
        return _cuda_through_torch()

    def kernels(self) -> Iterator[Kernel]:
        """The kernels this library is called with."""
        yield from self.offers

    def versions(self) -> dict[str, str]:
        """The library's version and torch's."""
        return {self.name: version(self.package), "torch": version("torch")}

    def compile(self, source: Any, arch: str, folder: Path) -> Artifact:
        """An empty artifact: there is nothing to compile."""
        return Artifact(folder)

    def load(self, artifact: Artifact) -> Any:
        """Nothing to load: ``bind`` calls the library."""
        return None


def _cuda_through_torch() -> Availability:
    try:
        import torch

        if torch.cuda.is_available():
            return Availability(True)
        built = torch.version.cuda
        reason = "torch sees no CUDA device" if built else "this torch was built without CUDA"
        return Availability(False, reason, "run on a machine with an NVIDIA GPU and its driver")
    except Exception as fault:
        return Availability(False, f"torch does not load: {fault}", "reinstall torch")
