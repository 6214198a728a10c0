"""``tilelang/gemm``: C = A·Bᵀ by ``T.Pipelined``, bf16 or fp16 in and out, fp32 sum.

What a TileLang user writes first. TileLang makes of it a warp-specialised kernel: a producer warpgroup (24
registers) that feeds a TMA ring, and one or two consumer warpgroups (240 registers); C leaves through shared
memory by TMA. Shapes are symbolic, tensor maps are made at launch: one binary serves every size. Rows must
start on 16 bytes; what reaches beyond a tensor is zero-filled on load and clipped on store by TMA.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bm": (128, 256, 64),
    "bn": (256, 128, 64, 160, 176, 192, 208, 224),
    "stages": (3, 4, 5, 2),
    "panel": (10, 4, 0),
}
BK = 64


def build(bm: int, bn: int, stages: int, panel: int, dtype: str) -> Any:
    """The prim_func (a [m, k], b [n, k], c [m, n]). ``panel``: rows of blocks that
    take turns in the raster, to share operands in L2; 0: TileLang's plain order.

    FullRow gives every warpgroup 64 rows and all columns, so that a K step of 16 is one wgmma of the widest
    kind; TileLang's default would cut the columns."""
    m, n, k = T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    threads = 128 if bm == 64 else 256

    @T.prim_func
    def gemm(a: T.Tensor((m, k), dtype), b: T.Tensor((n, k), dtype), c: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (col, row):
            a_tile = T.alloc_shared((bm, BK), dtype)
            b_tile = T.alloc_shared((bn, BK), dtype)
            c_tile = T.alloc_shared((bm, bn), dtype)
            acc = T.alloc_fragment((bm, bn), "float32")
            if panel:
                T.use_swizzle(panel)
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, BK), num_stages=stages):
                T.copy(a[row * bm, step * BK], a_tile)
                T.copy(b[col * bn, step * BK], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(acc, c_tile)
            T.copy(c_tile, c[row * bm, col * bn])

    return gemm


def static(case: Case, config: Config) -> Static:
    """The config and the element type; sizes stay runtime values."""
    return {**{name: config[name] for name in SPACE}, "dtype": plan.ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build, dict(static))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Nothing to prepare: TileLang's host code reads the shapes off the tensors."""
    return Call(module.launcher(inputs["a"], inputs["b"], outputs["c"]))


def valid(case: Case, config: Config) -> str | None:
    """Rules of TMA, shared memory, registers, and a hang that TileLang 0.1.15 is known for."""
    bm, bn, stages = (int(config[x]) for x in ("bm", "bn", "stages"))
    m, n, k = case["m"], case["n"], case["k"]
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if k <= BK:
        return f"K={k} is a single step of {BK}: such a specialised loop can hang (tilelang #2566)"
    if reason := plan.register_reason(bm, bn):
        return reason
    if stages == 2 and bm + bn < 384:
        return "two stages hide too little of a short step"
    if plan.waste(m, n, bm, bn) > 1.5 * min(plan.waste(m, n, 128, x) for x in (256, 192, 128, 64)):
        return "the tiles waste half as much again as plain ones"
    # C is staged where the ring was
    return plan.smem_reason(max(plan.ring_bytes(bm, bn, BK, stages), bm * bn * 2))


def _cost(case: Case, config: Config) -> float:
    """Estimated clocks; a shallow ring counts against a config, most where a step is short."""
    bm, bn, stages = (int(config[x]) for x in ("bm", "bn", "stages"))
    shallow = {2: 1.2, 3: 1.02 if bm * bn >= 32768 else 1.1}.get(stages, 1.0)
    return plan.clocks(case, bm, bn, BK, persistent=False) * shallow


def _ranked(case: Case) -> Sequence[Config]:
    shapes = itertools.product(SPACE["bm"], SPACE["bn"], (4, 3, 5))
    configs = ({"bm": bm, "bn": bn, "stages": stages, "panel": 10} for bm, bn, stages in shapes)
    return plan.best_tiles(case, configs, valid, _cost)


def default(case: Case) -> Config:
    """The tile with the fewest estimated clocks."""
    return _ranked(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """The next best tiles, and the best one with another raster."""
    best, *others = _ranked(case)[:5]
    return [*others, {**best, "panel": 4}] if case["m"] > 128 else others[:1]


KERNELS = (
    Kernel(
        id="tilelang/gemm",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_plan.py",),
        summary="T.Pipelined, warp-specialised by TileLang, TMA in and out",
    ),
)
