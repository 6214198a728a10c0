"""MLA decode: all heads of a sequence against one latent cache, read once, used as keys and as values.

``cuda/mla_decode`` has three forms. ``wide`` (mla_decode.cu): 64 query rows against 64 tokens at a time on
wgmma, the sums split over two warpgroups. ``held`` (mla_held.cu): the same with a warpgroup for the scores
alone, which holds q in registers. ``narrow`` (mla_narrow.cu): at most 32 query rows, as the columns of
wgmma, so that few heads leave the time to memory. In all, pieces of sequences are dealt to blocks in
``bind``, and a second launch adds up those of cut sequences. Few heads are bound by memory, 128 of them by
tensor cores and shared memory.
"""

import itertools
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _pieces
from dsl_bench.kernels.cuda._maps import FETCHES, device_ints, tiled_map
from dsl_bench.kernels.cuda._pieces import Lists, Span
from dsl_bench.kernels.cuda._plan import SMEM_LIMIT, SMS, cdiv, ranked

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, int_list

D_QK, D_V, PAGE, ROWS = 576, 512, 64, 64
LOG2_E = 1.4426950408889634
THREADS, TILES, TILE = 384, 9, 64 * 128
#: warps of a block of the second launch
JOIN_WARPS = THREADS // 32
#: the most query rows of the narrow form
NARROW = 32
#: tiles of q that the held form has in registers
HELD = 7
#: in blocks of tokens: what a piece costs beside its own, and one of a cut sequence with 64 query rows on top
PIECE, JOIN = 2.0, 3.0
#: seconds for a block of tokens, all of whose bytes are there: wide and held without and with LAG, narrow
WIDE_SECONDS, HELD_SECONDS, NARROW_SECONDS = (1.5e-6, 1.6e-6), (1.5e-6, 1.4e-6), 1.0e-6
#: bytes a second of the memory and of the L2 cache; seconds for a launch, and for the second one
READ_RATE, L2_RATE, START, SECOND = 4.4e12, 6.0e12, 5.0e-6, 4.0e-6
#: what L2's fetching 256 bytes around a miss costs, where memory decides
FAR = 1.06

SPACE: dict[str, Sequence[Any]] = {
    "form": ("wide", "held", "narrow"),
    "cluster": (1, 2),
    "lag": (0, 1),
    "plan": _pieces.PLANS,
    "fetch": FETCHES[:2],
}


def wide_smem() -> int:
    """Dynamic shared memory in mla_decode.cu's layout, bytes: q, two blocks, staging, factors, barriers."""
    factors, barriers = 4 * ROWS * 4, 2 * 7 + 2
    return 1024 + 3 * TILES * ROWS * 128 + 8 * 1024 + factors + 8 * barriers


def held_smem() -> int:
    """The same in mla_held.cu's layout: three blocks, two rotary tiles, the rest of q, factors, barriers."""
    tiles, factors, barriers = 3 * 8 + 2 + TILES - HELD, 4 * ROWS * 4, 4 * 3 + 4 * 2 + 2
    return 1024 + tiles * ROWS * 128 + factors + 2 * 32 + 8 * barriers


def narrow_smem(queries: int, ring: int) -> int:
    """The same in mla_narrow.cu's layout: ring, q and P, what warpgroups exchange, factors, barriers."""
    return (
        1024 + ring * TILE + (TILES + 2) * queries * 128 + 512 * queries + 72 * queries + 8 * (2 * ring + 2)
    )


def ring_of(queries: int) -> int:
    """Tiles of the narrow form's ring: as many as fit."""
    return max(n for n in range(2 * TILES, 27) if narrow_smem(queries, n) <= SMEM_LIMIT)


def rows_of(case: Case) -> int:
    """Query rows a sequence: heads and new tokens."""
    return int(case["h"] * case["sq"])


def tiles_of(case: Case) -> int:
    """Tiles of 64 query rows a sequence."""
    return cdiv(rows_of(case), ROWS)


def valid(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/mla_decode`` cannot do ``case`` with ``config``."""
    tiles = tiles_of(case)
    if config["form"] == "narrow":
        if rows_of(case) > NARROW:
            return f"{rows_of(case)} query rows are more than {NARROW}"
        if config["cluster"] != 1 or config["lag"]:
            return "the narrow form has no clusters and no lag"
    if config["cluster"] == 2 and tiles % 2:
        return f"{tiles} tiles of query rows are not pairs"
    if tiles > SMS:
        return f"{tiles} tiles of query rows are more than there are SMs"
    return None


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in; of the case's sizes only the width that query rows take in the narrow form."""
    bf16 = int(case.dtype == "bf16")
    if config["form"] == "narrow":
        return {"queries": 16 if rows_of(case) <= 16 else 32, "bf16": bf16}
    held = {"held": HELD} if config["form"] == "held" else {}
    return {**held, "cluster": config["cluster"], "lag": config["lag"], "bf16": bf16}


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """mla_decode.cu, mla_held.cu or mla_narrow.cu with its macros."""
    here = Path(__file__)
    defines = {name.upper(): value for name, value in static.items()}
    if "queries" in static:
        ring = ring_of(static["queries"])
        bytes_ = narrow_smem(static["queries"], ring)
        defines |= {"RING": ring, "SMEM_BYTES": bytes_}
        return CudaSource(here.with_name("mla_narrow.cu"), "mla_narrow", defines, (), bytes_, THREADS)
    stem, bytes_ = ("mla_held", held_smem()) if "held" in static else ("mla_decode", wide_smem())
    defines |= {"SMEM_BYTES": bytes_}
    cluster = (static["cluster"], 1, 1)
    return CudaSource(here.with_name(f"{stem}.cu"), stem, defines, (), bytes_, THREADS, cluster)


@lru_cache(maxsize=256)
def _cut(lens: tuple[int, ...], workers: int, way: str, join: float) -> tuple[tuple[Span, ...], Lists]:
    spans = tuple(Span(row, 0, n, cdiv(n, PAGE)) for row, n in enumerate(lens))
    return spans, _pieces.plan([s.units for s in spans], workers, PIECE, way, join)


def join_cost(case: Case) -> float:
    """What a piece of a cut sequence costs on top of its own work, in blocks of tokens."""
    return 0.25 + JOIN * min(ROWS, rows_of(case)) / ROWS


def cut(case: Case, config: Mapping[str, Any], sms: int = SMS) -> tuple[tuple[Span, ...], Lists]:
    """The jobs (a sequence each) and the pieces of each worker: a block for each tile of query rows."""
    lens = int_list(str(case.params["lens"]))
    return _cut(lens, sms // tiles_of(case), config["plan"], join_cost(case))


def joins(case: Case, spans: Sequence[Span], found: Sequence[_pieces.Item]) -> list[int]:
    """Of each cut sequence and tile of query rows: first slot, pieces, first row of o, rows; end to end."""
    tiles, rows = tiles_of(case), rows_of(case)
    cut_jobs = {item.job: item for item in found if item.parts > 1}
    return [
        number
        for job, item in sorted(cut_jobs.items())
        for t in range(tiles)
        for number in (
            item.first * tiles + t,
            item.parts,
            spans[job].row * rows + t * ROWS,
            min(ROWS, rows - t * ROWS),
        )
    ]


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps, the lists of pieces, places for partial results, and one or two launches."""
    c: Mapping[str, Any] = config
    q, cache, table = inputs["q"], inputs["kv_cache"], inputs["page_table"]
    tiles, rows = tiles_of(case), rows_of(case)
    spans, lists = cut(case, c, module.sms)
    found, starts, slots = _pieces.items(lists)
    groups = joins(case, spans, found)
    items = device_ints(_pieces.pack_items(spans, found), q)
    begins, sets = device_ints(starts, q), device_ints(groups or [0], q)
    sums = module.scratch("sums", slots * tiles * ROWS * D_V * 4)
    scales = module.scratch("scales", slots * tiles * ROWS * 4)
    tokens, fetch = cache.shape[0] * PAGE, c["fetch"]
    maps = [
        matrix_map(q, case.dtype, q.numel() // D_QK, min(ROWS, rows), fetch),
        matrix_map(cache, case.dtype, tokens, PAGE // c["cluster"], fetch),
    ]
    if c["form"] == "held":
        maps.append(side_map(cache, case.dtype, tokens, 4 // c["cluster"], fetch))
    tensors = (table, items, begins, sets, outputs["o"], sums, scales)
    joined = len(groups) // 4 * min(ROWS, rows)  # rows of the second launch
    quarters = 4 if joined <= JOIN_WARPS * module.sms // 2 else 1

    def args(join: int) -> bytes:
        sizes = (join, quarters, table.shape[1], case["h"], rows, case["sq"], tiles)
        return struct.pack("<7Q7if", *(t.data_ptr() for t in tensors), *sizes, LOG2_E / D_QK**0.5)

    first = module.launcher((len(lists) * tiles,), [*maps, args(0)])
    keep = (*tensors, *inputs.values())
    if not groups:
        return Call(first, keep=keep)
    # whole clusters, and no more warps than there is to add up
    blocks = min(module.sms // 2 * 2, cdiv(joined * quarters, 2 * JOIN_WARPS) * 2)
    second = module.launcher((blocks,), [*maps, args(len(groups) // 4)], dependent=True)

    def run() -> None:
        first()
        second()

    return Call(run, keep=(*keep, first, second))


def matrix_map(tensor: Any, dtype: str, rows: int, box: int, fetch: int) -> bytes:
    """The map of ``rows`` rows of 576 elements whose box is ``box`` rows of 64."""
    return tiled_map(tensor.data_ptr(), dtype, (D_QK, rows), (D_QK * 2,), (64, box), fetch)


def side_map(tensor: Any, dtype: str, rows: int, tiles: int, fetch: int) -> bytes:
    """The map of the same rows whose box is ``tiles`` tiles of 64 rows of 64, one after the other."""
    strides = (D_QK * 2, 64 * 2)
    return tiled_map(tensor.data_ptr(), dtype, (64, rows, TILES), strides, (64, PAGE, tiles), fetch)


# ---- guesses ---------------------------------------------------------------------------------------


def seconds(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated time: the busiest worker's blocks, each by the slowest of tensor cores, memory and L2, and
    what adding up cut sequences costs."""
    spans, lists = cut(case, config)
    tiles, size = tiles_of(case), PAGE * D_QK * 2
    memory = len(lists) * size / READ_RATE
    cached = len(lists) * tiles / config["cluster"] * size / L2_RATE
    if config["form"] == "narrow":
        block = max(NARROW_SECONDS, memory * 1.02)
    elif config["form"] == "held":
        block = max(HELD_SECONDS[config["lag"]], cached, memory * 1.06)
    else:
        block = max(WIDE_SECONDS[config["lag"]], cached, memory * (1.05 if config["lag"] else 1.0))
    busiest = _pieces.makespan([s.units for s in spans], lists, PIECE, join_cost(case))
    _, _, slots = _pieces.items(lists)
    block *= FAR if config["fetch"] == 256 else 1.0
    moved = slots * min(ROWS * tiles, rows_of(case)) * D_V * 4
    return START + busiest * block + (SECOND + moved / READ_RATE if slots else 0.0)


def cost(case: Case, config: Config) -> float:
    """The estimate in µs."""
    return seconds(case, config) * 1e6


def guesses(case: Case) -> list[dict[str, Any]]:
    """All configs, the cost model's best first."""
    every = (dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values()))
    return ranked((c for c in every if valid(case, c) is None), lambda c: seconds(case, c))


def default(case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    return next(iter(guesses(case)), {"form": "wide", "cluster": 1, "lag": 0, "plan": "even", "fetch": 128})


def seeds(case: Case) -> Sequence[Config]:
    """The other configs: there are few."""
    return guesses(case)[1:]


KERNELS = (
    Kernel(
        id="cuda/mla_decode",
        workload="mla_decode",
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
            "mla_decode.cu",
            "mla_held.cu",
            "mla_held.cuh",
            "mla_held_ptx.cuh",
            "mla_narrow.cu",
            "mla.cuh",
            "mla_softmax.cuh",
            "decode.cuh",
            "decode_ptx.cuh",
            "ptx.cuh",
            "wgmma.cuh",
            "_pieces.py",
            "_maps.py",
            "_tma.py",
            "_plan.py",
        ),
        summary="latents read once by TMA, few heads as columns of wgmma, pieces joined in a chained launch",
    ),
)
