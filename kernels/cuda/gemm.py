"""GEMM by hand: C[M,N] = A[M,K] · B[N,K]ᵀ, bf16 or fp16, accumulated in fp32. Device code: gemm.cu.

``cuda/gemm`` wants rows that start on 16 bytes. ``cuda/gemm_unaligned`` takes the rest: the same kernel
behind one that copies A and B to aligned rows (repack.cuh), and ordinary stores of C. A binary
serves all shapes: raster and cuts of K are arguments.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _tma
from dsl_bench.kernels.cuda._plan import (
    INT32_MAX,
    Tile,
    blocks_of,
    cdiv,
    cut_reason,
    gemm_clocks,
    gemm_work,
    ranked,
    spread,
    store_widths,
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
#: pdl: the GEMM may be launched while the copy ends (programmatic dependent launch)
UNALIGNED_SPACE: dict[str, Sequence[Any]] = {**SPACE, "group": (8, 16), "splits": (1, 0, 2, 4), "pdl": (0, 1)}
#: elements that a copied row is rounded up to: 128 bytes
PITCH = 64
#: repack.cuh: elements a warp copies, warps a block
RUN, REPACK_WARPS = 1024, 8
#: valid refuses what the cost model thinks this many times as long as the best, and this many clocks longer
JUNK, JUNK_CLOCKS = 1.6, 8000


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
    return tma_reason(K=case["k"], N=case["n"]) or _reason(case, config) or _junk(case, config)


def valid_unaligned(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/gemm_unaligned`` cannot or need not do ``case`` with ``config``."""
    if not tma_reason(K=case["k"], N=case["n"]):
        return "all rows start on 16 bytes: nothing to copy, use cuda/gemm"
    if config["pdl"] and case["k"] % 8 == 0:
        return "no copy to depend on: rows of A and B start on 16 bytes"
    tile = parse_tile(str(config["tile"]))
    if case["n"] % 8 and config["splits"] != 1 and tile.schedule == "pingpong" and tile.accumulators > 160:
        return "turns, parts and ordinary stores together spill registers"
    if (case["m"] + case["n"]) * cdiv(case["k"], RUN) > INT32_MAX:
        return "more pieces to copy than an int counts"
    return _reason(case, config) or _junk(case, config)


def _sizes(case: Case) -> tuple[int, int, int]:
    return case["m"], case["n"], case["k"]


def _junk(case: Case, config: Config) -> str | None:
    clocks = _clocks(_sizes(case), config["tile"], config["cluster"], config["splits"])
    best = _best_clocks(_sizes(case))
    if clocks < max(JUNK * best, best + JUNK_CLOCKS):
        return None
    return f"{clocks / best:.1f} times the estimated time of the best"


def _pitch(k: int) -> int:
    """Bytes from row to row of what TMA reads: the operands, or their copies."""
    return 2 * (k if k % 8 == 0 else cdiv(k, PITCH) * PITCH)


@lru_cache(maxsize=65536)
def _clocks(sizes: tuple[int, int, int], tile: str, cluster: str, splits: int) -> float:
    case = Case("gemm", "", dict(zip("mnk", sizes, strict=True)), "bf16")
    return gemm_clocks(case, parse_tile(tile), cluster, splits, _pitch(sizes[2]))


@lru_cache(maxsize=1024)
def _best_clocks(sizes: tuple[int, int, int]) -> float:
    """The least of all that can be launched, whatever the alignment."""
    case = Case("gemm", "", dict(zip("mnk", sizes, strict=True)), "bf16")
    clocks = (
        _clocks(sizes, c["tile"], c["cluster"], c["splits"])
        for c in _launches(UNALIGNED_SPACE if tma_reason(K=sizes[2], N=sizes[1]) else SPACE)
        if _reason(case, c) is None
    )
    return min(clocks, default=1.0)


def _launches(space: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All tiles, clusters and cuts, with the deepest ring that fits."""
    for tile in space["tile"]:
        base = {"tile": tile, "stages": min(8, parse_tile(tile).max_stages()), "group": 8}
        for cluster in space["cluster"]:
            for splits in space["splits"]:
                config = {"tile": tile, "cluster": cluster, **base, "splits": splits}
                yield {**config, "pdl": 0} if "pdl" in space else config


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in: the tile, the ring, the cluster, the type, whether K may be cut, whether operands
    are copied first and whether C takes ordinary stores."""
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
        "repack": int(case["k"] % 8 != 0),
        "plain_stores": int(case["n"] % 8 != 0),
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


@dataclass(frozen=True)
class Rows:
    """An operand as TMA reads it: the address, ``shape`` in elements, ``pitch`` elements from row to row."""

    address: int
    shape: tuple[int, int]
    pitch: int


def _rows(tensor: Any) -> Rows:
    return Rows(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(0))


def _repack(module: Any, tensors: Sequence[Any]) -> tuple[Callable[[], None], list[Rows], list[Any]]:
    """The launch that copies all ``tensors`` [rows, K] to aligned rows, the copies, and what to keep."""
    copies, args, kept, warps = [], [], [], 0
    for name, tensor in zip(("a", "b"), tensors, strict=True):
        rows, columns = tensor.shape
        pitch = cdiv(columns, PITCH) * PITCH
        memory = module.scratch(f"rows of {name}", rows * pitch * 2)
        runs = cdiv(columns, RUN)
        args.append(
            struct.pack(
                "<2Q6i",
                *(tensor.data_ptr(), memory.data_ptr()),
                *(rows, columns, cdiv(columns, 8), pitch // 8, runs, rows * runs),
            )
        )
        warps += rows * runs
        copies.append(Rows(memory.data_ptr(), (rows, columns), pitch))
        kept.append(memory)
    run = module.helper("repack", (cdiv(warps, REPACK_WARPS),), 32 * REPACK_WARPS, args)
    return run, copies, kept


def _output(tile: Tile, dtype: str, c: Any) -> bytes:
    """C's tensor maps, for a warp's rows; its address where its rows have none."""
    if c.shape[1] % 8:
        return struct.pack("<Q", c.data_ptr())
    return b"".join(_tma.matrix_map(c, dtype, (16, width)) for width in store_widths(tile.bn))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps, the cut of K and the launch, or two: the copy of rows that TMA cannot read comes first."""
    tile, cluster = parse_tile(str(config["tile"])), str(config["cluster"])
    tensors, c = (inputs["a"], inputs["b"]), outputs["c"]
    copy, rows, kept = None, [_rows(t) for t in tensors], []
    if case["k"] % 8:
        copy, rows, kept = _repack(module, tensors)
    work = gemm_work(case, tile, cluster, int(config["group"]), int(config["splits"]), module.sms)
    cm, cn = blocks_of(cluster)
    workspace = module.scratch("workspace", 2 * work.sk_units * cm * cn * tile.bm * tile.bn * 4)
    counters = module.scratch("counters", work.sk_tiles * cm * cn * 4 * 4)
    boxes = ((tile.bm // cn, 64), (tile.bn // cm, 64))
    maps = [
        _tma.rows_map(r.address, case.dtype, r.shape, r.pitch, b) for r, b in zip(rows, boxes, strict=True)
    ]
    args = [*maps, _output(tile, case.dtype, c), work.pack(workspace.data_ptr(), counters.data_ptr())]
    multiply = module.launcher((work.launched * cm * cn,), args, dependent=bool(config.get("pdl", 0)))
    return Call(_both(copy, multiply), keep=(workspace, counters, *kept, *tensors, c))


def _both(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    if first is None:
        return second
    copy = first

    def run() -> None:
        copy()
        second()

    return run


@lru_cache(maxsize=256)
def _guesses(sizes: tuple[int, int, int], unaligned: bool) -> tuple[dict[str, Any], ...]:
    """What the cost model ranks first: overall, of whole tiles, without clusters, and of each schedule."""
    case = Case("gemm", "", dict(zip("mnk", sizes, strict=True)), "bf16")
    space, check = (UNALIGNED_SPACE, valid_unaligned) if unaligned else (SPACE, valid)
    possible = ranked(
        (c for c in _launches(space) if check(case, c) is None),
        lambda c: _clocks(sizes, c["tile"], c["cluster"], c["splits"]),
    )
    whole = [c for c in possible if c["splits"] == 1]
    lists = (
        (possible, ("tile", "splits"), 5),
        (whole, ("tile",), 6),
        ([c for c in whole if c["cluster"] == "1x1"], ("tile",), 2),
        ([c for c in possible if c["splits"] > 1], ("splits",), 2),
        ([c for c in whole if c["tile"].endswith("pingpong")], ("tile",), 1),
    )
    found = {tuple(c.items()): c for configs, keys, count in lists for c in spread(configs, keys, count)}
    return tuple(found.values())


def default(unaligned: bool, case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    first = {"tile": "128x256 coop", "cluster": "2x1", "stages": 4, "group": 8, "splits": 1}
    return next(iter(_guesses(_sizes(case), unaligned)), {**first, "pdl": 0} if unaligned else first)


def seeds(unaligned: bool, case: Case) -> Sequence[Config]:
    """Further choices of the cost model, after them the first with another raster, and with other clusters
    where the model thinks little of the difference. An overlapped launch comes first where there is one."""
    found = _guesses(_sizes(case), unaligned)
    check = valid_unaligned if unaligned else valid

    def near(config: Mapping[str, Any]) -> bool:
        clocks = _clocks(_sizes(case), config["tile"], config["cluster"], config["splits"])
        return config not in found and clocks < 1.15 * _best_clocks(_sizes(case)) and not check(case, config)

    overlapped = [{**g, "pdl": 1} for g in found[:1] if unaligned]
    changes: tuple[dict[str, Any], ...] = ({"group": 16}, *({"cluster": c} for c in SPACE["cluster"]))
    others = [{**g, **change} for g in found[:1] for change in changes]
    return [*filter(near, overlapped), *found[1:], *filter(near, others)]


FILES = ("gemm.cu", "repack.cuh", "ring.cuh", "tiles.cuh", "ptx.cuh", "wgmma.cuh", "_plan.py", "_tma.py")

KERNELS = (
    Kernel(
        id="cuda/gemm",
        workload="gemm",
        space=SPACE,
        default=partial(default, False),
        seeds=partial(seeds, False),
        valid=valid,
        static=static,
        source=source,
        bind=bind,
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
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",)),
        files=FILES,
        summary="rows on any 2 bytes: copied to aligned ones first, C by ordinary stores",
    ),
)
