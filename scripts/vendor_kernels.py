"""Which kernels cuBLAS picks: their names by case, read from CUPTI. Names tell tile, stages and cluster.

python scripts/vendor_kernels.py [OUT.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dsl_bench.workloads.gemm import WORKLOAD

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def names(m: int, n: int, k: int, dtype: torch.dtype) -> list[str]:
    """Kernels that one torch.mm launches."""
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(n, k, device="cuda", dtype=dtype)
    torch.mm(a, b.t())
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.mm(a, b.t())
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]


def main() -> None:
    """Every named case of the gemm workload."""
    found = {c.name: names(c["m"], c["n"], c["k"], DTYPES[c.dtype]) for c in WORKLOAD.cases()}
    text = json.dumps(found, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
