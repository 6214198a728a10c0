"""``tilelang/gemm_skinny`` and ``tilelang/gemv``: few tokens (M up to 128), where reading the weights is all.

``gemm_skinny`` computes Cᵀ = B·Aᵀ: the weights take wgmma's 64-row side, the tokens its narrow side (16 and
up), and every SM streams an equal share of the weights through a deep TMA ring, cut along K where tiles do
not come out even (see ``_streamk``). ``gemv`` is for one token: a warp a row, on CUDA cores.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan
from dsl_bench.kernels.tilelang import _streamk as streamk

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bm": (128, 256),
    "bn": (16, 32, 64, 128),
    "bk": (128, 64),
    "stages": (4, 5, 6, 8, 10, 3),
    "waves": (-1, 0),
}
#: a warp's vector load: 8 elements, 16 bytes a lane
LANE = 8
GEMV_SPACE = {"warps": (4, 8, 16), "rows": (1, 2, 4), "ahead": (4, 8, 2)}


def static(case: Case, config: Config) -> Static:
    """Tile, ring and element type; sizes, grid and split stay runtime values."""
    return {**{x: config[x] for x in ("bm", "bn", "bk", "stages")}, "dtype": plan.ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(streamk.build, {**static, "swap": True}, plan.BY_HAND)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The weights as rows, the tokens as columns; one band holds all rows of tiles."""
    band = plan.cdiv(case["n"], int(config["bm"]))
    return streamk.bind(module, config, inputs["b"], inputs["a"], outputs["c"], int(config["waves"]), band)


def valid(case: Case, config: Config) -> str | None:
    """Few tokens in as narrow a tile as holds them; rules of TMA and shared memory."""
    bm, bn, bk, stages = (int(config[x]) for x in ("bm", "bn", "bk", "stages"))
    m, n, k = case["m"], case["n"], case["k"]
    if m > 128:
        return f"M={m}: made for at most 128 tokens"
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if bn != _columns(m):
        return f"M={m} fits a tile of {_columns(m)} columns"
    ring = plan.ring_bytes(bm, bn, bk, stages)
    if reason := plan.smem_reason(ring + plan.staging_bytes(bm, bn)):
        return reason
    if ring < 65536 and config["stages"] != max(SPACE["stages"]):
        return f"a ring of {ring} bytes is too shallow to stream at full rate"
    tiles = plan.cdiv(n, bm)
    if config["waves"] == 0 and (tiles < plan.SMS or tiles % plan.SMS == 0):
        return "the ragged wave is all there is, or there is none: splitting it alone is no other choice"
    return None


def _columns(m: int) -> int:
    """The narrowest tile for m tokens (8 columns compile to wrong results: tilelang #2593)."""
    return next((w for w in (16, 32, 64, 128) if m <= w), 128)


def _usable(case: Case) -> list[dict[str, Any]]:
    """The deepest ring of each tile; the smaller tile and the longer rows first."""
    bn = _columns(case["m"])
    shapes = itertools.product(SPACE["bm"], SPACE["bk"], sorted(SPACE["stages"], reverse=True))
    rings = [{"bm": bm, "bn": bn, "bk": bk, "stages": s, "waves": -1} for bm, bk, s in shapes]
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for config in rings:
        if valid(case, config) is None:
            best.setdefault((config["bm"], config["bk"]), config)
    return list(best.values()) or [{"bm": 128, "bn": bn, "bk": 128, "stages": 4, "waves": -1}]


def default(case: Case) -> Config:
    """The deepest ring of 128 weight rows by 128."""
    return _usable(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """Only the ragged wave split (the same binary), then the other tiles."""
    best, *others = _usable(case)
    return [{**best, "waves": 0}, *others]


def build_gemv(warps: int, rows: int, ahead: int, dtype: str) -> Any:
    """The prim_func (a [1, k / 8, 8], b [n, k / 8, 8], c [1, n]): a warp does ``rows`` rows of b at a time,
    each lane with ``ahead`` loads of 16 bytes a row under way. The last axis of 8 is what lets TileLang see
    that a load of 16 bytes never crosses the end of a row."""
    n, chunks = T.dynamic("n"), T.dynamic("chunks")

    @T.prim_func
    def gemv(
        a: T.Tensor((1, chunks, LANE), dtype),
        b: T.Tensor((n, chunks, LANE), dtype),
        c: T.Tensor((1, n), dtype),
    ):
        with T.Kernel(T.ceildiv(n, warps * rows), threads=(32, warps)) as block:
            lane = T.get_thread_binding(0)
            warp = T.get_thread_binding(1)
            x = T.alloc_local((ahead, LANE), dtype)
            w = T.alloc_local((ahead, rows, LANE), dtype)
            acc = T.alloc_local((rows, LANE), "float32")
            total = T.alloc_local((rows,), "float32")
            for r in T.unroll(rows):
                for v in T.unroll(LANE):
                    acc[r, v] = 0.0
            for turn in T.serial(T.ceildiv(chunks, 32 * ahead)):
                for u in T.unroll(ahead):
                    for r in T.unroll(rows):
                        for v in T.vectorized(LANE):
                            w[u, r, v] = b[
                                (block * warps + warp) * rows + r, (turn * ahead + u) * 32 + lane, v
                            ]
                    for v in T.vectorized(LANE):
                        x[u, v] = a[0, (turn * ahead + u) * 32 + lane, v]
                for u in T.unroll(ahead):
                    for r in T.unroll(rows):
                        for v in T.unroll(LANE):
                            acc[r, v] = acc[r, v] + T.cast(x[u, v], "float32") * T.cast(w[u, r, v], "float32")
            for r in T.unroll(rows):
                total[r] = 0.0
                for v in T.unroll(LANE):
                    total[r] = total[r] + acc[r, v]
                for shift in T.unroll(5):
                    total[r] = total[r] + T.shfl_xor(total[r], 16 >> shift)
                if lane == 0:
                    if (block * warps + warp) * rows + r < n:
                        c[0, (block * warps + warp) * rows + r] = T.cast(total[r], dtype)

    return gemv


def static_gemv(case: Case, config: Config) -> Static:
    """The config and the element type; sizes stay runtime values."""
    return {**{x: config[x] for x in GEMV_SPACE}, "dtype": plan.ELEMENT[case.dtype]}


def source_gemv(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build_gemv, dict(static))


def bind_gemv(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Views of 8 elements, 16 bytes."""
    a, b = (inputs[x].view(inputs[x].shape[0], -1, LANE) for x in ("a", "b"))
    return Call(module.launcher(a, b, outputs["c"]))


def valid_gemv(case: Case, config: Config) -> str | None:
    """One token, rows that start on 16 bytes, and enough loads under way."""
    m, n, k = case["m"], case["n"], case["k"]
    if m != 1:
        return f"M={m}: made for one token"
    if k % LANE:
        return f"K={k}: rows must start on 16 bytes, so K divisible by 8"
    if int(config["rows"]) * int(config["ahead"]) > 16:
        return "more than 16 loads a lane do not fit the registers of a full SM"
    return plan.size_reason(n * k)


def default_gemv(case: Case) -> Config:
    """Eight warps a block, a row a warp, 128 bytes a lane under way."""
    return {"warps": 8, "rows": 1, "ahead": 8}


def seeds_gemv(case: Case) -> Sequence[Config]:
    """Two rows a warp share the token's loads; fewer warps even out the last wave."""
    return [
        {"warps": 8, "rows": 2, "ahead": 4},
        {"warps": 4, "rows": 2, "ahead": 8},
        {"warps": 4, "rows": 1, "ahead": 8},
    ]


_NEEDS = Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",))
KERNELS = (
    Kernel(
        id="tilelang/gemm_skinny",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=_NEEDS,
        files=("_plan.py", "_streamk.py"),
        summary="few tokens: operands swapped, weights streamed in equal shares by all SMs",
    ),
    Kernel(
        id="tilelang/gemv",
        workload="gemm",
        space=GEMV_SPACE,
        default=default_gemv,
        seeds=seeds_gemv,
        valid=valid_gemv,
        static=static_gemv,
        source=source_gemv,
        bind=bind_gemv,
        needs=_NEEDS,
        files=("_plan.py",),
        summary="one token: a warp a row on CUDA cores",
    ),
)
