"""What ``bind`` receives as its module: torch.compile for the device, the captured graph for the CPU."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

from dsl_bench.plugin import KernelFault

#: mode max-autotune, but that the harness captures graphs itself, and that products are Inductor's own
OPTIONS = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "triton.cudagraphs": False,
    "max_autotune_gemm_backends": "TRITON",
}
Formula = Callable[..., None]


class Compiled:
    """Compiles each formula once, for the shapes that it sees first (a module serves one case)."""

    def __init__(self) -> None:
        self._compiled: dict[Formula, Callable[..., None]] = {}
        #: what a kernel wants to keep for its other buffer sets
        self.kept: dict[str, Any] = {}

    def call(self, formula: Formula, *args: Any) -> Callable[[], None]:
        """``formula(*args)`` as a call that fills the first argument; the first compiles and autotunes.

        Raises KernelFault where Inductor could only call a library for one of the products."""
        import torch

        _no_monitor()
        _no_timer()
        if formula not in self._compiled:
            own = _own_code(formula)
            self._compiled[formula] = torch.compile(own, fullgraph=True, dynamic=False, options=OPTIONS)
        run = functools.partial(self._compiled[formula], *args)
        try:
            run()
        except RuntimeError as fault:
            if "No choices" not in str(fault):
                raise
            reason = f"Inductor of torch {torch.__version__} has no template of its own for a product of this"
            raise KernelFault("invalid_config", reason, "bind") from fault
        finally:
            _end_compilers()
        return run


class Eager:
    """The same interface on the CPU, without code generation."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def call(self, formula: Formula, *args: Any) -> Callable[[], None]:
        """``formula(*args)``, with low-precision inputs as float32: that is how a GPU adds products up."""
        import torch

        _no_monitor()
        low = (torch.float16, torch.bfloat16)
        traced = torch.compile(_own_code(formula), fullgraph=True, dynamic=False, backend="aot_eager")

        def run() -> None:
            output, *inputs = args
            wide = (x.float() if isinstance(x, torch.Tensor) and x.dtype in low else x for x in inputs)
            traced(output, *wide)

        return run


def _own_code(formula: Formula) -> Formula:
    """A function with a code object of its own. Dynamo keeps what it compiled with the code object, and gives
    up on one that was compiled for too many shapes."""
    code = formula.__code__.replace()
    copy = types.FunctionType(code, formula.__globals__, formula.__name__, formula.__defaults__)
    copy.__kwdefaults__ = formula.__kwdefaults__
    return copy


def _no_monitor() -> None:
    """Keep tqdm, whose progress bars torch shows while it compiles, from starting a thread to watch them."""
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0


def _no_timer() -> None:
    """Keep the pool of compiling processes from starting a thread that would put it to sleep when idle: it
    sleeps half a minute at a time, and outlives the pool."""
    from torch._inductor import config

    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False


def _end_compilers() -> None:
    """No thread or process of Inductor's outlives the compilation: the next kernel has the machine alone."""
    from torch._inductor import async_compile

    async_compile.shutdown_compile_workers()
    threads = async_compile.AsyncCompile.pool
    if threads.cache_info().currsize:
        threads().shutdown()
        threads.cache_clear()
