"""Triton kernels that are wrong the way kernels are: ``--plugin tests/wrong_kernels/in_triton.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Static

BM = BN = 32
BK = 64


@triton.jit
def product(a, b, c, m, n, k, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A tile of C a block, by pointers; KIND says what is wrong with it ("": nothing)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float16 if KIND == "accumulates_low" else tl.float32)
    for start in range(0, k, BK):
        ks = start + tl.arange(0, BK)
        of_a = rows[:, None] < m
        if KIND != "reads_beyond":
            of_a = of_a & (ks[None, :] < k)
        x = tl.load(a + rows[:, None] * k + ks[None, :], mask=of_a, other=0.0)
        y = tl.load(
            b + cols[:, None] * k + ks[None, :], mask=(cols[:, None] < n) & (ks[None, :] < k), other=0.0
        )
        part = tl.dot(x, tl.trans(y))
        if KIND == "accumulates_low":
            acc += part.to(tl.float16)
        else:
            acc += part
    keep = cols[None, :] < n
    if KIND != "writes_beyond":
        keep = keep & (rows[:, None] < m)
    tl.store(c + rows[:, None] * n + cols[None, :], acc.to(c.dtype.element_ty), mask=keep)


def source(static: Static, arch: str) -> TritonSource:
    """One kind, in fp16."""
    return TritonSource(
        fn=product,
        signature={**dict.fromkeys("abc", "*fp16"), **dict.fromkeys("mnk", "i32")},
        constexprs={"KIND": static["kind"], "BM": BM, "BN": BN, "BK": BK},
        options={"num_warps": 4, "num_stages": 2},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """A block a tile."""
    grid = (-(-case["m"] // BM), -(-case["n"] // BN))
    sizes = (case["m"], case["n"], case["k"])
    return Call(module.launcher(grid, inputs["a"], inputs["b"], outputs["c"], *sizes))


def kernel(kind: str) -> Kernel:
    """The kernel that is wrong in the way called ``kind``."""
    return Kernel(
        id=f"triton/{kind or 'holds'}",
        workload="gemm",
        space={"kind": (kind,)},
        default=lambda case: {"kind": kind},
        valid=lambda case, config: None if case.dtype == "fp16" else "fp16 only",
        source=source,
        bind=bind,
    )


KERNELS = tuple(kernel(kind) for kind in ("", "accumulates_low", "reads_beyond", "writes_beyond"))
