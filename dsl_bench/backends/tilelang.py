"""The TileLang backend: prim_funcs compiled ahead of time, started through TileLang's own tvm-ffi executable.

``compile`` runs the stock compiler for a named target, so it needs no GPU, and exports each function as
TileLang would ship it: a shared library with the generated C host code and the cubin inside. ``load`` opens
that library with TileLang's runtime; nothing is compiled again and TileLang's kernel cache is not asked. A
launch is what a user pays without the Python adapter around it: the host code checks every tensor (dtype,
shape, stride, device), encodes one tensor map for each TMA operand and launches on torch's current stream,
which tvm-ffi reads through the exchange API of the torch tensors it is given. It allocates nothing, so it can
be captured in a graph.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsl_bench.backends._host import probe_driver, tool_version
from dsl_bench.plugin import Artifact, Availability, Backend, KernelFault, Target

_NAME = "kernel"
_INSTALL = "pip install 'dsl-bench[tilelang]'"
_TOOLKIT = "install the CUDA toolkit or the nvidia-cuda-nvcc wheels, or set CUDA_HOME"


@dataclass(frozen=True)
class TilelangSource:
    """A function that builds a prim_func, its arguments, and the compiler's pass configuration.

    ``build(**args)`` runs in the compiling process. ``passes`` are keys of ``tilelang.PassConfigKey``
    (``{"tl.disable_warp_specialized": True}``). ``extra`` holds further functions that the kernel launches;
    facts are read from the first.
    """

    build: Callable[..., Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    passes: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[TilelangSource, ...] = ()


class TilelangModule:
    """A loaded function: ``launcher(*args)`` binds tensors and integers in the prim_func's order, calling
    that launches. ``sms`` is the device's number of SMs; ``extra`` the modules of the further functions."""

    def __init__(self, library: Any, meta: Mapping[str, Any], extra: tuple[TilelangModule, ...] = ()) -> None:
        import torch

        self.extra = extra
        self.sms = int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
        self._library = library  # owns the code that the function below points into
        self._call = library.get_function(meta["symbol"])

    def launcher(self, *args: Any) -> Callable[[], None]:
        """The launch with these arguments (torch tensors, integers)."""
        return functools.partial(self._call, *args)

    def launch(self, *args: Any) -> None:
        """Launch at once."""
        self._call(*args)


class TilelangBackend(Backend):
    """TileLang, as installed, with the nvcc that it finds itself (CUDA_HOME, PATH, NVIDIA's wheels)."""

    name = "tilelang"
    kernel_package = "dsl_bench.kernels.tilelang"
    ahead = ("tilelang", "tilelang.jit.kernel")

    def probe(self, target: Target) -> Availability:
        """Looks for TileLang, nvcc, a C compiler and a GPU, without importing TileLang or torch."""
        if not sys.platform.startswith("linux"):
            return Availability(False, "TileLang's CUDA target is built for Linux only")
        for package in ("tilelang", "torch"):  # TileLang imports torch, whatever the target
            if importlib.util.find_spec(package) is None:
                return Availability(False, f"{package} is not installed", _INSTALL)
        if target == "interpret":
            return Availability(False, "TileLang has no interpreter", "use --target compile")
        return _probe_compiler() if target == "compile" else _probe_device()

    def versions(self) -> dict[str, str]:
        """TileLang's version, that of tvm-ffi, and that of nvcc (whose ptxas makes the SASS)."""
        found = {name: importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")}
        return {**found, "nvcc": _nvcc_version()}

    def compile(self, source: TilelangSource, arch: str, folder: Path) -> Artifact:
        """Compile every function of ``source``; the first's files lie in ``folder``, the others' below it.

        Raises whatever TileLang or nvcc raises, and KernelFault where no cubin came out. A compiler that
        aborts takes the process with it: the runner calls this in a worker."""
        for i, extra in enumerate(source.extra):
            _compile_shared(extra, arch, folder / f"extra{i}")
        meta = _compile_one(source, arch, folder)
        meta["extra"] = len(source.extra)
        return Artifact(folder, f"{_NAME}.cubin", meta["entry"], f"ptxas {_nvcc_version()}", meta)

    def load(self, artifact: Artifact) -> TilelangModule:
        """Open the libraries; the driver loads the cubins at the first launch."""
        count = int(artifact.meta.get("extra", 0))
        return _load_one(
            artifact.folder, tuple(_load_one(artifact.folder / f"extra{i}") for i in range(count))
        )


BACKEND = TilelangBackend()


@contextlib.contextmanager
def _settings(cache: Path) -> Iterator[None]:
    """TileLang's environment for one compilation: its cache of device binaries goes into ``cache``, which
    starts empty, so that an earlier result is never taken and the cubin can be picked up there."""
    values = {
        "TILELANG_CACHE_DIR": str(cache),
        "TILELANG_DISABLE_CACHE": "0",
        "TILELANG_PRINT_ON_COMPILATION": "0",
    }
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(cache, ignore_errors=True)


#: files of the further functions that this process has compiled, by all that decides them: the configs of a
#: kernel mostly share theirs, and one takes 4 to 10 s
_shared: dict[str, dict[str, bytes]] = {}


def _compile_shared(source: TilelangSource, arch: str, folder: Path) -> None:
    """Compile one further function into ``folder``, or write once more what it came to in this process."""
    args, passes = sorted(source.args.items()), sorted(source.passes.items())
    key = repr((source.build.__module__, source.build.__qualname__, args, passes, arch))
    if key not in _shared:
        _compile_one(source, arch, folder)
        _shared[key] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _shared[key].items():
        (folder / name).write_bytes(content)


def _compile_one(source: TilelangSource, arch: str, folder: Path) -> dict[str, Any]:
    """Compile one function into ``folder`` and return its manifest."""
    from tilelang.jit.kernel import JITKernel

    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    with _settings(cache):
        function = source.build(**source.args)
        # JITKernel is what tilelang.compile returns; made directly, it passes the cache of whole kernels by
        built = JITKernel(
            function,
            target={"kind": "cuda", "arch": arch},
            execution_backend="tvm_ffi",
            pass_configs=dict(source.passes),
        )
        cubins = sorted(cache.glob("*/cuda-binaries/*/kernel.cubin"))
        if len(cubins) != 1:
            raise KernelFault("compile_error", f"{len(cubins)} cubins came out of one prim_func", "artifact")
        shutil.copyfile(cubins[0], folder / f"{_NAME}.cubin")
        return _store(built, folder)


def _store(built: Any, folder: Path) -> dict[str, Any]:
    """Write library, generated sources and manifest."""
    artifact = built.artifact
    artifact.rt_mod.export_library(str(folder / f"{_NAME}.so"))
    (folder / f"{_NAME}.cu").write_text(artifact.kernel_source)
    (folder / "host.c").write_text(built.adapter.get_host_source())
    meta = {
        "symbol": str(built.prim_func.attrs["global_symbol"]),
        **_launch_facts(artifact.kernel_source, artifact.device_mod),
    }
    (folder / "manifest.json").write_text(json.dumps(meta))
    return meta


def _launch_facts(text: str, device_mod: Any) -> dict[str, Any]:
    """Entry, threads a block and dynamic shared memory (bytes) of the first kernel in the source."""
    found = re.search(r"__launch_bounds__\((\d+)[^)]*\)\s+(\w+)\(", text)
    if found is None:
        raise KernelFault("compile_error", "no __global__ function in the generated source", "artifact")
    lowered = {name.name_hint: function for name, function in device_mod.functions.items()}
    smem = int(lowered[found.group(2)].attrs.get("dyn_shared_memory_buf", 0))
    return {"entry": found.group(2), "threads": int(found.group(1)), "smem": smem}


def _load_one(folder: Path, extra: tuple[TilelangModule, ...] = ()) -> TilelangModule:
    import tilelang  # noqa: F401  registers the loader of CUDA modules and the runtime the host code calls
    from tilelang import tvm

    meta = json.loads((folder / "manifest.json").read_text())
    return TilelangModule(tvm.runtime.load_module(str(folder / f"{_NAME}.so")), meta, extra)


def _nvcc() -> Path:
    """The nvcc that TileLang will run, found as TileLang finds it but without importing it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    spec = importlib.util.find_spec("nvidia")
    wheels = (
        [Path(root) / "cu13" / "bin" / "nvcc" for root in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    given = [Path(home) / "bin" / "nvcc"] if home else []
    found = [*given, *([Path(on_path)] if on_path else []), *wheels, Path("/usr/local/cuda/bin/nvcc")]
    # a CUDA_HOME without nvcc is an error, as it is for TileLang: another toolkit is not taken in its place
    for path in given or found:
        if os.access(path, os.X_OK):
            return path
    raise KernelFault("unavailable", f"no nvcc at {given[0]} (CUDA_HOME)" if given else "no nvcc was found")


def _nvcc_version() -> str:
    return tool_version(str(_nvcc()))


def _probe_compiler() -> Availability:
    try:
        version = _nvcc_version()
    except (KernelFault, OSError, subprocess.SubprocessError) as fault:
        return Availability(False, str(fault), _TOOLKIT)
    if tuple(int(n) for n in version.split(".")[:2]) < (12, 4):
        return Availability(False, f"nvcc {version} is too old for TileLang's Hopper templates", _TOOLKIT)
    if not any(shutil.which(c) for c in (os.environ.get("CXX") or "g++", "gcc", "cc")):
        return Availability(False, "no C compiler: TileLang's host code is compiled with one", "install gcc")
    return Availability(True)


def _probe_device() -> Availability:
    """A usable driver with a device, and the compiler whose version names the toolchain."""
    compiler = _probe_compiler()
    if not compiler.ready:
        return compiler
    return probe_driver("the compile target needs none")
