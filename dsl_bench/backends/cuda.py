"""The CUDA C++ backend: ``nvcc -cubin`` and launches through cuda.bindings.

``compile`` runs nvcc for a named target, so it needs no GPU; the host side of a kernel is its ``bind``.
``load`` gives a :class:`CudaModule`, whose ``launcher`` lays out the parameters once: a call then looks up
torch's current stream and calls ``cuLaunchKernelEx``, which can be captured in a graph. nvcc is taken from
``CUDA_HOME``, from ``PATH``, or from the wheels that ``dsl-bench[cuda]`` brings, in this order.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsl_bench.backends._host import probe_driver, tool_version
from dsl_bench.plugin import Artifact, Availability, Backend, KernelFault, Target

CUBIN = "kernel.cubin"
LOG = "ptxas.log"
_INSTALL = "pip install 'dsl-bench[cuda]'"
#: CUDA driver errors from here on leave the context unusable
_STICKY = 700


@dataclass(frozen=True)
class CudaSource:
    """One translation unit and what to make of it; kernels beside ``entry`` are for CudaModule.helper.

    ``file`` is the .cu file, ``entry`` its ``extern "C"`` kernel, ``defines`` its macros, ``flags`` further
    arguments of nvcc. ``smem`` (dynamic shared memory, bytes), ``threads`` (a block) and ``cluster`` (blocks
    along x, y, z) are what the launch needs to know of the binary."""

    file: Path
    entry: str
    defines: Mapping[str, int | str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    smem: int = 0
    threads: int = 128
    cluster: tuple[int, int, int] = (1, 1, 1)


class CudaModule:
    """A loaded kernel. ``sms`` is the number of SMs of its device.

    Parameters are passed as raw bytes in the kernel's order (a tensor map is 128 of them)."""

    def __init__(self, cubin: bytes, entry: str, meta: Mapping[str, Any]) -> None:
        import torch
        from cuda.bindings import driver

        device = torch.cuda.current_device()
        torch.cuda.current_stream(device).synchronize()  # torch's context is now the current one
        self.smem = int(meta["smem"])
        self.threads = int(meta["threads"])
        self.cluster: tuple[int, int, int] = tuple(meta["cluster"])
        self.sms = int(torch.cuda.get_device_properties(device).multi_processor_count)
        self._driver = driver
        self._device = device
        self._cubin = cubin
        self._module = ok(driver.cuModuleLoadData(cubin))
        self._function = self._find(entry)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(driver.cuFuncSetAttribute(self._function, limit, self.smem))
        self._scratch: dict[str, Any] = {}

    def _find(self, entry: str) -> Any:
        return ok(self._driver.cuModuleGetFunction(self._module, entry.encode()))

    def scratch(self, name: str, nbytes: int) -> Any:
        """Device memory that all calls of this module share (they run one after the other on one stream):
        zero when it is handed out first, and then as the kernel left it. Keep the tensor in ``Call.keep``:
        a later, larger request replaces it here."""
        import torch

        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            held = torch.zeros(max(nbytes, 16), dtype=torch.uint8, device=torch.device("cuda", self._device))
            self._scratch[name] = held
        return held

    def launcher(
        self, grid: Sequence[int], args: Sequence[bytes], *, dependent: bool = False
    ) -> Callable[[], None]:
        """The launch of this kernel on ``grid`` blocks with its own block, cluster and shared memory.

        ``dependent``: it may start while the kernel before it in the stream ends, and itself waits for it
        (programmatic dependent launch)."""
        config = self._config(_three(grid), (self.threads, 1, 1), self.cluster, self.smem, dependent)
        return self._prepare(self._function, config, args)

    def helper(
        self, entry: str, grid: Sequence[int], threads: int, args: Sequence[bytes]
    ) -> Callable[[], None]:
        """The launch of another kernel of the same file, without clusters and dynamic shared memory."""
        config = self._config(_three(grid), (threads, 1, 1), (1, 1, 1), 0, False)
        return self._prepare(self._find(entry), config, args)

    def _prepare(self, function: Any, config: Any, args: Sequence[bytes]) -> Callable[[], None]:
        import torch

        buffers = [ctypes.create_string_buffer(a, len(a)) for a in args]
        pointers = (ctypes.c_void_p * max(1, len(buffers)))(*(ctypes.addressof(b) for b in buffers))
        address = ctypes.addressof(pointers)
        start, device = self._driver.cuLaunchKernelEx, self._device
        current = torch._C._cuda_getCurrentRawStream
        last = -1

        def run() -> None:
            nonlocal last
            stream = current(device)
            if stream != last:
                config.hStream = stream
                last = stream
            status = start(config, function, address, 0)[0]
            if int(status):
                raise fault(status)

        run.keep = (buffers, pointers)  # type: ignore[attr-defined]
        return run

    def _config(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        smem: int,
        dependent: bool,
    ) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = smem
        attributes = []
        names = self._driver.CUlaunchAttributeID
        if cluster != (1, 1, 1):
            shape = self._driver.CUlaunchAttribute()
            shape.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = shape.value.clusterDim
            dims.x, dims.y, dims.z = cluster
            attributes.append(shape)
        if dependent:
            overlap = self._driver.CUlaunchAttribute()
            overlap.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class CudaBackend(Backend):
    """CUDA C++ as nvcc compiles it."""

    name = "cuda"
    kernel_package = "dsl_bench.kernels.cuda"

    def probe(self, target: Target) -> Availability:
        """Looks for nvcc, its host compiler, cuda.bindings and a GPU; imports none of them."""
        if target == "interpret":
            return Availability(False, "CUDA C++ has no interpreter", "the target compile needs no GPU")
        compiler = _probe_nvcc()
        if target == "compile" or not compiler.ready:
            return compiler
        return _probe_device()

    def versions(self) -> dict[str, str]:
        """nvcc's version, and that of the bindings that launch."""
        found = {}
        for name, get in (("nvcc", _nvcc_version), ("cuda-bindings", _bindings_version)):
            try:
                found[name] = get()
            except (
                KernelFault,
                OSError,
                subprocess.SubprocessError,
                importlib.metadata.PackageNotFoundError,
            ):
                found[name] = "none"
        return found

    def toolchain(self) -> str:
        """The compiler alone: the bindings launch a cubin, they do not change it."""
        return f"nvcc {_nvcc_version()}"

    def compile(self, source: CudaSource, arch: str, folder: Path) -> Artifact:
        """Compile into ``folder``: the cubin, the source and the assembler's log. Raises KernelFault
        ``compile_error`` with the compiler's first error."""
        text = _run_nvcc(source, arch, folder)
        (folder / LOG).write_text(text)
        shutil.copy(source.file, folder / source.file.name)
        meta = {
            "smem": source.smem,
            "threads": source.threads,
            "cluster": list(source.cluster),
            **ptxas_facts(text, source.entry),
        }
        return Artifact(folder, CUBIN, source.entry, f"ptxas {_nvcc_version()}", meta)

    def load(self, artifact: Artifact) -> CudaModule:
        """Load the cubin on torch's current device."""
        return CudaModule((artifact.folder / artifact.cubin).read_bytes(), artifact.entry, artifact.meta)


BACKEND = CudaBackend()


def ok(result: tuple[Any, ...]) -> Any:
    """What a driver call returned beside its status; raises KernelFault where that is an error."""
    if int(result[0]):
        raise fault(result[0])
    return result[1] if len(result) == 2 else result[1:]


def fault(status: Any) -> KernelFault:
    """The error of a driver call. Those that spoil the context say so, as torch's do: "CUDA error"."""
    code, name = int(status), getattr(status, "name", str(status))
    if code == 2:
        return KernelFault("oom", f"driver error {code}: {name}", "driver")
    if code in (700, 714, 715, 716, 717, 718):
        return KernelFault("illegal_access", f"CUDA error {code}: {name}", "driver")
    return KernelFault(
        "launch_error", f"{'CUDA' if code >= _STICKY else 'driver'} error {code}: {name}", "driver"
    )


def ptxas_facts(log: str, entry: str) -> dict[str, Any]:
    """Registers, spills (bytes) and performance advisories (``C7510``) of ``entry`` in ``ptxas -v``'s log."""
    part = log.partition(f"'{entry}'")[2]
    facts: dict[str, Any] = {}
    patterns = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    for name, pattern in patterns.items():
        found = re.search(pattern, part)
        if found:
            facts[name] = int(found.group(1))
    facts["advisories"] = sorted(set(re.findall(r"\((C7\d{3})\) Potential Performance Loss", log)))
    return facts


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
    return x, y, z


def nvcc_command(source: CudaSource, arch: str, folder: Path) -> list[str]:
    """The nvcc command line for ``source``. ``arch`` is a real architecture such as ``sm_90a``."""
    virtual = arch.replace("sm_", "compute_")
    return [
        str(_nvcc()),
        "-cubin",
        f"-gencode=arch={virtual},code={arch}",
        "-std=c++17",
        "-O3",
        "-Xptxas",
        "-v",
        *(f"-D{name}={value}" for name, value in sorted(source.defines.items())),
        *source.flags,
        "-o",
        str(folder / CUBIN),
        str(source.file),
    ]


def _run_nvcc(source: CudaSource, arch: str, folder: Path) -> str:
    """Run nvcc; returns its messages, those of ``ptxas -v`` among them."""
    done = subprocess.run(nvcc_command(source, arch, folder), capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        errors = [line for line in text.splitlines() if re.search(r"\b(error|fatal)\b", line)]
        reason = errors[0].strip() if errors else text.strip() or f"nvcc exited with {done.returncode}"
        raise KernelFault("compile_error", reason, "nvcc")
    return text


def _candidates() -> Iterator[Path]:
    """Where nvcc may lie, best first."""
    home = os.environ.get("CUDA_HOME")
    if home:
        yield Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations if spec else None) or ():
        yield Path(place) / "cu13" / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")


def _nvcc() -> Path:
    for path in _candidates():
        if os.access(path, os.X_OK):
            return path
    raise KernelFault("unavailable", "no nvcc in CUDA_HOME, on PATH or among the installed wheels")


def _nvcc_version() -> str:
    return tool_version(str(_nvcc()))


def _bindings_version() -> str:
    return importlib.metadata.version("cuda-bindings")


def _probe_nvcc() -> Availability:
    try:
        version = _nvcc_version()
    except (KernelFault, OSError, subprocess.SubprocessError) as problem:
        return Availability(False, str(problem), _INSTALL)
    if int(version.split(".")[0]) < 13:
        return Availability(False, f"nvcc {version} is older than 13.0", f"unset CUDA_HOME, or {_INSTALL}")
    if not any(shutil.which(c) for c in (os.environ.get("NVCC_CCBIN") or "g++", "g++", "gcc", "clang++")):
        return Availability(
            False, "no C++ compiler: nvcc preprocesses with one", "install g++, or set NVCC_CCBIN"
        )
    return Availability(True)


def _probe_device() -> Availability:
    for package, hint in (("torch", "pip install torch"), ("cuda.bindings", _INSTALL)):
        try:
            found = importlib.util.find_spec(package)
        except ImportError:
            found = None
        if found is None:
            return Availability(False, f"{package} is not installed", hint)
    return probe_driver("the target compile needs none")
