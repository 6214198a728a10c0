"""What several backends ask of the host: a CUDA tool's version, and whether the driver has a device."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess

from dsl_bench.plugin import Availability, KernelFault


@functools.cache
def tool_version(path: str) -> str:
    """The version that a CUDA tool names (``13.0.88``). Raises KernelFault where it names none, OSError or
    subprocess.SubprocessError where it does not run."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if found is None:
        raise KernelFault("unavailable", f"{path} --version does not name a version")
    return found.group(1)


def probe_driver(without: str) -> Availability:
    """Whether the CUDA driver is there and has a device; ``without`` says what works where it is not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Availability(False, "no CUDA driver (libcuda.so.1)", without)
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or count.value < 1:
        return Availability(False, f"no CUDA device (driver status {status})", "check CUDA_VISIBLE_DEVICES")
    return Availability(True)
