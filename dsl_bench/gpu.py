"""The CUDA device as the timers see it: a stream, events, a delay, captured graphs, an L2 flush.

All of torch.cuda that timing needs is in this one class, so that the logic in :mod:`dsl_bench.race` runs on a
simulated device in the tests. Imported in workers only.
"""

# ruff: noqa: D102  (CudaDevice does what Device documents)
from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dsl_bench.errors import KernelFault, TimerError
from dsl_bench.nvml import Sampler

Runner = Callable[[], object]

#: below this the host spins instead of sleeping: a host that just woke launches late
_SPIN_S = 0.001


class Device(Protocol):
    """What the timers need of a device. Times are nanoseconds unless the name says otherwise."""

    def now(self) -> float:
        """The host's clock, seconds (``time.perf_counter``)."""

    def idle(self, seconds: float) -> None:
        """Let the device idle while the host passes the time, awake at its end."""

    def event(self) -> Any:
        """A timing event."""

    def record(self, event: Any) -> None:
        """Queue ``event`` on the current stream."""

    def done(self, event: Any) -> bool:
        """Whether the stream has passed ``event``."""

    def wait(self, event: Any) -> None:
        """Wait on the host until the stream has passed ``event``."""

    def elapsed_ns(self, start: Any, end: Any) -> float:
        """From ``start`` to ``end``, both passed."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def delay(self, ns: float) -> None:
        """Queue a kernel that spins for at least ``ns``."""

    def flush_l2(self) -> None:
        """Queue what leaves the L2 full of clean lines of another buffer."""

    def capture(self, calls: Sequence[Runner]) -> Runner:
        """A graph of ``calls``; the result queues one replay."""

    def sampler(self) -> Sampler:
        """A clock sampler for this device, not yet started."""


class CudaDevice:
    """The current CUDA device through torch. See :class:`Device`."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise TimerError("there is no CUDA device to time on")
        self._torch = torch
        self.properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = int(self.properties.L2_cache_size)
        uuid = str(getattr(self.properties, "uuid", ""))
        self.uuid = uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._cycles_per_ns = self._clock_ghz()
        self._side = torch.cuda.Stream()
        #: ns between all events that were read: what of the timing the device was busy with
        self.timed_ns = 0.0
        self._flush: Any = None
        self._sink: Any = None
        self._driver: Any = None

    def _clock_ghz(self) -> float:
        """The highest SM clock: a delay counted in its cycles never ends early."""
        from dsl_bench.nvml import Gpu, NvmlError

        try:
            return Gpu(self.uuid).max_sm_clock / 1000.0
        except NvmlError:
            return float(getattr(self.properties, "clock_rate", 0) or 2_500_000) / 1e6

    def now(self) -> float:
        return time.perf_counter()

    def idle(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        if seconds > 4 * _SPIN_S:
            time.sleep(seconds - _SPIN_S)
        while time.perf_counter() < until:
            pass

    def event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)

    def record(self, event: Any) -> None:
        event.record()

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, event: Any) -> None:
        event.synchronize()

    def elapsed_ns(self, start: Any, end: Any) -> float:
        span = float(start.elapsed_time(end)) * 1e6
        self.timed_ns += span
        return span

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def cycles(self, ns: float) -> int:
        """SM cycles that take at least ``ns``."""
        return max(1, int(ns * self._cycles_per_ns))

    def delay(self, ns: float) -> None:
        self._torch.cuda._sleep(self.cycles(ns))

    def flush_l2(self) -> None:
        torch = self._torch
        if self._flush is None:
            self._flush = torch.zeros(2 * self.l2_bytes // 4, dtype=torch.float32, device="cuda")
            self._sink = torch.zeros((), dtype=torch.float32, device="cuda")
            self._driver = ctypes.CDLL("libcuda.so.1")
        status = self._driver.cuCtxResetPersistingL2Cache()
        if status != 0:
            raise TimerError(f"cuCtxResetPersistingL2Cache failed with status {status}")
        # a write alone leaves dirty lines, whose write-back would be charged to the kernel
        self._flush.zero_()
        torch.sum(self._flush, dim=0, out=self._sink)

    def capture(self, calls: Sequence[Runner]) -> Runner:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            calls[0]()  # a library's workspace for this stream is allocated outside the graph
            torch.cuda.synchronize()
            # thread_local: what other threads of this process do cannot spoil the capture
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
                graph.capture_end()
            except Exception as fault:
                with contextlib.suppress(Exception):
                    graph.capture_end()
                text = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
                reason = f"the call cannot be captured in a CUDA graph: {text}"
                raise KernelFault("launch_error", reason, "capture") from fault
        torch.cuda.synchronize()

        replay: Runner = graph.replay
        return replay

    def sampler(self) -> Sampler:
        return Sampler(self.uuid)


@functools.cache
def cuda() -> CudaDevice:
    """The current CUDA device, looked up once a process."""
    return CudaDevice()
