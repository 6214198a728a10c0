"""GEMM by hand: C[M,N] = A[M,K] · B[N,K]ᵀ, bf16 or fp16, accumulated in fp32. Device code: gemm.cu.

``cuda/gemm`` wants rows that start on 16 bytes. ``cuda/gemm_unaligned`` takes any: the same kernel, with
eight tensor maps an operand. One binary serves all shapes; raster and cuts of K are arguments.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _tma
from dsl_bench.kernels.cuda._plan import (
    INT32_MAX,
    Tile,
    blocks_of,
    cut_reason,
    gemm_clocks,
    gemm_work,
    ranked,
    spread,
    tma_reason,
)

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs

#: the tiles whose sums and ring fit, widest first
COOP = (
    *("128x256", "256x128", "256x192", "256x176", "256x160", "192x192", "192x176", "192x160", "192x128"),
    *("128x224", "128x208", "128x192", "128x176", "128x160", "128x128", "128x96", "128x64"),
    *("64x256", "64x128"),
)
PINGPONG = ("128x192", "128x176", "128x160", "128x128", "192x128", "64x256", "64x224", "64x192", "64x128")
SPACE: dict[str, Sequence[Any]] = {
    "tile": (*(f"{t} coop" for t in COOP), *(f"{t} pingpong" for t in PINGPONG)),
    "cluster": ("2x1", "1x2", "1x1"),
    "stages": (3, 4, 5, 6, 7, 8),
    "group": (8, 16, 4),
    "splits": (1, 0, 2, 3, 4, 8),
}
UNALIGNED_TILES = (
    *("128x256 coop", "128x192 coop", "128x128 coop", "256x128 coop", "256x192 coop", "128x64 coop"),
    *("64x256 coop", "64x128 coop", "128x192 pingpong", "128x128 pingpong"),
)
UNALIGNED_SPACE: dict[str, Sequence[Any]] = {
    **SPACE,
    "tile": UNALIGNED_TILES,
    "group": (8, 16),
    "splits": (1, 0, 2, 4),
}


def parse_tile(text: str) -> Tile:
    """``"128x256 coop"`` as a Tile."""
    size, _, schedule = text.partition(" ")
    bm, bn = size.split("x")
    return Tile(int(bm), int(bn), schedule)


def _ring_reason(tile: Tile, stages: int) -> str | None:
    most = tile.max_stages()
    if stages > most:
        return f"{stages} stages of {tile.stage_bytes} B do not fit in shared memory, {most} do"
    if stages < min(most, 8) - 1:
        return f"{stages} stages leave shared memory unused: {most} fit"
    if not tile.fits_registers():
        return f"{tile.accumulators} sums a thread do not fit its registers"
    return None


def _reason(case: Case, config: Config) -> str | None:
    """What holds for both kernels."""
    tile = parse_tile(str(config["tile"]))
    cluster, splits = str(config["cluster"]), int(config["splits"])
    cm, cn = blocks_of(cluster)
    if (tile.bm // cn) % 8 or (tile.bn // cm) % 8:
        return f"halves of a {tile.bm}x{tile.bn} tile are not whole swizzle atoms of 8 rows"
    reason = _ring_reason(tile, int(config["stages"]))
    if reason:
        return reason
    if max(case["m"], case["n"], case["k"]) > INT32_MAX - 1024:
        return "a size exceeds 32 bits"
    if (cm > 1 and case["m"] <= tile.bm) or (cn > 1 and case["n"] <= tile.bn):
        return f"a single tile along {'M' if cm > 1 else 'N'}: nothing for a cluster to share"
    work = gemm_work(case, tile, cluster, int(config["group"]), 1)
    return cut_reason(work, splits, cm * cn * tile.bm * tile.bn * 4)


def valid(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/gemm`` cannot do ``case`` with ``config``."""
    return tma_reason(K=case["k"], N=case["n"]) or _reason(case, config)


def valid_unaligned(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/gemm_unaligned`` cannot do ``case`` with ``config``."""
    tile = parse_tile(str(config["tile"]))
    if tile.bn % 64 or 64 % (tile.bm // 8):
        return f"a {tile.bm}x{tile.bn} tile cannot be sorted into eight residues"
    return _reason(case, config)


def static(residues: int, case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in: the tile, the ring, the cluster, the type, and whether K may be cut."""
    tile = parse_tile(str(config["tile"]))
    cm, cn = blocks_of(str(config["cluster"]))
    stages = int(config["stages"])
    return {
        "bm": tile.bm,
        "bn": tile.bn,
        "pingpong": int(tile.schedule == "pingpong"),
        "cluster_m": cm,
        "cluster_n": cn,
        "stages": stages,
        "partial": int(int(config["splits"]) != 1),
        "bf16": int(case.dtype == "bf16"),
        "residues": residues,
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """gemm.cu with its macros."""
    tile = Tile(static["bm"], static["bn"], "pingpong" if static["pingpong"] else "coop")
    stages, blocks = static["stages"], static["cluster_m"] * static["cluster_n"]
    smem = tile.smem(stages)
    defines = {name.upper(): value for name, value in static.items()} | {
        "CONSUMERS": tile.consumers,
        "MI": tile.mi,
        "STORE_BUFFERS": tile.store_buffers(stages),
        "SMEM_BYTES": smem,
    }
    file = Path(__file__).with_name("gemm.cu")
    return CudaSource(file, "gemm", defines, (), smem, 128 * (tile.consumers + 1), (blocks, 1, 1))


def store_columns(bn: int) -> int:
    """Columns a TMA store takes from a row: the widest swizzle whose boxes tile ``bn``."""
    return 64 if bn % 64 == 0 else 32 if bn % 32 == 0 else 16


def _maps(tile: Tile, cluster: str, dtype: str, a: Any, b: Any, c: Any) -> list[bytes]:
    cm, cn = blocks_of(cluster)
    columns = store_columns(tile.bn)
    return [
        _tma.matrix_map(a, dtype, (tile.bm // cn, 64)),
        _tma.matrix_map(b, dtype, (tile.bn // cm, 64)),
        _tma.matrix_map(c, dtype, (64, columns), columns * 2),
    ]


def _residue_maps(tile: Tile, dtype: str, a: Any, b: Any, c: Any) -> tuple[list[bytes], list[int]]:
    maps, shifts = [], []
    for tensor, rows in ((a, tile.bm // 8), (b, tile.bn // 8), (c, tile.bm // 8)):
        made, moved = _tma.residue_maps(tensor, dtype, (rows, 64))
        maps.append(made)
        shifts += moved
    return maps, shifts


def bind(
    residues: int,
    module: Any,
    case: Case,
    config: Config,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
) -> Call:
    """Tensor maps, the cut of K and the launch."""
    tile, cluster = parse_tile(str(config["tile"])), str(config["cluster"])
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    shifts = [0] * 24
    if residues == 1:
        maps = _maps(tile, cluster, case.dtype, a, b, c)
    else:
        maps, shifts = _residue_maps(tile, case.dtype, a, b, c)
    work = gemm_work(case, tile, cluster, int(config["group"]), int(config["splits"]), module.sms)
    cm, cn = blocks_of(cluster)
    workspace = module.scratch("workspace", 2 * work.sk_units * cm * cn * tile.bm * tile.bn * 4)
    counters = module.scratch("counters", work.sk_tiles * cm * cn * 4 * 4)
    args = [*maps, work.pack(workspace.data_ptr(), counters.data_ptr()), struct.pack("<24i", *shifts)]
    run = module.launcher((work.launched * cm * cn,), args)
    return Call(run, keep=(workspace, counters, a, b, c))


@lru_cache(maxsize=256)
def _guesses(sizes: tuple[int, int, int], dtype: str, unaligned: bool) -> tuple[dict[str, Any], ...]:
    case = Case("gemm", "", dict(zip("mnk", sizes, strict=True)), dtype)
    space, check = (UNALIGNED_SPACE, valid_unaligned) if unaligned else (SPACE, valid)

    def cost(config: Mapping[str, Any]) -> float:
        return gemm_clocks(case, parse_tile(config["tile"]), config["cluster"], config["splits"])

    every = (
        {"tile": t, "cluster": c, "stages": min(8, parse_tile(t).max_stages()), "group": 8, "splits": s}
        for t in space["tile"]
        for c in space["cluster"]
        for s in space["splits"]
    )
    possible = [config for config in every if check(case, config) is None]
    return tuple(spread(ranked(possible, cost), ("tile", "splits"), 8))


def _all_guesses(case: Case, unaligned: bool) -> tuple[dict[str, Any], ...]:
    return _guesses((case["m"], case["n"], case["k"]), case.dtype, unaligned)


def default(unaligned: bool, case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    first = {"tile": "128x256 coop", "cluster": "2x1", "stages": 4, "group": 8, "splits": 1}
    return next(iter(_all_guesses(case, unaligned)), first)


def seeds(unaligned: bool, case: Case) -> Sequence[Config]:
    """Further choices of the cost model, and its first with another raster and with whole tiles."""
    found = _all_guesses(case, unaligned)
    check = valid_unaligned if unaligned else valid
    others = [{**g, **change} for g in found[:1] for change in ({"splits": 1}, {"group": 16})]
    return [*(o for o in others if o not in found and check(case, o) is None), *found[1:]]


FILES = ("gemm.cu", "tiles.cuh", "ptx.cuh", "wgmma.cuh", "_plan.py", "_tma.py")

KERNELS = (
    Kernel(
        id="cuda/gemm",
        workload="gemm",
        space=SPACE,
        default=partial(default, False),
        seeds=partial(seeds, False),
        valid=valid,
        static=partial(static, 1),
        source=source,
        bind=partial(bind, 1),
        needs=Needs(archs=("sm_90a",)),
        files=FILES,
        summary="persistent, warp-specialised wgmma fed by TMA; multicast, ping-pong, stream-K",
    ),
    Kernel(
        id="cuda/gemm_unaligned",
        workload="gemm",
        space=UNALIGNED_SPACE,
        default=partial(default, True),
        seeds=partial(seeds, True),
        valid=valid_unaligned,
        static=partial(static, 8),
        source=source,
        bind=partial(bind, 8),
        needs=Needs(archs=("sm_90a",)),
        files=FILES,
        summary="any M, N, K: rows on odd addresses through eight tensor maps an operand",
    ),
)
