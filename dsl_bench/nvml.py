"""NVML through ctypes: what the driver says of a GPU's clocks, power and processes.

Needs libnvidia-ml.so.1, which every driver brings along, and no package. Used by the clock sampler and by
:mod:`dsl_bench.environment`. Reads only; nothing is ever set.
"""

from __future__ import annotations

import ctypes
import functools
import os
import statistics
import threading
import time
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

from dsl_bench.errors import DslBenchError

PERIOD_S = 0.02

_CLOCK_SM = 1
_FIELD_POWER_INSTANT = 186
_MAX_PROCESSES = 256

#: clock event reasons by bit; idle and application settings are of no interest
REASONS = {
    0x04: "power cap",
    0x08: "hardware slow-down",
    0x10: "sync boost",
    0x20: "software thermal slow-down",
    0x40: "hardware thermal slow-down",
    0x80: "power brake",
}
#: the reasons under which a measurement is worth nothing; a power cap is normal
SLOWDOWN = 0x08 | 0x20 | 0x40 | 0x80


class NvmlError(DslBenchError):
    """NVML is not there or refused; the text says which call."""


class _Value(ctypes.Union):
    _fields_ = (("d", ctypes.c_double), ("ui", c_uint), ("ull", c_ulonglong))


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp", c_longlong),
        ("latency", c_longlong),
        ("type", c_uint),
        ("status", c_uint),
        ("value", _Value),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", c_uint),
        ("memory", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


@functools.cache
def _library() -> Any:
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as fault:
        raise NvmlError(f"NVML is not there: {fault}") from None
    status = lib.nvmlInit_v2()
    if status != 0:
        raise NvmlError(f"nvmlInit_v2 failed with status {status}")
    return lib


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_library(), name, None)
    if function is None:
        raise NvmlError(f"this driver's NVML has no {name}")
    status = function(*arguments)
    if status != 0:
        raise NvmlError(f"{name} failed with status {status}")


def _text(name: str, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(256)
    _call(name, *arguments, buffer, c_uint(256))
    return buffer.value.decode(errors="replace")


def driver_version() -> str:
    """The driver's version (``580.82.07``)."""
    return _text("nvmlSystemGetDriverVersion")


def cuda_version() -> str:
    """The newest CUDA that the driver serves (``13.0``)."""
    value = c_int()
    _call("nvmlSystemGetCudaDriverVersion_v2", byref(value))
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def device_count() -> int:
    """How many GPUs NVML sees; CUDA_VISIBLE_DEVICES does not matter to it."""
    count = c_uint()
    _call("nvmlDeviceGetCount_v2", byref(count))
    return count.value


class Gpu:
    """One GPU, found by its UUID (``GPU-…``) or its index. Raises NvmlError."""

    def __init__(self, uuid: str = "", index: int = 0) -> None:
        self._handle = c_void_p()
        if uuid:
            _call("nvmlDeviceGetHandleByUUID", c_char_p(uuid.encode()), byref(self._handle))
        else:
            _call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(self._handle))

    def _number(self, name: str, *arguments: Any, kind: Any = c_uint) -> int:
        value = kind()
        _call(name, self._handle, *arguments, byref(value))
        return int(value.value)

    @property
    def name(self) -> str:
        """``NVIDIA H200``."""
        return _text("nvmlDeviceGetName", self._handle)

    @property
    def uuid(self) -> str:
        """``GPU-…``."""
        return _text("nvmlDeviceGetUUID", self._handle)

    @property
    def sm_clock(self) -> int:
        """The SM clock now, MHz."""
        return self._number("nvmlDeviceGetClockInfo", c_int(_CLOCK_SM))

    @property
    def max_sm_clock(self) -> int:
        """The highest SM clock, MHz."""
        return self._number("nvmlDeviceGetMaxClockInfo", c_int(_CLOCK_SM))

    @property
    def power_limit(self) -> float:
        """The enforced power limit, W."""
        return self._number("nvmlDeviceGetEnforcedPowerLimit") / 1000.0

    @property
    def power(self) -> float:
        """Instantaneous power, W. (nvmlDeviceGetPowerUsage averages over a second on this generation.)"""
        field = _FieldValue(field=_FIELD_POWER_INSTANT)
        _call("nvmlDeviceGetFieldValues", self._handle, c_int(1), byref(field))
        if field.status != 0:
            raise NvmlError(f"instantaneous power is not available (status {field.status})")
        return float(field.value.ui) / 1000.0

    @property
    def reasons(self) -> int:
        """Why the clock is where it is: bits of :data:`REASONS`."""
        return self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=c_ulonglong)

    @property
    def processes(self) -> list[int]:
        """Ids of the processes with a compute context (of the host, where a container hides its own)."""
        count = c_uint(_MAX_PROCESSES)
        found = (_Process * _MAX_PROCESSES)()
        _call("nvmlDeviceGetComputeRunningProcesses_v3", self._handle, byref(count), found)
        return [int(found[k].pid) for k in range(count.value)]


def foreign_processes(gpu: Gpu, mine: int | None = None) -> list[str]:
    """Other processes on the GPU. Inside a container our own id differs from what NVML reports, so that
    one process of those listed is then taken to be us."""
    try:
        pids = gpu.processes
    except NvmlError:
        return []
    mine = os.getpid() if mine is None else mine
    if mine in pids:
        return [f"pid {pid}" for pid in pids if pid != mine]
    return [f"{len(pids) - 1} of the pids {', '.join(map(str, pids))}"] if len(pids) > 1 else []


@dataclass(frozen=True)
class Reading:
    """One look at the GPU. ``at`` is ``time.perf_counter()``."""

    at: float
    clock_mhz: int
    power_w: float
    reasons: int


@dataclass(frozen=True)
class Summary:
    """What a window of readings showed: medians, the names of the reasons, whether it was slowed down."""

    clock_mhz: float = 0.0
    power_w: float = 0.0
    throttle: tuple[str, ...] = ()
    slowed: bool = False


def summarise(readings: Sequence[Reading]) -> Summary:
    """Medians over ``readings``, and every reason seen in them."""
    if not readings:
        return Summary()
    seen = 0
    for reading in readings:
        seen |= reading.reasons
    return Summary(
        statistics.median(r.clock_mhz for r in readings),
        statistics.median(r.power_w for r in readings),
        tuple(name for bit, name in REASONS.items() if seen & bit),
        bool(seen & SLOWDOWN),
    )


class Sampler:
    """Reads clock, power and reasons every 20 ms on a thread, between ``with`` and its end.

    Where NVML is missing it takes no readings, and ``note`` says why: times stay valid, clocks are unknown.
    Where only the power cannot be read, it reads as 0."""

    def __init__(self, uuid: str = "", period: float = PERIOD_S) -> None:
        self.readings: list[Reading] = []
        self.note = ""
        self.foreign: list[str] = []
        self._period = period
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpu: Gpu | None = None
        try:
            self._gpu = Gpu(uuid)
        except NvmlError as fault:
            self.note = f"clocks and power were not read: {fault}"

    def __enter__(self) -> Sampler:
        if self._gpu is not None:
            self.foreign = foreign_processes(self._gpu)
            self._thread = threading.Thread(target=self._run, name="dsl-bench-clocks", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        assert self._gpu is not None
        while not self._stop.wait(self._period):
            try:
                clock, reasons = self._gpu.sm_clock, self._gpu.reasons
            except NvmlError as fault:
                self.note = f"clocks stopped being read: {fault}"
                return
            self.readings.append(Reading(time.perf_counter(), clock, self._power(), reasons))

    def _power(self) -> float:
        assert self._gpu is not None
        try:
            return self._gpu.power
        except NvmlError as fault:
            self.note = f"power was not read: {fault}"
            return 0.0

    def window(self, start: float, end: float) -> Summary:
        """What was seen from ``start`` to ``end`` (``time.perf_counter()``)."""
        return summarise([r for r in self.readings if start <= r.at <= end])
