"""Which kernels cuBLAS picks and which stand behind cublasLt's algorithms: names from CUPTI, which tell tile,
stages and cluster.

python scripts/vendor_kernels.py [OUT.json] [CASE ...]

For each case of the gemm workload (all named ones, or those given by name): what ``torch.mm`` launches, and
what each number of ``vendor/cublaslt`` does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dsl_bench import errors
from dsl_bench.backends import vendor
from dsl_bench.plugin import Case, KernelFault
from dsl_bench.workloads.gemm import WORKLOAD

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def launched(run: Callable[[], object]) -> list[str]:
    """Names of the kernels that ``run`` launches."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]


def names(case: Case, library: object) -> dict[str, list[str]]:
    """Kernels of one product, by ``mm`` and by the algorithm's number."""
    m, n, k, dtype = case["m"], case["n"], case["k"], DTYPES[case.dtype]
    inputs = {
        "a": torch.randn(m, k, device="cuda", dtype=dtype),
        "b": torch.randn(n, k, device="cuda", dtype=dtype),
    }
    outputs = {"c": torch.empty(m, n, device="cuda", dtype=dtype)}
    found = {"mm": launched(lambda: torch.mm(inputs["a"], inputs["b"].t()))}
    for number in range(vendor.ALGORITHMS):
        try:
            call = vendor.CUBLASLT.bind(library, case, {"algo": number}, inputs, outputs)
        except KernelFault:
            break
        found[str(number)] = launched(call.run)
    return found


def main() -> None:
    """The cases asked for, as JSON into a file or onto the terminal."""
    wanted = sys.argv[2:]
    known = [c.name for c in WORKLOAD.cases()]
    for name in wanted:
        if name not in known:
            sys.exit(str(errors.unknown("case", name, known)))
    cases = [c for c in WORKLOAD.cases() if not wanted or c.name in wanted]
    backend = vendor.BACKEND
    library = backend.load(backend.compile("", "sm_90a", Path(tempfile.mkdtemp())))
    text = json.dumps({c.name: names(c, library) for c in cases}, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
