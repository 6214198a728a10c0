"""How callables are timed on one CUDA device. Imported in workers only; owns no meaning and no storage.

``race_sustained`` and ``race_cold`` (and ``own_clock``) compare callables; ``quick`` gives one callable's
median for a tuning trial; the rest is what ``doctor`` measures the machine and the timer itself with.
Times are nanoseconds unless the name says otherwise. What cannot be measured raises TimerError.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from dsl_bench.errors import TimerError
from dsl_bench.gpu import CudaDevice, Device, Runner, cuda
from dsl_bench.nvml import Sampler
from dsl_bench.race import RaceResult, own_clock, race_cold, race_sustained
from dsl_bench.stream import SHORT_NS, Prove, Unit, cost, units

__all__ = [
    "CudaDevice",
    "Prove",
    "RaceResult",
    "Sampler",
    "bandwidth",
    "copy_bandwidth",
    "cuda",
    "cupti_time",
    "known_kernel",
    "l2_knee",
    "median",
    "own_clock",
    "quick",
    "race_cold",
    "race_sustained",
    "take_timed_seconds",
]

#: samples of a quick timing
QUICK_LEAST, QUICK_MOST = 5, 200


def take_timed_seconds() -> float:
    """Seconds that the device spent between events since this was last asked: the rest of the timing is the
    host's (captures, launches, idle gaps, synchronising)."""
    gpu = cuda()
    taken, gpu.timed_ns = gpu.timed_ns, 0.0
    return taken * 1e-9


def median(samples: Sequence[float]) -> float:
    """The median of a row of samples."""
    return float(statistics.median(samples))


def quick(
    calls: Sequence[Runner],
    budget_s: float,
    *,
    prove: Prove | None = None,
    device: Device | None = None,
) -> tuple[float, int]:
    """Median ns of a call and the number of samples, back to back in one burst of about ``budget_s``.

    ``calls[s]`` enqueues the same work on buffer set ``s``; the sets advance with every call. Short or
    host-bound calls are timed in captured graphs. For choosing between configs, not for a result."""
    gpu = device or cuda()
    spent = cost(gpu, calls)
    (unit,) = units(gpu, [calls], [spent], prove)
    wanted = int(budget_s * 1e9 / max(1.0, spent.device_ns * unit.calls))
    spans = _burst(gpu, unit, max(QUICK_LEAST, min(QUICK_MOST, wanted)))
    return median(spans), len(spans)


def _burst(device: Device, unit: Unit, count: int) -> list[float]:
    """``count`` samples in one stream behind a delay, ns a call; a first one is thrown away."""
    events = [device.event() for _ in range(count + 2)]
    device.synchronize()
    device.delay(SHORT_NS)
    device.record(events[0])
    for k, event in enumerate(events[1:]):
        unit.variants[k % len(unit.variants)]()
        device.record(event)
    device.wait(events[-1])
    return [device.elapsed_ns(a, b) / unit.calls for a, b in itertools.pairwise(events[1:])]


# -- what doctor asks ---------------------------------------------------------------------------------


def cupti_time(call: Runner, count: int = 20) -> float:
    """Median ns of a call by CUPTI (through torch.profiler): the sum of its kernels' own durations, back to
    back. Only for comparison with the timer. Raises TimerError where CUPTI reports nothing usable."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    cuda_type = torch.autograd.DeviceType.CUDA
    seen = [e for e in profiler.events() or () if e.device_type == cuda_type]
    seen.sort(key=lambda e: e.time_range.start)
    spans = [float(e.time_range.elapsed_us()) * 1e3 for e in seen]
    if not spans or len(spans) % count:
        raise TimerError(f"CUPTI reported {len(spans)} kernels for {count} calls")
    each = len(spans) // count
    return median([sum(spans[k * each : (k + 1) * each]) for k in range(count)])


def known_kernel(ns: float = 1e6, device: CudaDevice | None = None) -> tuple[float, float, float]:
    """A kernel of known length: it spins for a number of SM cycles. Gives the cycles, the ns that events
    measured, and the SM clock in MHz that NVML read meanwhile (0: unknown). Cycles / ns is a clock in GHz."""
    gpu = device or cuda()
    cycles = gpu.cycles(ns)
    repeats = max(8, round(0.3e9 / ns))
    events = [gpu.event() for _ in range(repeats + 1)]
    with gpu.sampler() as sampler:
        gpu.delay(ns)
        began = gpu.now()
        for event in events:
            gpu.record(event)
            gpu.delay(ns)
        gpu.synchronize()
        seen = sampler.window(began, gpu.now())
    spans = [gpu.elapsed_ns(a, b) for a, b in itertools.pairwise(events)]
    return float(cycles), median(spans), seen.clock_mhz


def bandwidth(nbytes: int = 1 << 30, device: CudaDevice | None = None) -> float:
    """Read bandwidth, bytes/s: a sum over ``nbytes`` that lie beyond the L2."""
    gpu = device or cuda()
    return nbytes / (_graph_ns(gpu, [_reader(nbytes)], 10) * 1e-9)


def copy_bandwidth(nbytes: int = 1 << 30, device: CudaDevice | None = None) -> float:
    """Copy bandwidth, bytes/s, read and written bytes counted."""
    import torch

    gpu = device or cuda()
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    # a kernel: a captured copy_ becomes a memcpy node, which is slower
    return 2 * nbytes / (_graph_ns(gpu, [lambda: torch.neg(source, out=target)], 10) * 1e-9)


def l2_knee(
    footprints: Sequence[int] = (), device: CudaDevice | None = None
) -> tuple[int, list[tuple[int, float]]]:
    """The buffer footprint in bytes beyond which the L2 no longer helps, and the curve it comes from.

    A buffer of 16 MiB is read in turn with others of its size, so that every kernel has the same length and
    only the footprint grows. The knee is the least footprint from which on all reads come within 5 % of the
    slowest. The curve: (footprint in bytes, bytes/s)."""
    gpu = device or cuda()
    part = 16 << 20
    counts = sorted({max(1, f // part) for f in footprints} or {1, 2, 3, 4, 6, 8, 12, 16, 24, 32})
    readers: list[Runner] = [_reader(part) for _ in range(counts[-1])]
    curve = []
    for n in counts:
        repeats = max(2, 64 // n)
        ns = _graph_ns(gpu, readers[:n] * repeats, 10) / (n * repeats)
        curve.append((n * part, part / (ns * 1e-9)))
    floor = min(speed for _, speed in curve) * 1.05
    knee = curve[-1][0]
    for footprint, speed in reversed(curve):
        if speed > floor:
            break
        knee = footprint
    return knee, curve


def _reader(nbytes: int) -> Runner:
    import torch

    source = torch.zeros(nbytes // 4, dtype=torch.float32, device="cuda")
    sink = torch.zeros((), dtype=torch.float32, device="cuda")

    def read() -> Any:
        return torch.sum(source, dim=0, out=sink)

    return read


def _graph_ns(device: Device, calls: Sequence[Runner], count: int) -> float:
    """Median ns of one replay of all ``calls``."""
    for call in calls:
        call()
    replay = device.capture(calls)
    return median(_burst(device, Unit([replay]), count))
