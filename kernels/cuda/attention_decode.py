"""Decode attention against a paged cache, head size 128: K and V read once, in equal shares.

``cuda/attention_decode`` (attention_decode.cu): each block walks a list of pieces of sequences, made in
``bind``; a warp has 16 tokens of one KV head at a time, its query heads as rows of mma.sync. What limits it
is memory; for one short sequence, the time until the first bytes arrive and the joining of pieces.
"""

import itertools
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _pieces
from dsl_bench.kernels.cuda._maps import FETCHES, device_ints, tiled_map
from dsl_bench.kernels.cuda._pieces import Lists, Piece, Span
from dsl_bench.kernels.cuda._plan import SMEM_LIMIT, SMS, ranked, spread

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, int_list

D, TILE = 128, 16
LOG2_E = 1.4426950408889634
#: shared memory of an SM that blocks can use in all, and what the system takes of each block
SM_SMEM, BLOCK_SMEM = 233472, 1024
MAX_GROUP = 16
#: what a piece costs beside its tokens, and a piece of a cut sequence on top, as bytes of the cache
PIECE_BYTES, JOIN_BYTES = 8192, 8192
#: what a block costs that the GPU starts when another ends
BLOCK_BYTES = 65536
#: bytes a second of the memory and of one SM; seconds: a load's latency, a launch, reading eight results
READ_RATE, SM_RATE, LATENCY, START, JOIN_STEP = 4.4e12, 70e9, 1.0e-6, 4.0e-6, 0.7e-6

#: ways to load, in the numbers of decode_loads.cuh: a warp for all by TMA, the left halves of a tile's tokens
#: before the right ones; or each warp its own tiles by cp.async
LOADS = {"halves": 0, "warp": 1}
#: how work is cut: as in _pieces.py for as many blocks as the GPU holds, or a piece a block, which the GPU
#: deals out
PLANS = (*_pieces.PLANS, "grid")

SPACE: dict[str, Sequence[Any]] = {
    "heads": (1, 2, 4, 8),
    "slices": (1, 2, 4, 8),
    "resident": (1, 2),
    "flight": (64, 96, 128, 192),
    "plan": PLANS,
    "load": tuple(LOADS),
    # 256 cost 4 to 6 % wherever memory decides
    "fetch": FETCHES[1:],
}


def group_of(case: Case) -> int:
    """Query heads a KV head."""
    return int(case["hq"] // case["hkv"])


def stage_bytes(config: Mapping[str, Any]) -> int:
    """K and V of the 16 tokens that each warp has of a stage."""
    return int(config["heads"] * config["slices"] * TILE * D * 2 * 2)


def smem(group: int, config: Mapping[str, Any], stages: int) -> int:
    """Dynamic shared memory in attention_decode.cu's layout, bytes: ring, sums, flags, barriers."""
    warps = config["heads"] * config["slices"]
    sums = warps * group * ((D + 4) * 4 + 8)
    return int(1024 + stages * stage_bytes(config) + sums + (config["heads"] * 4 + 7) // 8 * 8 + 16 * stages)


def stages_of(config: Mapping[str, Any]) -> int:
    """Stages of the ring: ``flight`` KiB an SM, in all its blocks."""
    return int(config["flight"] * 1024 // (config["resident"] * stage_bytes(config)))


def valid(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/attention_decode`` cannot do ``case`` with ``config``."""
    c: Mapping[str, Any] = config
    if case["d"] != D:
        return f"head size {case['d']}, and only {D} is supported"
    if group_of(case) > MAX_GROUP:
        return f"{group_of(case)} query heads a KV head are more than {MAX_GROUP}"
    if case["hkv"] % c["heads"]:
        return f"{case['hkv']} KV heads are no multiple of {c['heads']}"
    warps = c["heads"] * c["slices"]
    if warps not in (4, 8):
        return f"{warps} warps that compute; 4 or 8 are wanted"
    stages = stages_of(c)
    if stages < 2 or c["flight"] * 1024 % (c["resident"] * stage_bytes(c)):
        return f"{c['flight']} KiB an SM are no whole ring of two stages and more"
    need = smem(group_of(case), c, stages)
    if need > SMEM_LIMIT or c["resident"] * (need + BLOCK_SMEM) > SM_SMEM:
        return f"{need} B of shared memory, {c['resident']} times on an SM"
    return None


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in: the shape of a stage, how it is loaded and the query heads a KV head; no size of
    the case. What L2 fetches is in the tensor maps where there are any."""
    return {
        "heads": config["heads"],
        "slices": config["slices"],
        "resident": config["resident"],
        "stages": stages_of(config),
        "group": group_of(case),
        "load": LOADS[str(config["load"])],
        "fetch": config["fetch"] if config["load"] == "warp" else 0,
        "bf16": int(case.dtype == "bf16"),
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """attention_decode.cu with its macros."""
    bytes_ = smem(static["group"], static, static["stages"])
    defines = {name.upper(): value for name, value in static.items()} | {"SMEM_BYTES": bytes_}
    threads = 32 * (static["heads"] * static["slices"] + (static["load"] != LOADS["warp"]))
    file = Path(__file__).with_name("attention_decode.cu")
    return CudaSource(file, "attention_decode", defines, (), bytes_, threads)


@lru_cache(maxsize=256)
def _cut(
    lens: tuple[int, ...], kv_heads: int, heads: int, unit: int, workers: int, way: str
) -> tuple[tuple[Span, ...], Lists]:
    spans = tuple(
        Span(row, head, n, n, unit) for row, n in enumerate(lens) for head in range(0, kv_heads, heads)
    )
    unit_bytes = unit * heads * D * 4
    overhead, join = PIECE_BYTES / unit_bytes, JOIN_BYTES / unit_bytes
    units = [s.units for s in spans]
    if way == "grid":
        return spans, deal(units, workers, BLOCK_BYTES / unit_bytes)
    return spans, _pieces.plan(units, workers, overhead, way, join)


def deal(units: Sequence[int], workers: int, overhead: float) -> Lists:
    """A list for each piece, longest first: equal parts of the jobs, of the size that lets ``workers`` blocks
    at a time end first where a piece costs ``overhead`` units beside its own."""
    sizes = {max(1, -(-sum(units) // (workers * finer))) for finer in (1, 2, 3, 4, 6)} | {max(1, *units)}
    cuts = [_even(units, size) for size in sorted(sizes, reverse=True)]
    return min(cuts, key=lambda lists: busiest(lists, workers, overhead))


def _even(units: Sequence[int], size: int) -> Lists:
    """A list for each piece: jobs in equal parts of ``size`` units at most, longest first."""
    pieces = []
    for job, count in enumerate(units):
        parts = max(1, -(-count // size))
        edges = [count * i // parts for i in range(parts + 1)]
        pieces += [Piece(job, begin, end) for begin, end in itertools.pairwise(edges)]
    pieces.sort(key=lambda p: (p.begin - p.end, p))
    return [[piece] for piece in pieces]


def busiest(lists: Lists, workers: int, overhead: float = 0.0) -> float:
    """Units until the last of ``workers`` is done, who take the lists in their order as they get free."""
    busy = [0.0] * min(workers, len(lists))
    heapify(busy)
    for pieces in lists:
        heapreplace(busy, busy[0] + sum(p.end - p.begin + overhead for p in pieces))
    return max(busy)


def cut(case: Case, config: Mapping[str, Any], sms: int = SMS) -> tuple[tuple[Span, ...], Lists]:
    """The jobs (a sequence and ``heads`` KV heads each) and the pieces that each block does."""
    lens = int_list(str(case.params["lens"]))
    unit, workers = config["slices"] * TILE, config["resident"] * sms
    return _cut(lens, case["hkv"], config["heads"], unit, workers, config["plan"])


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps, the lists of pieces, places for partial results and the launch."""
    c: Mapping[str, Any] = config
    group, kv_heads, heads = group_of(case), case["hkv"], c["heads"]
    spans, lists = cut(case, c, module.sms)
    found, starts, slots = _pieces.items(lists)
    items = device_ints(_pieces.pack_items(spans, found), inputs["q"])
    begins = device_ints(starts, inputs["q"])
    places = slots * heads * group
    sums = module.scratch("sums", places * D * 4)
    scales = module.scratch("scales", places * 4)
    counters = module.scratch("counters", len(int_list(str(case.params["lens"]))) * kv_heads * 4)
    caches = (inputs["k_cache"], inputs["v_cache"])
    maps = [cache_map(cache, case.dtype, c) for cache in caches]
    table = inputs["page_table"]
    tensors = (inputs["q"], *caches, outputs["o"], table, items, begins, sums, scales, counters)
    width, shift = table.shape[1], int(case["page"]).bit_length() - 1
    args = struct.pack("<10Q3if", *(t.data_ptr() for t in tensors), width, shift, kv_heads, LOG2_E / D**0.5)
    return Call(module.launcher((len(lists),), [*maps, args]), keep=(*tensors, *inputs.values()))


def cache_map(cache: Any, dtype: str, config: Mapping[str, Any]) -> bytes:
    """The map of [pool, page, hkv, 128]; its box: 16 tokens of ``heads`` heads as [head][half][token][64]."""
    pool, page, kv_heads, _ = cache.shape
    row = kv_heads * D * 2
    sizes = (64, page, 2, kv_heads, pool)
    strides = (row, 128, D * 2, page * row)
    box = (64, TILE, 2, config["heads"], 1)
    return tiled_map(cache.data_ptr(), dtype, sizes, strides, box, config["fetch"])


# ---- guesses ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _shares(
    lens: tuple[int, ...], kv_heads: int, heads: int, unit: int, resident: int, way: str
) -> tuple[int, int, int, float, int]:
    """Of a cut: its lists, the most pieces of a job, all units, those of the busiest place and its pieces."""
    workers = resident * SMS
    _, lists = _cut(lens, kv_heads, heads, unit, workers, way)
    pieces: dict[int, int] = {}
    for piece in (p for worker in lists for p in worker):
        pieces[piece.job] = pieces.get(piece.job, 0) + 1
    total = sum(p.end - p.begin for worker in lists for p in worker)
    start = BLOCK_BYTES / (unit * heads * D * 4) if way == "grid" else 0.0
    ends = max(max(map(len, lists)), -(-len(lists) // workers))
    return len(lists), max(pieces.values()), total, busiest(lists, workers, start), ends


def seconds(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated time: the slower of memory and the busiest block, and what joining the pieces adds. How the
    bytes are loaded makes no difference here: what it does is being found out."""
    lens, unit = int_list(str(case.params["lens"])), config["slices"] * TILE
    shape = (config["heads"], unit, config["resident"], config["plan"])
    count, most, total, units, pieces = _shares(lens, case["hkv"], *shape)
    unit_bytes = stage_bytes(config)
    flying = stages_of(config) * unit_bytes
    rate = min(SM_RATE / min(config["resident"], -(-count // SMS)), flying / LATENCY)
    steps = -(-group_of(case) * 32 // (32 * config["slices"])) * -(-most // 8)
    join = 1.5e-6 + steps * JOIN_STEP if most > 1 else 0.0
    ends = pieces * 0.2e-6
    # Adjacent heads read whole pages, and more in flight than is needed is worse for the memory (measured: 64
    # KiB an SM beat 96 to 192 with 4 heads): worth a little where memory is what counts.
    worse = 0.02 / config["heads"] + 0.0003 * abs(config["flight"] - 128)
    return START + max(total * unit_bytes / READ_RATE * (1 + worse), units * unit_bytes / rate) + join + ends


def cost(case: Case, config: Config) -> float:
    """The estimate in µs."""
    return seconds(case, config) * 1e6


def _config(*shape: Any, load: str = "halves", fetch: int = 128) -> dict[str, Any]:
    """A config by heads, slices, resident, flight and plan."""
    return dict(zip(SPACE, (*shape, load, fetch), strict=True))


def _warps(*shape: Any, fetch: int = 0) -> dict[str, Any]:
    """The same, where each warp loads its own tiles."""
    return _config(*shape, load="warp", fetch=fetch)


#: where memory decides: the fastest so far, then its neighbours
PAIR, WHOLE = (1, 4, 2, 128), (1, 8, 1, 192)
LONG = (
    _warps(*WHOLE, "grid"),
    _config(*PAIR, "stream"),
    _config(*PAIR, "grid"),
    _warps(*WHOLE, "grid", fetch=128),
    _warps(*WHOLE, "even"),
    _warps(1, 4, 2, 192, "grid"),
    _config(*PAIR, "stream", fetch=0),
    _config(4, 1, 1, 64, "even"),
)
#: where one piece's latency decides
SINGLE = (1, 4, 1, 128)
SHORT = (
    _config(*SINGLE, "stream"),
    _config(*SINGLE, "grid"),
    _config(1, 8, 1, 128, "stream"),
    _config(1, 4, 1, 96, "even"),
    _config(1, 4, 1, 96, "stream"),
    _config(1, 8, 1, 128, "even"),
    _warps(1, 4, 2, 192, "grid"),
    _warps(1, 8, 1, 192, "even"),
    _warps(*SINGLE, "stream"),
    _config(*SINGLE, "even"),
    _config(2, 4, 1, 192, "even"),
    _config(*SINGLE, "stream", fetch=0),
)


def guesses(case: Case) -> list[dict[str, Any]]:
    """The cost model's choices, best first, that differ in a stage's shape or in the blocks an SM holds."""
    shapes = itertools.product(*(SPACE[name] for name in ("heads", "slices", "resident", "flight", "plan")))
    possible = [c for c in (_config(*shape) for shape in shapes) if valid(case, c) is None]
    return spread(ranked(possible, lambda c: seconds(case, c)), ("heads", "slices", "resident"), 6)


def default(case: Case) -> Config:
    """What was fastest so far on cases of that size, or the cost model's first choice; where nothing is
    valid, a config whose reason says why."""
    found = _wanted(case)
    return found[0] if found else _config(*SINGLE, "stream")


def seeds(case: Case) -> Sequence[Config]:
    """What was fast on such cases; then the cost model's choices."""
    return _wanted(case)[1:]


def _wanted(case: Case) -> list[dict[str, Any]]:
    moved = sum(int_list(str(case.params["lens"]))) * case["hkv"] * D * 4
    known = LONG if moved / READ_RATE > 200e-6 else (*SHORT, LONG[0])
    found = [c for c in known if valid(case, c) is None]
    return found + [c for c in guesses(case) if c not in found]


KERNELS = (
    Kernel(
        id="cuda/attention_decode",
        workload="attention_decode",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        cost=cost,
        needs=Needs(archs=("sm_90a",)),
        files=(
            "attention_decode.cu",
            "decode_loads.cuh",
            "decode_copy_ptx.cuh",
            "decode.cuh",
            "decode_ptx.cuh",
            "ptx.cuh",
            "wgmma.cuh",
            "_pieces.py",
            "_maps.py",
            "_tma.py",
            "_plan.py",
        ),
        summary="pages by TMA or cp.async, 16 tokens a warp on mma.sync, pieces joined by the last block",
    ),
)
