"""The Triton backend: ``@triton.jit`` functions compiled ahead of time and started by Triton's own launcher.

``compile`` runs the stock compiler for a named target, so it needs no GPU, and keeps the cubin with Triton's
metadata. ``load`` hands these two to Triton's ``CompiledKernel``: nothing is compiled again but the launcher,
a small C extension that Triton 3.6 builds once a signature (a C compiler is needed for it) and caches under
``TRITON_CACHE_DIR``. A launch is what a user pays without the dispatch of ``fn[grid](…)``: the arguments are
bound before, and each call encodes one tensor map a descriptor (a few µs each) and calls ``cuLaunchKernelEx``
on torch's current stream. It allocates nothing, so it can be captured in a graph.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsl_bench.backends._host import probe_driver, tool_version
from dsl_bench.plugin import Artifact, Availability, Backend, KernelFault, Target

_NAME = "kernel"
_INSTALL = "pip install 'dsl-bench[triton]'"


@dataclass(frozen=True)
class TritonSource:
    """A jitted function with all that its binary depends on.

    ``signature`` types the runtime parameters (``*bf16``, ``i32``, ``tensordesc<bf16[128,64]>``) and
    ``constexprs`` gives the others. ``attrs`` promises divisors (``{"n": 16}``): Triton's own launcher would
    find them out from the values, a binary that serves all shapes must be told. ``options`` are the
    compiler's (``num_warps``, ``num_stages``, ``maxnreg``). ``extra`` holds further functions that the kernel
    launches; facts are read from the first.

    ``gluon``: ``fn`` is a ``@gluon.jit`` function. Its descriptors name their layout as well
    (``tensordesc<bf16[128,64],{layout!r}>``) and are bound as Gluon's ``TensorDescriptor``. ``cluster`` > 1
    starts the blocks in clusters of that many, each compiled as a block of its own (``num_ctas`` stays 1):
    the code itself has to know its rank. The grid then counts clusters. ``boxes`` gives the box of a
    descriptor's tensor map where its sides are no powers of two, as Triton wants them in ``signature``: for
    descriptors that only the code's own PTX loads by.
    """

    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[TritonSource, ...] = ()
    gluon: bool = False
    cluster: int = 1
    boxes: Mapping[str, Sequence[int]] = field(default_factory=dict)


class TritonModule:
    """A loaded function: ``launcher(grid, *args)`` binds the runtime arguments, calling that launches.

    ``sms`` is the number of SMs of the device, ``blocks_per_sm`` how many blocks of this function fit on one;
    ``extra`` holds the modules of the source's further functions.
    """

    def __init__(self, kernel: Any, meta: Mapping[str, Any], extra: tuple[TritonModule, ...] = ()) -> None:
        import torch

        self.extra = extra
        self.threads = int(meta["threads"])
        self.smem = int(meta["smem"])
        self.sms = int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
        self._params: list[tuple[str, str]] = [(name, kind) for name, kind in meta["params"]]
        self._kernel = kernel
        _ = kernel.run  # loads the cubin on the current device and builds the launcher
        self.registers = int(kernel.n_regs)

    @property
    def blocks_per_sm(self) -> int:
        """By registers (64 Ki, granted by 8 a thread), shared memory (228 KiB, 1 KiB a block) and threads."""
        registers = -(-self.registers // 8) * 8 * self.threads
        return max(1, min(65536 // registers, 233472 // (self.smem + 1024), 2048 // self.threads))

    def launcher(self, grid: Sequence[int], *args: Any) -> Callable[[], None]:
        """The launch of this function on ``grid`` (1 to 3 sizes) with its runtime arguments in order."""
        run = self._kernel[_grid3(grid)]
        return functools.partial(run, *_interleave(self._params, args, {}))

    def launch(self, grid: Sequence[int], *args: Any) -> None:
        """Bind and launch at once."""
        self.launcher(grid, *args)()


class InterpretedModule:
    """The same interface on CPU tensors, through Triton's interpreter; programs run one after the other."""

    sms = 4
    blocks_per_sm = 1

    def __init__(self, source: TritonSource) -> None:
        self.extra = tuple(InterpretedModule(s) for s in source.extra)
        self._fn = source.fn
        self._constexprs = dict(source.constexprs)
        self._params = _params(source)

    def launcher(self, grid: Sequence[int], *args: Any) -> Callable[[], None]:
        """The launch of this function on ``grid`` with its runtime arguments in order."""
        run = self._fn[_grid3(grid)]
        return functools.partial(run, *_interleave(self._params, args, self._constexprs))

    def launch(self, grid: Sequence[int], *args: Any) -> None:
        """Bind and launch at once."""
        self.launcher(grid, *args)()


class TritonBackend(Backend):
    """Triton, as installed; ``TRITON_PTXAS_PATH`` chooses another assembler, as it does for Triton itself."""

    name = "triton"
    kernel_package = "dsl_bench.kernels.triton"
    ahead = ("triton", "triton.language", "triton.compiler", "triton.backends.nvidia.compiler")

    def probe(self, target: Target) -> Availability:
        """Looks for Triton, its assembler, a C compiler and a GPU, without importing Triton or torch."""
        if not sys.platform.startswith("linux"):
            return Availability(False, "Triton runs on Linux only")
        if importlib.util.find_spec("triton") is None:
            return Availability(False, "triton is not installed", _INSTALL)
        if target == "compile":
            return _probe_ptxas()
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch")
        return _probe_interpreter() if target == "interpret" else _probe_device()

    def versions(self) -> dict[str, str]:
        """Triton's version, and that of the assembler it will run."""
        return {"triton": importlib.metadata.version("triton"), "ptxas": _ptxas_version()}

    def compile(self, source: TritonSource, arch: str, folder: Path) -> Artifact:
        """Compile every function of ``source``; the first's files lie in ``folder``, the others' below it.

        Raises KernelFault for a function that wants launch scratch, and whatever the compiler raises. A
        compiler that aborts takes the process with it: the runner calls this in a worker."""
        assembler = f"ptxas {_ptxas_version()}"
        for i, extra in enumerate(source.extra):
            _compile_one(extra, arch, folder / f"extra{i}")
        meta = _compile_one(source, arch, folder)
        meta["extra"] = len(source.extra)
        return Artifact(folder, f"{_NAME}.cubin", meta["entry"], assembler, meta)

    def load(self, artifact: Artifact) -> TritonModule:
        """Load the cubins on the current device."""
        if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
            raise KernelFault("unavailable", "TRITON_INTERPRET is set: this process can only interpret")
        count = int(artifact.meta.get("extra", 0))
        extra = tuple(_load_one(artifact.folder / f"extra{i}") for i in range(count))
        return _load_one(artifact.folder, extra)

    def interpret(self, source: TritonSource) -> InterpretedModule:
        """The function in Triton's interpreter. fp16 and fp32 only: it multiplies bf16 as integers."""
        if any(s.gluon for s in (source, *source.extra)):
            raise KernelFault("unavailable", "Triton's interpreter does not run Gluon")
        if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
            raise KernelFault("unavailable", "TRITON_INTERPRET=1 must be set before Triton is imported")
        if any("bf16" in kind for s in (source, *source.extra) for kind in s.signature.values()):
            raise KernelFault("unavailable", "Triton's interpreter multiplies bf16 as integers: use fp16")
        return InterpretedModule(source)


BACKEND = TritonBackend()


def _grid3(grid: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*(int(n) for n in grid), 1, 1)[:3]
    return x, y, z


def _params(source: TritonSource) -> list[tuple[str, str]]:
    """Every parameter in order with its type, ``constexpr`` for those that are baked in."""
    names = list(source.fn.arg_names)
    unknown = (set(source.signature) | set(source.constexprs)) - set(names)
    missing = [n for n in names if n not in source.signature and n not in source.constexprs]
    if unknown or missing:
        raise ValueError(f"{source.fn.__name__}: unknown {sorted(unknown)}, missing {missing}")
    return [(n, "constexpr" if n in source.constexprs else source.signature[n]) for n in names]


def _interleave(params: list[tuple[str, str]], args: Sequence[Any], baked: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the parameters; the launcher ignores what stands for a constexpr."""
    given = [name for name, kind in params if kind != "constexpr"]
    if len(given) != len(args):
        raise TypeError(f"takes {len(given)} arguments ({', '.join(given)}), got {len(args)}")
    values = dict(zip(given, args, strict=True))
    return [values[name] if name in values else baked.get(name) for name, _ in params]


def _compile_one(source: TritonSource, arch: str, folder: Path) -> dict[str, Any]:
    """Compile one function into ``folder`` and return its manifest."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    params = _params(source)
    index = {name: i for i, (name, _) in enumerate(params)}
    ast = _ast_source(source.gluon)(
        fn=source.fn,
        signature=dict(params),
        constexprs={(index[n],): v for n, v in source.constexprs.items()},
        attrs={(index[n],): [["tt.divisibility", d]] for n, d in source.attrs.items()},
    )
    target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), 32)
    cache = folder / "cache"
    cache.mkdir(parents=True)
    try:
        with knobs.cache.scope():
            knobs.cache.dir = str(cache)
            built = triton.compile(ast, target=target, options=dict(source.options))
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return _store(built, params, source, folder)


def _ast_source(gluon: bool) -> Any:
    """The class that describes a function to the compiler."""
    if not gluon:
        from triton.compiler import ASTSource

        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _store(built: Any, params: list[tuple[str, str]], source: TritonSource, folder: Path) -> dict[str, Any]:
    """Write cubin, PTX, TTGIR, Triton's metadata and our manifest. The launcher takes the size of a cluster
    and the boxes of tensor maps from Triton's metadata."""
    triton_meta = built.metadata._asdict()
    if source.cluster > 1:
        triton_meta["num_ctas"] = source.cluster
    if source.boxes:
        names = [name for name, kind in params if kind.startswith("tensordesc")]
        boxes = zip(names, triton_meta["tensordesc_meta"], strict=True)
        triton_meta["tensordesc_meta"] = [
            {**meta, "block_size": list(source.boxes.get(name, meta["block_size"]))} for name, meta in boxes
        ]
    if triton_meta.get("global_scratch_size"):
        raise KernelFault(
            "compile_error",
            f"{triton_meta['name']} wants {triton_meta['global_scratch_size']} bytes of scratch a launch "
            "(tensor descriptors made on the device?): run() must not allocate, pass host descriptors",
        )
    (folder / f"{_NAME}.cubin").write_bytes(built.asm["cubin"])
    for stage in ("ptx", "ttgir"):
        (folder / f"{_NAME}.{stage}").write_text(built.asm[stage])
    (folder / f"{_NAME}.json").write_text(json.dumps(triton_meta, default=vars))
    meta = {
        "entry": triton_meta["name"],
        "threads": int(triton_meta["num_warps"]) * 32,
        "smem": int(triton_meta["shared"]),
        "params": [list(p) for p in params],
        "hash": built.hash,
    }
    (folder / "manifest.json").write_text(json.dumps(meta))
    return meta


def _load_one(folder: Path, extra: tuple[TritonModule, ...] = ()) -> TritonModule:
    """A ``CompiledKernel`` made from the stored files. It asks its source for names and types only, so a
    stand-in serves and the kernel's file need not be imported."""
    from triton.compiler import CompiledKernel

    meta = json.loads((folder / "manifest.json").read_text())
    source = SimpleNamespace(
        fn=SimpleNamespace(arg_names=[name for name, _ in meta["params"]], launch_metadata=None),
        signature=dict(meta["params"]),
        constants={},
        name=meta["entry"],
    )
    group = {f"{_NAME}.{ext}": str(folder / f"{_NAME}.{ext}") for ext in ("json", "cubin", "ptx", "ttgir")}
    return TritonModule(CompiledKernel(source, group, meta["hash"]), meta, extra)


def _ptxas() -> Path:
    """The assembler that Triton will run. Raises KernelFault where it is missing: Triton itself would take
    another than the one that was asked for, and say nothing."""
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise KernelFault("unavailable", "triton is not installed")
    path = Path(chosen) if chosen else Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not os.access(path, os.X_OK):
        named = " (TRITON_PTXAS_PATH)" if chosen else ""
        raise KernelFault("unavailable", f"no assembler at {path}{named}")
    return path


def _ptxas_version() -> str:
    return tool_version(str(_ptxas()))


def _probe_ptxas() -> Availability:
    try:
        _ptxas_version()
    except (KernelFault, OSError, subprocess.SubprocessError) as fault:
        return Availability(False, str(fault), "unset TRITON_PTXAS_PATH, or reinstall triton")
    return Availability(True)


def _version(package: str) -> tuple[int, ...]:
    """Major and minor version of an installed package; (0, 0) where there is none."""
    try:
        return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(package))[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)


def _probe_interpreter() -> Availability:
    # a loop bound is a one-element array, which older interpreters turn into a number by int(); numpy 2.4
    # refuses that
    if _version("numpy") >= (2, 4) and _version("triton") < (3, 9):
        reason = "the interpreter of Triton before 3.9 fails with numpy >= 2.4"
        return Availability(False, reason, "pip install 'numpy<2.4'")
    return Availability(True)


def _probe_device() -> Availability:
    """A usable driver with a device, the assembler's version for the toolchain, and a C compiler where the
    launcher is compiled."""
    assembler = _probe_ptxas()
    if not assembler.ready:
        return assembler
    compilers = (os.environ.get("CC") or "", "clang", "gcc", "cc")
    if not any(c and shutil.which(c) for c in compilers):
        reason = "no C compiler: Triton builds its launcher with one"
        return Availability(False, reason, "install gcc, or set CC")
    return probe_driver("targets compile and interpret need none")
