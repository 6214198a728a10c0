"""Decode attention against a paged cache, head size 128: K and V read once, in equal shares.

``cuda/attention_decode`` (attention_decode.cu): each block walks a list of pieces of sequences, made in
``bind``; a warp has 16 tokens of one KV head at a time, its query heads as rows of mma.sync. What limits it
is memory; for one short sequence, the time until the first bytes arrive and the joining of pieces.
"""

import itertools
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _pieces
from dsl_bench.kernels.cuda._maps import device_ints, tiled_map
from dsl_bench.kernels.cuda._pieces import Lists, Span
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
#: bytes a second of the memory and of one SM; seconds: a load's latency, a launch, reading eight results
READ_RATE, SM_RATE, LATENCY, START, JOIN_STEP = 4.4e12, 70e9, 1.0e-6, 4.0e-6, 0.7e-6

SPACE: dict[str, Sequence[Any]] = {
    "heads": (1, 2, 4, 8),
    "slices": (1, 2, 4, 8),
    "resident": (1, 2),
    "flight": (64, 96, 128, 192),
    "plan": _pieces.PLANS,
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
    """All that is baked in: the shape of a stage and the query heads a KV head; no size of the case."""
    return {
        "heads": config["heads"],
        "slices": config["slices"],
        "resident": config["resident"],
        "stages": stages_of(config),
        "group": group_of(case),
        "bf16": int(case.dtype == "bf16"),
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """attention_decode.cu with its macros."""
    bytes_ = smem(static["group"], static, static["stages"])
    defines = {name.upper(): value for name, value in static.items()} | {"SMEM_BYTES": bytes_}
    threads = 32 * (static["heads"] * static["slices"] + 1)
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
    return spans, _pieces.plan([s.units for s in spans], workers, overhead, way, join)


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
    maps = [cache_map(inputs[name], case.dtype, heads) for name in ("k_cache", "v_cache")]
    tensors = (inputs["q"], outputs["o"], inputs["page_table"], items, begins, sums, scales, counters)
    width, shift = inputs["page_table"].shape[1], int(case["page"]).bit_length() - 1
    args = struct.pack("<8Q3if", *(t.data_ptr() for t in tensors), width, shift, kv_heads, LOG2_E / D**0.5)
    return Call(module.launcher((len(lists),), [*maps, args]), keep=(*tensors, *inputs.values()))


def cache_map(cache: Any, dtype: str, heads: int) -> bytes:
    """The map of [pool, page, hkv, 128]; its box: 16 tokens of ``heads`` heads as [head][half][token][64]."""
    pool, page, kv_heads, _ = cache.shape
    row = kv_heads * D * 2
    sizes = (64, page, 2, kv_heads, pool)
    return tiled_map(cache.data_ptr(), dtype, sizes, (row, 128, D * 2, page * row), (64, TILE, 2, heads, 1))


# ---- guesses ---------------------------------------------------------------------------------------


def seconds(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated time: the slower of memory and the busiest block, and what joining the pieces adds."""
    _, lists = cut(case, config)
    group, unit_bytes = group_of(case), stage_bytes(config)
    pieces: dict[int, int] = {}
    for piece in (p for worker in lists for p in worker):
        pieces[piece.job] = pieces.get(piece.job, 0) + 1
    most = max(pieces.values())
    flying = stages_of(config) * unit_bytes
    rate = min(SM_RATE / min(config["resident"], -(-len(lists) // SMS)), flying / LATENCY)
    units = max(sum(p.end - p.begin for p in worker) for worker in lists)
    total = sum(p.end - p.begin for worker in lists for p in worker) * unit_bytes
    steps = -(-group * 32 // (32 * config["slices"])) * -(-most // 8)
    join = 1.5e-6 + steps * JOIN_STEP if most > 1 else 0.0
    ends = max(map(len, lists)) * 0.2e-6
    # Adjacent heads read whole pages, and more in flight than is needed is worse for the memory (measured in
    # another language: 490 us with 128 KiB, 495 to 505 with 192): worth a little where memory is what counts.
    worse = 0.02 / config["heads"] + 0.0003 * abs(config["flight"] - 128)
    return START + max(total / READ_RATE * (1 + worse), units * unit_bytes / rate) + join + ends


def cost(case: Case, config: Config) -> float:
    """The estimate in µs."""
    return seconds(case, config) * 1e6


def guesses(case: Case) -> list[dict[str, Any]]:
    """The cost model's choices, best first, that differ in a stage's shape or in the blocks an SM holds."""
    every = (dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values()))
    possible = [c for c in every if valid(case, c) is None]
    return spread(ranked(possible, lambda c: seconds(case, c)), ("heads", "slices", "resident"), 8)


def default(case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    return next(
        iter(guesses(case)), {"heads": 1, "slices": 4, "resident": 1, "flight": 128, "plan": "stream"}
    )


def seeds(case: Case) -> Sequence[Config]:
    """Further choices of the model, and its first with the other cut and with more and less in flight."""
    found = guesses(case)
    ways = [{**c, "plan": w} for c in found[:1] for w in _pieces.PLANS if w != c["plan"]]
    depths = [{**c, "flight": f} for c in found[:1] for f in SPACE["flight"] if f != c["flight"]]
    return found[1:2] + ways + [c for c in depths if valid(case, c) is None] + found[2:6]


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
            "decode.cuh",
            "decode_ptx.cuh",
            "ptx.cuh",
            "wgmma.cuh",
            "_pieces.py",
            "_maps.py",
            "_tma.py",
            "_plan.py",
        ),
        summary="pages by TMA, 16 tokens a warp on mma.sync, equal shares, pieces joined by the last block",
    ),
)
