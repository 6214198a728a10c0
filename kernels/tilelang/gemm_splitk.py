"""``tilelang/gemm_splitk``: C = A·Bᵀ where the tiles leave a ragged last wave; bf16 or fp16, fp32 sum.

The persistent kernel of ``gemm_ws``, its last waves of tiles cut along K (see ``_streamk``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dsl_bench.kernels.tilelang import _plan as plan
from dsl_bench.kernels.tilelang import _streamk as streamk

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bm": (128, 256),
    "bn": (256, 128, 64, 192),
    "bk": (64,),
    "stages": (4, 3, 5, 6),
    "waves": (0, 1),
    "group": (8, 16),
}


def static(case: Case, config: Config) -> Static:
    """Tile, ring and element type; sizes, grid, raster and split stay runtime values."""
    return {**{x: config[x] for x in ("bm", "bn", "bk", "stages")}, "dtype": plan.ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(streamk.build, {**static, "swap": False}, plan.BY_HAND)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Workspace, counters and the split."""
    waves, band = int(config["waves"]), int(config["group"])
    return streamk.bind(module, config, inputs["a"], inputs["b"], outputs["c"], waves, band)


def _tiles(case: Case, config: Config) -> int:
    return plan.cdiv(case["m"], int(config["bm"])) * plan.cdiv(case["n"], int(config["bn"]))


def valid(case: Case, config: Config) -> str | None:
    """Rules of TMA, shared memory and registers; then whether there is anything to split."""
    bm, bn, bk, stages, waves = (int(config[x]) for x in ("bm", "bn", "bk", "stages", "waves"))
    m, n, k = case["m"], case["n"], case["k"]
    if m <= 128:
        return f"M={m}: gemm_skinny splits such products with the weights on wgmma's rows"
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if bm == 256 and bn > 128:
        return "256 rows leave registers for 128 columns of fp32 sums"
    if reason := plan.smem_reason(plan.persistent_bytes(bm, bn, bk, stages)):
        return reason
    tiles = _tiles(case, config)
    if tiles % plan.SMS == 0:
        return f"{tiles} tiles come out even on {plan.SMS} SMs: nothing to split"
    if waves == 1 and tiles < plan.SMS:
        return "there is no full wave to split"
    if plan.cdiv(k, bk) < 4:
        return f"K={k} is too short to split"
    if int(config["group"]) != 8 and plan.cdiv(m, bm) <= 8:
        return "the raster's bands are no shorter than the matrix: all heights are the same"
    return None


def _cost(case: Case, config: Config) -> float:
    bm, bn, stages = (int(config[x]) for x in ("bm", "bn", "stages"))
    fuller = plan.ring_bytes(bm, bn, 64, stages + 1) + plan.staging_bytes(bm, bn) + 1024 <= plan.SMEM_LIMIT
    return plan.split_clocks(case, bm, bn, int(config["bk"])) * (1.01 if fuller and stages < 4 else 1.0)


def _ranked(case: Case) -> list[dict[str, Any]]:
    shapes = itertools.product(SPACE["bm"], SPACE["bn"], SPACE["stages"])
    configs = (
        {"bm": bm, "bn": bn, "bk": 64, "stages": stages, "waves": 0, "group": 8} for bm, bn, stages in shapes
    )
    return plan.best_tiles(case, configs, valid, _cost)


def default(case: Case) -> Config:
    """The tile with the fewest estimated clocks, its ragged last wave split."""
    return _ranked(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """One full wave split as well (the same binary), then the next best tiles."""
    best, *others = _ranked(case)[:4]
    return [{**best, "waves": 1}, *others]


KERNELS = (
    Kernel(
        id="tilelang/gemm_splitk",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_plan.py", "_streamk.py"),
        summary="persistent by hand, the last waves split along K, sums added up in a fixed order",
    ),
)
