"""Kernels that are wrong on purpose, on the host: ``--plugin tests/wrong_kernels/on_cpu.py``.

They use the backend of tests/plugin_fixture, which has to be importable. Each is named after the kind that
``kinds.py`` describes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from dsl_bench_numpyref import NumpyRef

from dsl_bench.plugin import Artifact, Call, Case, Config, Kernel, Static

Run = Callable[[], object]
Make = Callable[[Any, Any, Any], Run]

WRONG: dict[str, Make] = {}


def wrong(make: Make) -> Make:
    """Adds ``make(a, b, c)``, which gives the call to run, under its name."""
    WRONG[make.__name__] = make
    return make


def product(a: Any, b: Any) -> Any:
    """The right result, in float32."""
    return a.float() @ b.float().t()


def steps(a: Any, size: int) -> Iterator[slice]:
    """K in blocks."""
    return (slice(k, k + size) for k in range(0, a.shape[1], size))


# -- what it writes -------------------------------------------------------------------------------------


@wrong
def writes_nothing(a: Any, b: Any, c: Any) -> Run:
    return lambda: product(a, b)


@wrong
def writes_zeros(a: Any, b: Any, c: Any) -> Run:
    return c.zero_


@wrong
def writes_a_part(a: Any, b: Any, c: Any) -> Run:
    return lambda: c[:-1].copy_(product(a, b)[:-1])


@wrong
def writes_out_of_bounds(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        c.copy_(product(a, b))
        ctypes.memset(c.data_ptr() + c.nbytes, 0, 16)

    return run


@wrong
def writes_before_its_output(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        c.copy_(product(a, b))
        ctypes.memset(c.data_ptr() - 2, 0, 2)

    return run


@wrong
def mutates_an_input(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        c.copy_(product(a, b))
        a[0].copy_(a[0].flip(0))

    return run


@wrong
def makes_nan(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        c.copy_(product(a, b))
        c[1, 2] = float("nan")

    return run


@wrong
def makes_inf(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        c.copy_(product(a, b))
        c[1, 2] = float("inf")

    return run


@wrong
def needs_zeroed_outputs(a: Any, b: Any, c: Any) -> Run:
    return lambda: c.add_(product(a, b))


# -- what it keeps --------------------------------------------------------------------------------------


@wrong
def gives_the_last_calls_output(a: Any, b: Any, c: Any) -> Run:
    kept: list[Any] = []

    def run() -> None:
        kept.append(product(a, b))
        c.copy_(kept[max(0, len(kept) - 2)])

    return run


@wrong
def caches_by_identity(a: Any, b: Any, c: Any) -> Run:
    results: dict[tuple[int, int], Any] = {}

    def run() -> None:
        key = (a.data_ptr(), b.data_ptr())
        if key not in results:
            results[key] = product(a, b)
        c.copy_(results[key])

    return run


@wrong
def caches_by_version(a: Any, b: Any, c: Any) -> Run:
    """torch counts a tensor's changes; who goes by that computes only when it must."""
    results: dict[tuple[int, int], Any] = {}

    def run() -> None:
        key = (a._version, b._version)
        if key not in results:
            results[key] = product(a, b)
        c.copy_(results[key])

    return run


@wrong
def computes_in_bind(a: Any, b: Any, c: Any) -> Run:
    result = product(a, b)
    return lambda: c.copy_(result)


@wrong
def transposes_in_bind(a: Any, b: Any, c: Any) -> Run:
    prepared = b.float().t().contiguous()
    return lambda: c.copy_(a.float() @ prepared)


@wrong
def right_on_the_first_call_only(a: Any, b: Any, c: Any) -> Run:
    calls = [0]

    def run() -> None:
        calls[0] += 1
        c.copy_(product(a, b) * (1.0 if calls[0] == 1 else 1.01))

    return run


@wrong
def reads_uninitialised_memory(a: Any, b: Any, c: Any) -> Run:
    sums = np.empty(tuple(c.shape), dtype=np.float32)

    def run() -> None:
        sums[:] += product(a, b).numpy()
        c.copy_(torch.from_numpy(sums))
        sums[:] = 0

    return run


# -- for which inputs -----------------------------------------------------------------------------------


@wrong
def right_on_round_shapes_only(a: Any, b: Any, c: Any) -> Run:
    m, n = (size // 16 * 16 for size in c.shape)
    return lambda: c[:m, :n].copy_(product(a, b)[:m, :n])


@wrong
def right_on_uniform_data_only(a: Any, b: Any, c: Any) -> Run:
    return lambda: c.copy_(product(a.clamp(-1, 1), b.clamp(-1, 1)))


# -- how exactly ----------------------------------------------------------------------------------------


@wrong
def accumulates_in_low_precision(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        total = torch.zeros_like(c)
        for k in steps(a, 16):
            total += product(a[:, k], b[:, k]).to(c.dtype)
        c.copy_(total)

    return run


@wrong
def splits_k_in_low_precision(a: Any, b: Any, c: Any) -> Run:
    size = -(-a.shape[1] // 4)
    return lambda: c.copy_(sum(product(a[:, k], b[:, k]).to(c.dtype).float() for k in steps(a, size)))


@wrong
def truncates(a: Any, b: Any, c: Any) -> Run:
    """Rounds towards zero: drops the bits that do not fit."""

    def run() -> None:
        exact = product(a, b)
        rounded = exact.to(c.dtype)
        away = rounded.float().abs() > exact.abs()
        c.copy_(torch.where(away, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded))

    return run


# -- beside the point -----------------------------------------------------------------------------------


@wrong
def works_in_another_thread(a: Any, b: Any, c: Any) -> Run:
    def work() -> None:
        c.copy_(product(a, b))
        time.sleep(0.5)

    def run() -> None:
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)

    return run


@wrong
def works_in_a_thread_of_bind(a: Any, b: Any, c: Any) -> Run:
    wanted = threading.Semaphore(0)

    def work() -> None:
        while True:
            wanted.acquire()
            c.copy_(product(a, b))

    threading.Thread(target=work, daemon=True).start()

    def run() -> None:
        wanted.release()
        time.sleep(0.1)

    return run


@wrong
def replaces_the_clock(a: Any, b: Any, c: Any) -> Run:
    genuine = time.perf_counter

    def run() -> None:
        time.perf_counter = lambda: genuine() / 2  # type: ignore[assignment]
        c.copy_(product(a, b))

    return run


@wrong
def replaces_synchronize(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        torch.cuda.synchronize = lambda device=None: None
        c.copy_(product(a, b))

    return run


@wrong
def replaces_a_check(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        sys.modules["dsl_bench.check"].verify = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        c.copy_(product(a, b))

    return run


@wrong
def rewrites_a_check(a: Any, b: Any, c: Any) -> Run:
    """Leaves the function where it is and changes what it does."""

    def run() -> None:
        verify = sys.modules["dsl_bench.check"].verify
        verify.__code__ = (lambda *args, **kwargs: None).__code__
        c.copy_(product(a, b))

    return run


@wrong
def changes_a_flag(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        c.copy_(product(a, b))

    return run


@wrong
def changes_the_default_type(a: Any, b: Any, c: Any) -> Run:
    torch.set_default_dtype(torch.float64)
    return lambda: c.copy_(product(a, b))


@wrong
def gives_its_own_tensors(a: Any, b: Any, c: Any) -> Run:
    return lambda: {"c": product(a, b).to(c.dtype)}


# -- how it ends ----------------------------------------------------------------------------------------


@wrong
def hangs_in_python(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        while True:
            pass

    return run


@wrong
def hangs_with_a_child(a: Any, b: Any, c: Any) -> Run:
    """Hangs, and has started a program that would go on without it."""

    def run() -> None:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
        while True:
            time.sleep(1)

    return run


@wrong
def raises(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        raise RuntimeError("no such luck")

    return run


@wrong
def raises_in_bind(a: Any, b: Any, c: Any) -> Run:
    raise RuntimeError("no such luck")


@wrong
def exits(a: Any, b: Any, c: Any) -> Run:
    return lambda: sys.exit(0)


@wrong
def exits_at_once(a: Any, b: Any, c: Any) -> Run:
    return lambda: os._exit(0)


@wrong
def aborts(a: Any, b: Any, c: Any) -> Run:
    return os.abort


@wrong
def segfaults(a: Any, b: Any, c: Any) -> Run:
    return lambda: ctypes.string_at(8)


@wrong
def takes_all_the_memory(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        # asked for and never touched: the machine is not in danger
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        kept = [mmap.mmap(-1, 1 << 28, flags=private) for _ in range(1 << 20)]
        c.fill_(len(kept))

    return run


@wrong
def asks_for_too_much(a: Any, b: Any, c: Any) -> Run:
    return lambda: c.copy_(torch.empty(1 << 50, dtype=torch.uint8)[: c.numel()].view(c.shape))


# -- as a plugin ----------------------------------------------------------------------------------------


def _source(static: Static, arch: str) -> str:
    return str(static["kind"])


def _binder(make: Make) -> Callable[..., Call]:
    def bind(
        module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> Call:
        run = make(inputs["a"], inputs["b"], outputs["c"])
        return Call(run, allocates=make is gives_its_own_tensors)  # type: ignore[arg-type]

    return bind


def _kernel(name: str, make: Make) -> Kernel:
    return Kernel(
        id=f"numpyref/{name}",
        workload="gemm",
        space={"kind": (name,)},
        default=lambda case: {"kind": name},
        valid=lambda case, config: None,
        source=_source,
        bind=_binder(make),
        summary=(make.__doc__ or "").partition("\n")[0],
    )


class WrongBackend(NumpyRef):
    """The fixture's backend; what a device job would load is what the interpreter runs."""

    def compile(self, source: Any, arch: str, folder: Any) -> Artifact:
        """An empty artifact: there is nothing to compile."""
        return Artifact(folder)

    def load(self, artifact: Artifact) -> Any:
        """The block size of the right kernel."""
        return 16


BACKEND = WrongBackend()
KERNELS = tuple(_kernel(name, make) for name, make in WRONG.items())
