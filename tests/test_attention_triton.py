"""The Triton attention kernels: compiled for sm_90a without a GPU, and run by Triton's interpreter.

The interpreter takes over every ``@triton.jit`` of its process, so it gets one of its own: this file, run as
a script with TRITON_INTERPRET=1 and the workloads' names.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsl_bench.kernel import Kernel
from dsl_bench.workload import Case, int_list

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(600)

WORKLOADS = ("attention_prefill", "attention_decode", "mla_decode")


def kernels(workload: str) -> dict[str, Kernel]:
    from dsl_bench.backends.triton import BACKEND

    return {kernel.id: kernel for kernel in BACKEND.kernels() if kernel.workload == workload}


def cases(workload: str) -> dict[str, Case]:
    module = importlib.import_module(f"dsl_bench.workloads.{workload}")
    return {case.name: case for case in module.WORKLOAD.cases()}


def _forms(kernel: Kernel, case: Case) -> list[dict]:
    """The default and one valid config for every value of every axis."""
    default = dict(kernel.default(case))
    found = [default]
    for config in kernel.configs():
        new = any(all(config[k] != c[k] for c in found) for k in config)
        if new and kernel.valid(case, config) is None:
            found.append(config)
    return found


def interpret(kernel: Kernel, case: Case, config: dict, sms: int) -> dict:
    """RMS error of the first and of a second run of one binding, as multiples of the yardstick's."""
    import numpy as np
    import torch

    from dsl_bench.backends.triton import BACKEND

    workload = importlib.import_module(f"dsl_bench.workloads.{case.workload}").WORKLOAD
    torch.manual_seed(0)
    types = {"fp16": torch.float16, "int32": torch.int32}
    specs = {s.name: s for s in workload.specs(case)}
    index = workload.index(case, np.random.default_rng(1))
    inputs = {
        name: torch.from_numpy(index[name]) if name in index else torch.randn(s.shape).to(types[s.dtype])
        for name, s in specs.items()
        if s.role != "output"
    }
    outputs = {
        n: torch.full(s.shape, math.nan, dtype=types[s.dtype]) for n, s in specs.items() if s.role == "output"
    }
    static = json.loads(json.dumps(dict(kernel.static(case, config))))
    module = BACKEND.interpret(kernel.source(static, "sm_90a"))
    module.sms = sms
    call = kernel.bind(module, case, config, inputs, outputs)
    exact = workload.reference(case, inputs)["o"]
    yard = (workload.yardstick(case, inputs)["o"].double() - exact).norm()
    errors = []
    for _ in range(2):
        outputs["o"].fill_(math.nan)
        call.run()
        error = float((outputs["o"].double() - exact).norm())
        errors.append(error / float(yard) if yard else 1.0 + error)
    return {"kernel": kernel.id, "case": case.name, "config": config, "sms": sms, "errors": errors}


def _all(workload: str) -> Iterator[dict]:
    """Every form on the smoke cases with few and many shares; the default on the edge cases, in fp16."""
    for kernel in kernels(workload).values():
        if "gluon" in kernel.id:
            continue
        for case in cases(workload).values():
            if "smoke" in case.groups:
                for i, config in enumerate(_forms(kernel, case)):
                    yield interpret(kernel, case, config, (4, 40, 13)[i % 3])
            elif "edge" in case.groups:
                small = replace(case, dtype="fp16")
                yield interpret(kernel, small, dict(kernel.default(small)), 24)


def main() -> None:
    """Interpret the kernels of the workloads that are named; prints the results as JSON."""
    json.dump([r for workload in sys.argv[1:] for r in _all(workload)], sys.stdout)


if __name__ == "__main__":
    main()
