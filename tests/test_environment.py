"""What is collected of a machine, with and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dsl_bench import environment, nvml


def test_collecting_needs_no_torch_and_gives_json() -> None:
    code = (
        "import sys, json; from dsl_bench import environment; print(json.dumps(environment.collect()));"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {"gpu", "python", "host", "cpus", "packages"} <= set(found)
    assert found["gpu"] or found["gpu_reason"]


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        name, uuid, power_limit, max_sm_clock, processes = "NVIDIA H200", "GPU-1", 700.0, 1980, ()

        def __init__(self, uuid: str) -> None:
            assert uuid == "GPU-1"

    def refused() -> str:
        raise nvml.NvmlError("no")

    monkeypatch.setattr(environment, "_from_driver", lambda: ("GPU-1", {"arch": "sm_90a", "sms": 132}))
    monkeypatch.setattr(nvml, "Gpu", Gpu)
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.82")
    monkeypatch.setattr(nvml, "cuda_version", refused)
    found = environment.collect()
    assert (found["gpu"], found["gpu_uuid"], found["arch"], found["sms"]) == (
        "NVIDIA H200",
        "GPU-1",
        "sm_90a",
        132,
    )
    assert (found["driver"], found["power_limit_w"], found["foreign"]) == ("580.82", 700.0, [])
    assert "cuda" not in found
    assert "gpu_reason" not in found
