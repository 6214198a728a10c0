"""``tilelang/gemm_splitk``: C = A·Bᵀ where whole tiles waste much of the last wave; bf16 or fp16, fp32 sum.

The persistent kernel of ``gemm_ws``, its last waves of tiles cut along K, or all tiles of a small product
(see ``_streamk``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dsl_bench.kernels.tilelang import _plan as plan
from dsl_bench.kernels.tilelang import _streamk as streamk
from dsl_bench.kernels.tilelang import gemm_ws

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bm": (128, 256),
    "bn": (256, 128, 64, 192),
    "bk": (64,),
    "stages": (4, 3, 5, 6),
    "split": (-1, 2, 3, 4, -2),
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
    band = int(config["group"])
    return streamk.bind(module, config, inputs["a"], inputs["b"], outputs["c"], module.sms, band)


def _tiles(case: Case, config: Config) -> int:
    return plan.cdiv(case["m"], int(config["bm"])) * plan.cdiv(case["n"], int(config["bn"]))


def valid(case: Case, config: Config) -> str | None:
    """Rules of TMA, shared memory and registers; then whether there is anything to split."""
    bm, bn, bk, stages = (int(config[x]) for x in ("bm", "bn", "bk", "stages"))
    m, n, k = case["m"], case["n"], case["k"]
    if m <= 128:
        return f"M={m}: gemm_skinny splits such products with the weights on wgmma's rows"
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if bm == 256 and bn > 128:
        return "256 rows leave registers for 128 columns of fp32 sums"
    if reason := plan.smem_reason(plan.persistent_bytes(bm, bn, bk, stages)):
        return reason
    if int(config["split"]) < 0 and _best_fill(m, n) > 0.88:
        return "tiles of another shape fill the last wave but for an eighth: whole tiles are better"
    if reason := _split_reason(_tiles(case, config), plan.cdiv(k, bk), int(config["split"])):
        return reason
    if int(config["group"]) != 8 and plan.cdiv(m, bm) <= 8:
        return "the raster's bands are no shorter than the matrix: all heights are the same"
    return None


def _best_fill(m: int, n: int) -> float:
    """The share of useful multiply-adds in the waves of the best whole tile of gemm_ws."""
    shapes = itertools.product(gemm_ws.SPACE["bm"], gemm_ws.SPACE["bn"])
    return max(
        1 / plan.waste(m, n, bm, bn) for bm, bn in shapes if not plan.register_reason(bm, bn) and bm > 64
    )


def _split_reason(tiles: int, steps: int, split: int) -> str | None:
    """Why a split wins nothing, or None. Adding parts up cost 30 µs and more of 185 where whole tiles waste
    less than an eighth of the waves (measured at 4096x4096x4096)."""
    waves = plan.cdiv(tiles, plan.SMS)
    if tiles / (waves * plan.SMS) > 0.88:
        return f"{tiles} tiles fill {waves} waves of {plan.SMS} SMs but for an eighth: whole tiles are better"
    if steps < 4 * max(split, 1):
        return f"{steps} K steps are too few to split"
    if split > 1 and not 0.6 * plan.SMS <= tiles * split <= plan.SMS:
        return f"{tiles * split} parts do not make one wave"
    if split < 0 and tiles < plan.SMS:
        return "there is no full wave: equal parts of whole tiles are the better split"
    if split == -2 and waves > 3:
        return "the ragged wave is short beside the full ones: splitting one of them too only adds parts"
    return None


def _cost(case: Case, config: Config) -> float:
    bm, bn, bk, stages, split = (int(config[x]) for x in ("bm", "bn", "bk", "stages", "split"))
    fuller = plan.smem_reason(plan.persistent_bytes(bm, bn, bk, stages + 1)) is None
    shallow = 1.01 if fuller and stages < 6 else 1.0
    if split > 1:
        return shallow * (plan.clocks(case, bm, bn, bk) / split + plan.fixup(bm, bn, split))
    return shallow * plan.split_clocks(case, bm, bn, bk) * (1.02 if split == -2 else 1.0)


def _ranked(case: Case) -> list[dict[str, Any]]:
    names = ("bm", "bn", "stages", "split")
    configs = (
        {**dict(zip(names, v, strict=True)), "bk": 64, "group": 8}
        for v in itertools.product(*(SPACE[x] for x in names))
    )
    return plan.best_tiles(case, configs, valid, _cost)


def default(case: Case) -> Config:
    """The tile with the fewest estimated clocks."""
    return _ranked(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """The next best tiles."""
    return _ranked(case)[1:4]


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
        files=("_plan.py", "_streamk.py", "gemm_ws.py"),
        summary="persistent by hand, the last waves split along K, sums added up in a fixed order",
    ),
)
