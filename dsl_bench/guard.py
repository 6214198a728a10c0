"""What a kernel must leave as it found it: the functions that time and check it, torch's global flags, the
threads of this process.

Everything here compares with what there was before any plugin was loaded, puts it back, and then names who
changed it. Imported in workers only.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dsl_bench.errors import KernelFault
from dsl_bench.kernel import Call

_MISSING: Any = object()
#: whose code runs in this process by design
_PLUGINS = ("dsl_bench.workloads", "dsl_bench.backends", "dsl_bench.kernels")
#: threads of our own
_OURS = "dsl-bench-"

_TIME = "perf_counter perf_counter_ns monotonic monotonic_ns time time_ns sleep"
_TORCH = "arange empty equal exp2 isfinite mm randint stack sum zeros"
_CUDA = (
    "CUDAGraph Event Stream _sleep current_stream empty_cache get_device_properties graph is_available "
    "mem_get_info set_stream stream synchronize"
)
_TENSOR = (
    "__bool__ __eq__ __float__ __int__ __ne__ __sub__ abs_ all any argmax contiguous copy_ double fill_ "
    "float item max mul_ nonzero normal_ reshape square_ sqrt sum to tolist uniform_ view zero_"
)


@dataclass(frozen=True)
class _Place:
    """A name in a module or class, what it held, and the code of that where it is a function."""

    owner: Any
    name: str
    value: Any
    code: types.CodeType | None

    def changed(self) -> bool:
        """Whether it holds something else now."""
        if self.owner.__dict__.get(self.name, _MISSING) is not self.value:
            return True
        return self.code is not None and self.value.__code__ is not self.code

    def restore(self) -> None:
        """Put back what it held."""
        if self.code is not None:
            self.value.__code__ = self.code
        if self.value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)

    def __str__(self) -> str:
        module = getattr(self.owner, "__module__", "") or ""
        owner = getattr(self.owner, "__qualname__", None)
        return ".".join(filter(None, (module, owner or self.owner.__name__, self.name)))


@dataclass(frozen=True)
class _Flag:
    """A global setting of torch and the value it had."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    value: Any


class Guard:
    """Made before plugins are loaded; ``inspect`` after each step of one."""

    def __init__(self) -> None:
        self._places = [_place(owner, name) for owner, name in _watched()]
        self._flags = list(_flags())
        self._threads: set[threading.Thread] = set()
        self.settle()

    def settle(self) -> None:
        """Whatever threads run now are not those of what comes next."""
        self._threads = set(threading.enumerate())

    def restore(self) -> tuple[list[_Place], list[_Flag]]:
        """Put back what was changed, and say what that was."""
        places = [p for p in self._places if p.changed()]
        for place in places:
            place.restore()
        flags = [f for f in self._flags if f.get() != f.value]
        for flag in flags:
            flag.put(flag.value)
        return places, flags

    def inspect(self, vendor: bool = False) -> None:
        """Put back what was changed; KernelFault ``launch_error`` that names it: check ``tamper`` for a
        function, ``flags`` for a setting of torch, ``threads`` for work that goes on in another thread.

        A ``vendor`` library may have threads, set flags and wrap functions: put back without a word."""
        places, flags = self.restore()
        if vendor:
            return
        if places:
            _refuse("tamper", f"the kernel replaced {_listed([str(p) for p in places])}")
        if flags:
            _refuse("flags", f"the kernel changed torch's {_listed([f.name for f in flags])}")
        threads = [t for t in threading.enumerate() if t not in self._threads and not _ours(t)]
        if threads:
            what = f"work goes on in another thread: {_listed([t.name for t in threads])}"
            _refuse("threads", what, fatal=True)


def _refuse(check: str, reason: str, fatal: bool = False) -> None:
    raise KernelFault("launch_error", reason, check, fatal)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ours(thread: threading.Thread) -> bool:
    return thread.name.startswith(_OURS)


def _place(owner: Any, name: str) -> _Place:
    value = owner.__dict__.get(name, _MISSING)
    return _Place(owner, name, value, value.__code__ if isinstance(value, types.FunctionType) else None)


def _watched() -> Iterator[tuple[Any, str]]:
    """Every name that must keep its value: the clocks, what torch is asked by the checks, and all of ours."""
    yield from ((builtins, name) for name in vars(builtins) if not name.startswith("_"))
    for owner, names in ((time, _TIME), (torch, _TORCH), (torch.cuda, _CUDA), (torch.Tensor, _TENSOR)):
        yield from ((owner, name) for name in names.split())
    for kind in (torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph, torch.Generator):
        members = {name for base in kind.__mro__[:-1] for name in vars(base) if not name.startswith("__")}
        yield from ((kind, name) for name in sorted(members))
    for name, module in sorted(sys.modules.items()):
        if name.startswith("dsl_bench.") and not name.startswith(_PLUGINS):
            yield from _names_of(module)


def _names_of(module: types.ModuleType) -> Iterator[tuple[Any, str]]:
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        yield module, name
        if isinstance(value, type) and value.__module__ == module.__name__:
            methods = (types.FunctionType, classmethod, staticmethod, property)
            yield from ((value, n) for n, member in vars(value).items() if isinstance(member, methods))


def _flags() -> Iterator[_Flag]:
    """The settings that this torch has, with their values."""
    candidates: list[tuple[str, Callable[[], Any], Callable[[Any], object]]] = [
        ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        ("number of threads", torch.get_num_threads, torch.set_num_threads),
        ("default device", torch.get_default_device, _put_device),
        ("deterministic algorithms", _deterministic, _put_deterministic),
    ]
    if torch.cuda.is_available():
        candidates.append(("current device", torch.cuda.current_device, torch.cuda.set_device))
        candidates.append(("current stream", torch.cuda.current_stream, torch.cuda.set_stream))
    matmul = "allow_tf32 allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction"
    for label, owner, names in (
        ("backends.cuda.matmul", torch.backends.cuda.matmul, f"{matmul} allow_fp16_accumulation"),
        ("backends.cudnn", torch.backends.cudnn, "enabled benchmark deterministic allow_tf32"),
    ):
        candidates += [_attribute(label, owner, name) for name in names.split()]
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        get = getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)
        put = getattr(torch.backends.cuda, f"enable_{name}_sdp", None)
        if get is not None and put is not None:
            candidates.append((f"backends.cuda.{name}_sdp", get, put))
    for label, get, put in candidates:
        # a torch that lacks one of them, or mixes old and new names for it, is watched without it
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("error")
            yield _Flag(label, get, put, get())


def _attribute(label: str, owner: Any, name: str) -> tuple[str, Callable[[], Any], Callable[[Any], object]]:
    return f"{label}.{name}", lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _put_device(device: Any) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _put_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def assert_fills(role: str, calls: Iterable[Call]) -> None:
    """KernelFault ``launch_error`` for a language's kernel that returns outputs of its own: a graph's proof
    does not reach them. Only vendor libraries may."""
    for call in calls:
        if not isinstance(call, Call):
            raise TypeError(f"bind() returned a {type(call).__name__}, not a Call")
    if role != "vendor" and any(call.allocates for call in calls):
        _refuse("allocates", "a kernel of a language has to fill the outputs that it is given")


def spoils_device(fault: Exception) -> bool:
    """Whether this process can do no more work on the device after ``fault``."""
    return "CUDA error" in str(fault) or type(fault).__name__ == "AcceleratorError"


def is_oom(fault: Exception) -> bool:
    """Whether ``fault`` is the refusal of an allocator, torch's, Python's or the system's."""
    refused = isinstance(fault, OSError) and fault.errno == errno.ENOMEM
    kinds = (torch.OutOfMemoryError, MemoryError)
    return refused or isinstance(fault, kinds) or "allocate memory" in str(fault)
