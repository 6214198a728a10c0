"""``tilelang/gemm_skinny`` and ``tilelang/gemv``: few tokens (M up to 128), where reading the weights is all.

``gemm_skinny`` computes Cᵀ = B·Aᵀ: the weights take wgmma's 64-row side, the tokens its narrow side (16 and
up), and every SM streams weights through a deep TMA ring, one block or two. Tiles of 64 rows are done whole
where there are enough of them, otherwise cut along K (see ``_streamk``). ``gemv`` is for one token: a warp a
row, on CUDA cores.
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
    "bm": (64, 128, 256),
    "bn": (16, 32, 64, 128),
    "bk": (128, 64),
    "stages": (10, 8, 7, 6, 5, 4, 3, 2, 20, 14),
    "resident": (1, 2),
    "split": (1, 2, 3, 4, 0, -1),
}
#: a warp's vector load: 8 elements, 16 bytes a lane
LANE = 8
GEMV_SPACE = {"warps": (4, 8, 16), "rows": (1, 2, 4), "ahead": (4, 8, 2)}


def static(case: Case, config: Config) -> Static:
    """Tile, ring and element type; sizes, grid and split stay runtime values."""
    baked = ("bm", "bn", "bk", "stages", "resident")
    return {**{x: config[x] for x in baked}, "dtype": plan.ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(streamk.build, {**static, "swap": True}, plan.BY_HAND)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The weights as rows, the tokens as columns; one band holds all rows of tiles."""
    band = plan.cdiv(case["n"], int(config["bm"]))
    slots = module.sms * int(config["resident"])
    return streamk.bind(module, config, inputs["b"], inputs["a"], outputs["c"], slots, band)


def valid(case: Case, config: Config) -> str | None:
    """Few tokens in as narrow a tile as holds them; rules of TMA and shared memory; rings and splits that can
    keep the memory busy."""
    bm, bn, stages, resident = (int(config[x]) for x in ("bm", "bn", "stages", "resident"))
    m, n, k = case["m"], case["n"], case["k"]
    if m > 128:
        return f"M={m}: made for at most 128 tokens"
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if bn != _columns(m):
        return f"M={m} fits a tile of {_columns(m)} columns"
    if resident > 1 and (bm > 64 or bn > 64):
        return "two blocks an SM are made of 64 rows and at most 64 tokens"
    if reason := plan.smem_reason(_bytes(config) * resident + 1024 * (resident - 1)):
        return reason
    if stages != _deepest({**config, "resident": resident}):
        return "the ring of this tile can be deeper"
    return _split_reason(case, config)


def _bytes(config: Config) -> int:
    return plan.persistent_bytes(*(int(config[x]) for x in ("bm", "bn", "bk", "stages")))


def _deepest(config: Config) -> int:
    """The deepest ring that fits, of those in the space."""
    resident = int(config["resident"])
    fitting = (
        s
        for s in SPACE["stages"]
        if plan.smem_reason(_bytes({**config, "stages": s}) * resident + 1024 * (resident - 1)) is None
    )
    return max(fitting, default=0)


def _split_reason(case: Case, config: Config) -> str | None:
    """Why a split leaves SMs idle, or adds parts up for nothing, or None."""
    tiles, steps = plan.cdiv(case["n"], int(config["bm"])), plan.cdiv(case["k"], int(config["bk"]))
    slots, split = plan.SMS * int(config["resident"]), int(config["split"])
    if split == 1:
        return f"{tiles} tiles leave most of the memory idle" if tiles < 0.6 * plan.SMS else None
    if split == 0:
        return "whole tiles fill the SMs" if tiles >= slots or 0.9 * plan.SMS <= tiles else None
    if split == -1:
        return "no ragged wave to split behind a full one" if tiles < slots or tiles % slots == 0 else None
    if steps < 4 * split:
        return f"K={case['k']} is too short for {split} parts"
    blocks = tiles * split
    if blocks > 2.1 * plan.SMS or blocks < 0.6 * plan.SMS:
        return f"{blocks} parts: too many to add up, or too few to keep the memory busy"
    return None


def _columns(m: int) -> int:
    """The narrowest tile for m tokens (8 columns compile to wrong results: tilelang #2593)."""
    return next((w for w in (16, 32, 64, 128) if m <= w), 128)


def _cost(case: Case, config: Config) -> float:
    """Estimated µs: weights from memory (4.2 TB/s) or, with the tokens that every tile reads again, from L2
    (5.5 TB/s); SMs left idle beyond what saturates the memory; a tail of few tiles (110 GB/s an SM); adding
    parts up (at 16x6144x4096 on an H200 shares of all tiles cost 3.6 µs more than whole tiles)."""
    bm, bn, resident, split = (int(config[x]) for x in ("bm", "bn", "resident", "split"))
    n, k, slots = case["n"], case["k"], plan.SMS * resident
    tiles = plan.cdiv(n, bm)
    read = max(n * k * 2 / 4.2e6, (n + tiles * bn) * k * 2 / 5.5e6)
    parts = split if split > 0 else max(1.0, slots / tiles)
    blocks = tiles * split if split > 0 else slots
    read /= min(1.0, blocks / (0.68 * plan.SMS))
    tail = tiles % slots if split == 1 and tiles > slots else 0
    idle = max(0.0, 1 - tail / 45) * bm * k * 2 / 110e3 if tail else 0.0
    joined = 0.0 if split == 1 else 2.0 + (split <= 0) + bm * bn * 4 / 110e3 * (1 + parts)
    return read * (1.05 if int(config["stages"]) < 3 else 1.0) + idle + joined + 0.1 * (resident > 1)


def _ranked(case: Case) -> list[dict[str, Any]]:
    """Valid configs, cheapest first, one of each form; 128 K elements a step before 64."""
    bn = _columns(case["m"])
    names = ("bm", "bk", "stages", "resident", "split")
    found = (
        {"bn": bn, **dict(zip(names, v, strict=True))} for v in itertools.product(*(SPACE[x] for x in names))
    )
    ordered = ({x: config[x] for x in SPACE} for config in found)
    usable = sorted((c for c in ordered if valid(case, c) is None), key=lambda c: _cost(case, c))
    return usable or [{"bm": 64, "bn": bn, "bk": 128, "stages": 4, "resident": 1, "split": 1}]


def default(case: Case) -> Config:
    """The config with the least estimated time."""
    return _ranked(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """The next best, each tile and split once, whole tiles first; then shorter steps of the best."""
    best, *others = _ranked(case)
    seen = {tuple(best[x] for x in ("bm", "resident", "split"))}
    found = []
    for config in others:
        form = tuple(config[x] for x in ("bm", "resident", "split"))
        if form not in seen:
            seen.add(form)
            found.append(config)
    shorter = [c for c in others if c["bk"] != best["bk"] and c["bm"] == best["bm"]]
    found.sort(key=lambda c: c["split"] != 1)
    return [*found[:5], *shorter[:1], *found[5:7]]


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
        {"warps": 4, "rows": 2, "ahead": 4},
        {"warps": 8, "rows": 4, "ahead": 4},
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
