"""Kernels that are wrong on purpose on a CUDA device: ``--plugin tests/wrong_kernels/on_gpu.py`` there.

Made of torch's own operators, so that nothing has to be compiled. Each is named after the kind that
``kinds.py`` describes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsl_bench.plugin import Artifact, Availability, Backend, Call, Case, Config, Kernel, Static, Target

Run = Callable[[], object]
Make = Callable[[Any, Any, Any], Run]

WRONG: dict[str, Make] = {}
#: below this many seconds since the call before, a call belongs to a burst: it is being timed
BURST_S = 0.005


def wrong(make: Make) -> Make:
    """Adds ``make(a, b, c)``, which gives the call to run, under its name."""
    WRONG[make.__name__] = make
    return make


def after(a: Any, b: Any, c: Any, spoil: Run) -> Run:
    """The right product, then ``spoil()``."""

    def run() -> None:
        torch.mm(a, b.t(), out=c)
        spoil()

    return run


# -- what it writes -------------------------------------------------------------------------------------


@wrong
def holds(a: Any, b: Any, c: Any) -> Run:
    """Not wrong: the one whose verdict the others must not change."""
    return lambda: torch.mm(a, b.t(), out=c)


@wrong
def writes_nothing(a: Any, b: Any, c: Any) -> Run:
    return lambda: torch.mm(a, b.t())


@wrong
def writes_zeros(a: Any, b: Any, c: Any) -> Run:
    return c.zero_


@wrong
def writes_a_part(a: Any, b: Any, c: Any) -> Run:
    return lambda: torch.mm(a[:-1], b.t(), out=c[:-1])


@wrong
def writes_out_of_bounds(a: Any, b: Any, c: Any) -> Run:
    beyond = c.as_strided((8,), (1,), c.storage_offset() + c.numel())
    return after(a, b, c, beyond.zero_)


@wrong
def mutates_an_input(a: Any, b: Any, c: Any) -> Run:
    return after(a, b, c, lambda: a[0].copy_(a[0].flip(0)))


@wrong
def mutates_an_input_later(a: Any, b: Any, c: Any) -> Run:
    calls = [0]

    def spoil() -> None:
        calls[0] += 1
        if calls[0] > 1:
            a[0].copy_(a[0].flip(0))

    return after(a, b, c, spoil)


@wrong
def makes_nan(a: Any, b: Any, c: Any) -> Run:
    return after(a, b, c, lambda: c[1, 2].fill_(float("nan")))


@wrong
def makes_inf(a: Any, b: Any, c: Any) -> Run:
    return after(a, b, c, lambda: c[1, 2].fill_(float("inf")))


@wrong
def needs_zeroed_outputs(a: Any, b: Any, c: Any) -> Run:
    return lambda: c.add_(torch.mm(a, b.t()))


# -- what it keeps --------------------------------------------------------------------------------------


@wrong
def gives_the_last_calls_output(a: Any, b: Any, c: Any) -> Run:
    last = torch.empty_like(c)
    calls = [0]

    def run() -> None:
        if not calls[0]:
            torch.mm(a, b.t(), out=last)
        calls[0] += 1
        c.copy_(last)
        torch.mm(a, b.t(), out=last)

    return run


@wrong
def caches_by_identity(a: Any, b: Any, c: Any) -> Run:
    results: dict[int, Any] = {}

    def run() -> None:
        if a.data_ptr() not in results:
            results[a.data_ptr()] = torch.mm(a, b.t())
        c.copy_(results[a.data_ptr()])

    return run


@wrong
def caches_by_version(a: Any, b: Any, c: Any) -> Run:
    """torch counts a tensor's changes; who goes by that computes only when it must."""
    results: dict[int, Any] = {}

    def run() -> None:
        if a._version not in results:
            results[a._version] = torch.mm(a, b.t())
        c.copy_(results[a._version])

    return run


@wrong
def computes_in_bind(a: Any, b: Any, c: Any) -> Run:
    result = torch.mm(a, b.t())
    return lambda: c.copy_(result)


@wrong
def transposes_in_bind(a: Any, b: Any, c: Any) -> Run:
    prepared = b.t().contiguous()
    return lambda: torch.mm(a, prepared, out=c)


@wrong
def right_on_the_first_call_only(a: Any, b: Any, c: Any) -> Run:
    calls = [0]

    def spoil() -> None:
        calls[0] += 1
        if calls[0] > 1:
            c.mul_(1.01)

    return after(a, b, c, spoil)


@wrong
def reads_uninitialised_memory(a: Any, b: Any, c: Any) -> Run:
    sums = torch.empty(c.shape, dtype=torch.float32, device=c.device)

    def run() -> None:
        sums.add_(torch.mm(a, b.t()))
        c.copy_(sums)
        sums.zero_()

    return run


# -- for which inputs, and how exactly ------------------------------------------------------------------


@wrong
def right_on_round_shapes_only(a: Any, b: Any, c: Any) -> Run:
    m, n = (size // 16 * 16 for size in c.shape)
    return lambda: c[:m, :n].copy_(torch.mm(a[:m], b[:n].t()))


@wrong
def right_on_uniform_data_only(a: Any, b: Any, c: Any) -> Run:
    return lambda: torch.mm(a.clamp(-1, 1), b.clamp(-1, 1).t(), out=c)


def steps(a: Any, b: Any, size: int) -> Iterator[Any]:
    """Products of blocks of K, in the inputs' type."""
    for k in range(0, a.shape[1], size):
        yield torch.mm(a[:, k : k + size], b[:, k : k + size].t())


@wrong
def accumulates_in_low_precision(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        total = torch.zeros_like(c)
        for part in steps(a, b, 16):
            total += part
        c.copy_(total)

    return run


@wrong
def splits_k_in_low_precision(a: Any, b: Any, c: Any) -> Run:
    return lambda: c.copy_(sum(part.float() for part in steps(a, b, a.shape[1] // 4)))


# -- where and when it works ----------------------------------------------------------------------------


def beside(run: Run) -> tuple[Any, Run]:
    """Another stream, and ``run`` on it; what the libraries need there is made at once."""
    side = torch.cuda.Stream()

    def there() -> None:
        with torch.cuda.stream(side):
            run()

    there()
    torch.cuda.synchronize()
    return side, there


@wrong
def ignores_the_stream(a: Any, b: Any, c: Any) -> Run:
    """Works on another stream; neither waits for the other."""
    _, there = beside(lambda: torch.mm(a, b.t(), out=c))
    return there


@wrong
def is_not_waited_for(a: Any, b: Any, c: Any) -> Run:
    """Waits for the current stream, which does not wait for it."""
    cycles = [0]

    def work() -> None:
        torch.cuda._sleep(cycles[0])
        torch.mm(a, b.t(), out=c)

    side, there = beside(work)
    cycles[0] = 2_000_000  # about a millisecond

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        there()

    return run


@wrong
def works_in_another_thread(a: Any, b: Any, c: Any) -> Run:
    def work() -> None:
        torch.mm(a, b.t(), out=c)
        time.sleep(0.5)

    return lambda: threading.Thread(target=work, daemon=True).start()


@wrong
def leaves_no_graph(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        if not torch.cuda.is_current_stream_capturing():
            torch.mm(a, b.t(), out=c)

    return run


@wrong
def waits_for_the_device(a: Any, b: Any, c: Any) -> Run:
    return after(a, b, c, torch.cuda.synchronize)


@wrong
def is_fast_in_bursts(a: Any, b: Any, c: Any) -> Run:
    """Computes only when nobody seems to be timing it."""
    last = [0.0]

    def run() -> None:
        now, before = time.perf_counter(), last[0]
        last[0] = now
        if now - before < BURST_S:
            c.zero_()
        else:
            torch.mm(a, b.t(), out=c)

    return run


@wrong
def is_a_library_fast_in_bursts(a: Any, b: Any, c: Any) -> Run:
    """The same as a vendor library that returns its own tensors, which no proof of a graph reaches."""
    last = [0.0]
    result = torch.empty_like(c)

    def run() -> Mapping[str, Any]:
        now, before = time.perf_counter(), last[0]
        last[0] = now
        if now - before < BURST_S:
            result[0].zero_()
        else:
            torch.mm(a, b.t(), out=result)
        return {"c": result}

    return run


# -- beside the point, and how it ends ------------------------------------------------------------------


@wrong
def replaces_synchronize(a: Any, b: Any, c: Any) -> Run:
    return after(a, b, c, lambda: setattr(torch.cuda, "synchronize", lambda device=None: None))


@wrong
def replaces_the_events(a: Any, b: Any, c: Any) -> Run:
    return after(a, b, c, lambda: setattr(torch.cuda.Event, "elapsed_time", lambda self, other: 1e-3))


@wrong
def changes_a_flag(a: Any, b: Any, c: Any) -> Run:
    flags = torch.backends.cuda.matmul
    name = "allow_bf16_reduced_precision_reduction"
    return after(a, b, c, lambda: setattr(flags, name, not getattr(flags, name)))


@wrong
def gives_its_own_tensors(a: Any, b: Any, c: Any) -> Run:
    return lambda: {"c": torch.mm(a, b.t())}


@wrong
def hangs_in_python(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        while True:
            pass

    return run


@wrong
def hangs_on_the_device(a: Any, b: Any, c: Any) -> Run:
    return lambda: torch.cuda._sleep(1 << 62)


@wrong
def raises(a: Any, b: Any, c: Any) -> Run:
    def run() -> None:
        raise RuntimeError("no such luck")

    return run


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
def takes_all_the_memory(a: Any, b: Any, c: Any) -> Run:
    kept = []
    try:
        while True:
            kept.append(torch.empty(1 << 30, dtype=torch.uint8, device=c.device))
    except torch.OutOfMemoryError:
        pass
    return after(a, b, c, kept.copy)


@wrong
def asks_for_too_much(a: Any, b: Any, c: Any) -> Run:
    return lambda: c.copy_(
        torch.empty(1 << 44, dtype=torch.uint8, device=c.device)[: c.numel()].view(c.shape)
    )


@wrong
def leaves_a_sticky_error(a: Any, b: Any, c: Any) -> Run:
    places = torch.full((1,), 1 << 30, dtype=torch.int64, device=c.device)
    return after(a, b, c, lambda: c.view(-1)[places])


@wrong
def accesses_illegally(a: Any, b: Any, c: Any) -> Run:
    whole = {"shape": (1 << 44,), "typestr": "|u1", "data": (c.data_ptr(), False), "version": 3}
    beyond = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=whole), device=c.device)
    return after(a, b, c, lambda: beyond[1 << 43 : (1 << 43) + 4].add_(1))


# -- as a plugin ----------------------------------------------------------------------------------------


def _source(static: Static, arch: str) -> str:
    return str(static["kind"])


def _binder(make: Make) -> Callable[..., Call]:
    allocates = make in (gives_its_own_tensors, is_a_library_fast_in_bursts)

    def bind(
        module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> Call:
        return Call(make(inputs["a"], inputs["b"], outputs["c"]), allocates=allocates)  # type: ignore[arg-type]

    return bind


def _kernel(name: str, make: Make) -> Kernel:
    return Kernel(
        id=f"wrong/{name}",
        workload="gemm",
        space={"kind": (name,)},
        default=lambda case: {"kind": name},
        source=_source,
        bind=_binder(make),
        summary=(make.__doc__ or "").partition("\n")[0],
    )


KERNELS = tuple(_kernel(name, make) for name, make in WRONG.items())


class WrongBackend(Backend):
    """Nothing to compile: torch is the language."""

    name = "wrong"

    def probe(self, target: Target) -> Availability:
        """Ready where torch sees a device."""
        if target == "interpret":
            return Availability(False, "made for a CUDA device")
        ready = target == "compile" or torch.cuda.is_available()
        return Availability(ready, "" if ready else "torch sees no CUDA device")

    def kernels(self) -> Iterator[Kernel]:
        """All of this file."""
        yield from KERNELS

    def versions(self) -> dict[str, str]:
        """torch's."""
        return {"torch": torch.__version__}

    def compile(self, source: Any, arch: str, folder: Path) -> Artifact:
        """An empty artifact."""
        return Artifact(folder)

    def load(self, artifact: Artifact) -> Any:
        """Nothing."""
        return None


BACKEND = WrongBackend()
