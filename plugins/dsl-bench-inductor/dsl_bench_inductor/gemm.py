"""GEMM: C[M,N] = A[M,K] · B[N,K]ᵀ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl_bench.plugin import Call, Case, Config, Kernel, Static


def product(c: Any, a: Any, b: Any) -> None:
    """The product, into c [M,N]; a [M,K], b [N,K]. Copying it there is an epilogue that Inductor may fuse."""
    c.copy_(a @ b.t())


def whole_case(case: Case, config: Config) -> Static:
    """Every size is baked in."""
    return {"case": case.name}


def no_source(static: Static, arch: str) -> str:
    """Nothing is compiled before there is a device."""
    return ""


def _bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    return Call(module.call(product, outputs["c"], inputs["a"], inputs["b"]))


KERNELS = (
    Kernel(
        id="inductor/gemm",
        workload="gemm",
        space={},
        default=lambda case: {},
        static=whole_case,
        source=no_source,
        bind=_bind,
        files=("compiler.py",),
        summary="a @ b.t(), by Inductor's Triton templates",
    ),
)
