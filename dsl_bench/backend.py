"""The backend contract: a language (or a vendor library) behind one small interface.

A backend finds its toolchain (``probe``), lists its kernels, turns a kernel's source into an artifact
folder (``compile``, no GPU touched) and loads that folder on the device (``load``).
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsl_bench.kernel import Kernel

#: raised when a change breaks existing plugins
API_VERSION = 1

Target = Literal["device", "interpret", "compile"]


@dataclass(frozen=True)
class Availability:
    """Whether a backend can serve a target; when not, why, and what would help."""

    ready: bool
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Artifact:
    """A compiled specialisation: a folder that travels between processes.

    ``entry`` is the kernel's symbol in the cubin; ``cubin`` the file name of the device binary within the
    folder ("" where there is none); ``meta`` is JSON data that ``load`` needs again (shared memory,
    threads, …); ``assembler`` the version of what produced the SASS (``ptxas 12.8.93``).
    """

    folder: Path
    cubin: str = ""
    entry: str = ""
    assembler: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


class Backend:
    """Base class of all backends; every method but ``probe``, ``compile`` and ``load`` has a default."""

    api_version: int = API_VERSION
    name: str = ""
    #: ``language`` is compared; ``vendor`` is what it is compared with
    role: Literal["language", "vendor"] = "language"
    #: the package whose modules hold this backend's kernels, each ending in ``KERNELS = (Kernel(…), …)``
    kernel_package: str = ""
    #: modules that ``compile()`` imports: where named, they are imported once, in a process that sees no GPU
    #: and from which the compile workers are forked. For a language whose import starts no thread
    ahead: Sequence[str] = ()
    #: what the last ``kernels()`` had to leave out, a line each
    problems: Sequence[str] = ()

    def probe(self, target: Target) -> Availability:
        """Whether ``target`` works on this machine. Cheap; never raises."""
        raise NotImplementedError(f"{type(self).__name__} does not define probe()")

    def kernels(self) -> Iterator[Kernel]:
        """The kernels of this backend: by default, of every module in ``kernel_package``.

        A module that cannot be imported costs its own kernels only: it is noted in ``problems``."""
        problems: list[str] = []
        self.problems = problems
        if not self.kernel_package:
            return
        package = importlib.import_module(self.kernel_package)
        for info in pkgutil.iter_modules(package.__path__, self.kernel_package + "."):
            if info.name.rpartition(".")[2].startswith("_"):
                continue
            try:
                module = importlib.import_module(info.name)
            except (Exception, SystemExit) as fault:  # noqa: BLE001 (a kernel file may raise anything)
                problems.append(f"{info.name} is left out: {_reason(fault)}")
            else:
                yield from getattr(module, "KERNELS", ())

    def toolchain(self) -> str:
        """What the bytes of an artifact depend on beside source and arch (``triton 3.6.0, ptxas 12.8``)."""
        return ", ".join(f"{k} {v}" for k, v in sorted(self.versions().items()))

    def versions(self) -> dict[str, str]:
        """Versions shown with every result."""
        return {}

    def compile(self, source: Any, arch: str, folder: Path) -> Artifact:
        """Compile ``source`` (from ``Kernel.source``) for ``arch`` (``sm_90a``) into ``folder``.

        Raises any exception on failure; the text is kept as the reason."""
        raise NotImplementedError(f"{type(self).__name__} does not define compile()")

    def load(self, artifact: Artifact) -> Any:
        """The module that ``Kernel.bind`` receives, loaded on the current device."""
        raise NotImplementedError(f"{type(self).__name__} does not define load()")

    def interpret(self, source: Any) -> Any:
        """The module for the language's CPU interpreter (target ``interpret``)."""
        raise NotImplementedError(f"{self.name} has no interpreter")


def _reason(fault: BaseException) -> str:
    """One line: the exception, and the file and line that it comes from."""
    frames = traceback.extract_tb(fault.__traceback__)
    lines = str(fault).strip().splitlines()
    text = f"{type(fault).__name__}: {lines[0]}" if lines else type(fault).__name__
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text
