"""Compiles every Triton kernel for sm_90a with this interpreter's Triton; prints what came out as JSON.

A script, not a test: it runs in an environment that has Triton 3.6 and no pytest.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import tempfile
from pathlib import Path


def main() -> None:
    """Compile each kernel's default config for the first case beyond the smoke cases that it can do."""
    backend = importlib.import_module("dsl_bench.backends.triton").BACKEND
    found = {}
    for kernel in backend.kernels():
        cases = importlib.import_module(f"dsl_bench.workloads.{kernel.workload}").WORKLOAD.cases()
        able = (c for c in cases if "smoke" not in c.groups and kernel.valid(c, kernel.default(c)) is None)
        case = next(able, None)
        found[kernel.id] = {"case": case.name if case else ""}
        if case is not None:
            static = json.loads(json.dumps(dict(kernel.static(case, kernel.default(case)))))
            with tempfile.TemporaryDirectory() as folder:
                artifact = backend.compile(kernel.source(static, "sm_90a"), "sm_90a", Path(folder))
                size = (artifact.folder / artifact.cubin).stat().st_size
            found[kernel.id] |= {"assembler": artifact.assembler, "cubin": size}
    print(json.dumps({"triton": importlib.metadata.version("triton"), "kernels": found}))


if __name__ == "__main__":
    main()
