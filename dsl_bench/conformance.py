"""What a workload promises, looked at case by case: the kit's tests and `dsl-bench check` ask the same.

Used in workers and in the conformance kit; torch is imported inside the functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dsl_bench.workload import DTYPES, Case, Workload


def naming_faults(workload: Workload) -> list[str]:
    """Cases that share a name, have an unknown dtype, another workload's name or no group, and a workload
    without a smoke case: a line each."""
    cases = workload.cases()
    names = [c.name for c in cases]
    found = [f"{name}: two cases of this name" for name in sorted({n for n in names if names.count(n) > 1})]
    for case in cases:
        if case.dtype not in DTYPES:
            found.append(f"{case.name}: dtype {case.dtype!r} is none of {', '.join(DTYPES)}")
        if case.workload != workload.name:
            found.append(f"{case.name}: names the workload {case.workload!r}, not {workload.name!r}")
        if not case.groups:
            found.append(f"{case.name}: is in no group")
    if not smoke_cases(workload):
        found.append("no case is in the group smoke, for interpreters and first runs")
    return found


def smoke_cases(workload: Workload) -> list[Case]:
    """The cases small enough for a CPU."""
    return [c for c in workload.cases() if "smoke" in c.groups]


def work_faults(workload: Workload, case: Case) -> list[str]:
    """FLOPs and bytes that are not positive numbers."""
    counted = {"flops": workload.flops(case), "bytes": workload.bytes(case)}
    return [
        f"{name} = {value}" for name, value in counted.items() if not (math.isfinite(value) and value > 0)
    ]


def reference_faults(workload: Workload, case: Case) -> list[str]:
    """What is wrong with the reference of a (small) case: its outputs have to be those of ``specs``, in
    float64, finite. Needs torch."""
    import torch

    inputs = _inputs(workload, case)
    outputs = workload.reference(case, inputs)
    wanted = {s.name: s.shape for s in workload.specs(case) if s.role == "output"}
    given = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    if given != wanted:
        return [f"the reference gives {given}, specs() promises {wanted}"]
    found = [f"{n} is {t.dtype}, not float64" for n, t in outputs.items() if t.dtype != torch.float64]
    return found + [f"{n} is not finite" for n, t in outputs.items() if not bool(torch.isfinite(t).all())]


def _inputs(workload: Workload, case: Case) -> dict[str, Any]:
    """Random tensors on the CPU, in the case's precision, and the case's own index tensors."""
    import torch

    from dsl_bench.arena import DTYPES as kinds

    index = workload.index(case, np.random.default_rng(0))
    return {
        s.name: torch.from_numpy(index[s.name])
        if s.role == "index"
        else torch.randn(s.shape, dtype=torch.float32).to(kinds[s.dtype])
        for s in workload.specs(case)
        if s.role != "output"
    }


def examine(workload: Workload) -> Iterator[tuple[str, str, str]]:
    """(case, what is wrong or "", what was seen), for every smoke case and whatever is wrong elsewhere."""
    for line in naming_faults(workload):
        yield "", line, ""
    smoke = {c.name for c in smoke_cases(workload)}
    for case in workload.cases():
        wrong = work_faults(workload, case)
        if case.name in smoke:
            wrong += reference_faults(workload, case)
        if wrong or case.name in smoke:
            work = f"{workload.flops(case):.4g} FLOPs, {workload.bytes(case):.4g} bytes"
            yield case.name, "; ".join(wrong), f"the float64 reference is whole; {work}"
