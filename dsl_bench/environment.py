"""What this machine is: GPU, driver, packages, host, git revision. Needs neither torch nor a DSL.

The GPU's facts come from NVML and from the CUDA driver by ctypes; where a fact cannot be had, it is absent.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
from ctypes import byref, c_int
from pathlib import Path
from typing import Any

from dsl_bench import nvml

#: distributions whose versions belong to every result
PACKAGES = (
    "torch",
    "triton",
    "tilelang",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvcc",
    "nvidia-cublas",
    "flashinfer-python",
    "sgl-flash-mla",
    "numpy",
)

_SM_COUNT, _L2_BYTES, _MAJOR, _MINOR, _SMEM_OPTIN = 16, 38, 75, 76, 97


def collect() -> dict[str, Any]:
    """The environment as JSON data, in the order in which it is shown.

    Always: ``gpu`` ("" without one, and then ``gpu_reason``), ``python``, ``host``, ``os``, ``cpu``,
    ``cpus``, ``packages``. With a GPU also ``gpu_uuid``, ``arch``, ``driver``, ``cuda``, ``sms``,
    ``l2_bytes``, ``smem_block_bytes``, ``power_limit_w``, ``max_sm_clock_mhz``, ``foreign``; with a compiler
    ``nvcc``; in a git checkout ``revision``. Bytes, W and MHz as named."""
    found = _gpu()
    found["python"] = platform.python_version()
    found["host"] = platform.node()
    found["os"] = f"{platform.system()} {platform.release()}"
    found["cpu"] = _cpu()
    found["cpus"] = _cpu_count()
    found["packages"] = _packages()
    nvcc = _nvcc()
    if nvcc:
        found["nvcc"] = nvcc
    revision = _revision(Path(__file__).resolve().parent.parent)
    if revision:
        found["revision"] = revision
    return found


def _gpu() -> dict[str, Any]:
    """The GPU that CUDA would call device 0."""
    try:
        uuid, facts = _from_driver()
        gpu = nvml.Gpu(uuid)
        found: dict[str, Any] = {
            "gpu": gpu.name,
            "gpu_uuid": uuid or gpu.uuid,
            "driver": nvml.driver_version(),
        }
    except (nvml.NvmlError, OSError) as fault:
        return {"gpu": "", "gpu_reason": str(fault)}
    found["cuda"] = _or_none(nvml.cuda_version)
    found |= facts
    found["power_limit_w"] = _or_none(lambda: gpu.power_limit)
    found["max_sm_clock_mhz"] = _or_none(lambda: gpu.max_sm_clock)
    found["foreign"] = nvml.foreign_processes(gpu)
    return {name: value for name, value in found.items() if value is not None}


def _or_none(read: Any) -> Any:
    try:
        return read()
    except nvml.NvmlError:
        return None


def _from_driver() -> tuple[str, dict[str, Any]]:
    """UUID and attributes of CUDA's device 0, without a context. Raises OSError where there is no driver
    or, CUDA_VISIBLE_DEVICES minded, no device."""
    cuda = ctypes.CDLL("libcuda.so.1")
    status = cuda.cuInit(0)
    if status != 0:
        raise OSError(f"the CUDA driver does not start (cuInit: status {status})")
    count, device = c_int(), c_int()
    if cuda.cuDeviceGetCount(byref(count)) != 0 or count.value == 0:
        raise OSError("the CUDA driver sees no device")
    cuda.cuDeviceGet(byref(device), 0)
    attributes = {}
    for number in (_SM_COUNT, _L2_BYTES, _MAJOR, _MINOR, _SMEM_OPTIN):
        value = c_int()
        if cuda.cuDeviceGetAttribute(byref(value), number, device) == 0:
            attributes[number] = value.value
    major, minor = attributes.get(_MAJOR, 0), attributes.get(_MINOR, 0)
    # Hopper and later have instructions only in the architecture-specific target
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    facts = {
        "arch": arch,
        "sms": attributes.get(_SM_COUNT),
        "l2_bytes": attributes.get(_L2_BYTES),
        "smem_block_bytes": attributes.get(_SMEM_OPTIN),
    }
    return _uuid(cuda, device), facts


def _uuid(cuda: Any, device: c_int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGetUuid_v2(byref(raw), device) != 0:
        return ""
    digits = bytes(raw).hex()
    cuts = (0, 8, 12, 16, 20, 32)
    return "GPU-" + "-".join(digits[a:b] for a, b in itertools.pairwise(cuts))


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cpu_count() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nvcc() -> str:
    """The version of the nvcc on PATH or in CUDA_HOME (``13.0.88``)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    text = _said(path, "--version") if path else ""
    return next((word[1:].rstrip(",") for word in text.split() if word[0] == "V" and word[1:2].isdigit()), "")


def _revision(folder: Path) -> str:
    """The commit of the checkout that this file lies in, with ``-dirty`` where files differ."""
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    commit = _said(git, "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return ""
    return f"{commit[:12]}-dirty" if _said(git, "-C", str(folder), "status", "--porcelain") else commit[:12]


def _said(*command: str) -> str:
    """What a command prints; "" where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
