"""What ``doctor`` measures on the device: timer against other clocks, floors, bandwidth, the L2 knee."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsl_bench import jobs, stats, timing
from dsl_bench.errors import TimerError
from dsl_bench.jobs import Progress

Row = dict[str, Any]
#: how far the timer may be from CUPTI on a long kernel, and from the SM clock on a spinning one, as shares
CROSS_CHECK, KNOWN_CHECK = 0.02, 0.02
#: A/A floors that a machine fit to measure keeps, as shares
FLOOR = {"sustained": 0.001, "cold": 0.003}
SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (1024, 1024, 1024), (1, 6144, 4096))


def measure(send: Callable[[jobs.Reply], None], quick: bool) -> list[Row]:
    """Rows of what, value, and where it matters ``limit``, the greatest value that is fit."""
    rows: list[Row] = []
    for title, step in (
        ("bandwidth", _bandwidth),
        ("timer", _cross_checks),
        ("L2 knee", _knee),
    ):
        send(Progress(f"doctor: {title}"))
        rows += step()
    for size in SIZES[:1] if quick else SIZES:
        for regime in ("cold", "sustained"):
            send(Progress(f"doctor: A/A floor {size} {regime}"))
            rows.append(_floor(size, regime, judged=min(size) >= 4096))
    return rows


def _row(what: str, value: Any, limit: float | None = None, note: str = "") -> Row:
    return {"what": what, "value": value, "limit": limit, "note": note}


def _bandwidth() -> list[Row]:
    read, copy = timing.bandwidth() / 1e12, timing.copy_bandwidth() / 1e12
    return [_row("read bandwidth, TB/s", round(read, 3)), _row("copy bandwidth, TB/s", round(copy, 3))]


def _product(m: int, n: int, k: int, sets: int) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for _ in range(sets):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        calls.append(functools.partial(torch.mm, a, b.t(), out=c))
    return calls


def _cross_checks() -> list[Row]:
    rows = []
    for name, size in (("long", (4096, 4096, 4096)), ("short", (512, 512, 512))):
        calls = _product(*size, sets=4)
        # the same calls as CUPTI sees, as many and on the same buffers: it is the clocks that are compared
        ours, _ = timing.quick(calls[:1], 0.004)
        limit = CROSS_CHECK if name == "long" else None
        try:
            theirs = timing.cupti_time(calls[0])
        except TimerError as fault:
            rows.append(_row(f"timer against CUPTI, {name} kernel", "not measured", None, str(fault)))
            continue
        note = f"{ours / 1e3:.2f} us here, {theirs / 1e3:.2f} us by CUPTI"
        rows.append(
            _row(f"timer against CUPTI, {name} kernel", round(abs(ours / theirs - 1), 4), limit, note)
        )
    cycles, ns, mhz = timing.known_kernel()
    note = f"{cycles:.0f} cycles in {ns / 1e3:.1f} us at {mhz:.0f} MHz"
    off = round(abs(cycles / ns * 1e3 / mhz - 1), 4) if mhz else "clock unknown"
    rows.append(_row("timer against a kernel of known cycles", off, KNOWN_CHECK if mhz else None, note))
    return rows


def _knee() -> list[Row]:
    knee, curve = timing.l2_knee()
    note = ", ".join(f"{size >> 20} MiB {speed / 1e12:.2f}" for size, speed in curve)
    return [_row("L2 knee, MiB", knee >> 20, None, f"read TB/s by footprint: {note}")]


def _floor(size: tuple[int, int, int], regime: str, judged: bool) -> Row:
    m, n, k = size
    each = 2 * (m * k + n * k + m * n)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    calls = _product(m, n, k, sets=max(2, min(64, -(-4 * l2 // each))))
    hold = timing.race_cold if regime == "cold" else timing.race_sustained
    result = hold([calls, calls], seconds=3.0)
    floor = stats.aa_floor(*result.samples)
    micro = timing.median(result.samples[0]) / 1e3
    note = (
        f"{micro:.1f} us, {len(result.samples[0])} rounds, {result.clock_mhz:.0f} MHz, {result.power_w:.0f} W"
    )
    return _row(f"A/A floor {m}x{n}x{k} {regime}", round(floor, 5), FLOOR[regime] if judged else None, note)
