"""MLA decode: all heads of a sequence against one latent cache, read once and used as keys and as values.

``cuda/mla_decode`` (mla_decode.cu): 64 query rows against 64 tokens at a time on wgmma, the sums split over two
warpgroups; pieces of sequences are dealt to blocks in ``bind``, a second launch adds up those of cut sequences.
Few heads are bound by memory, 128 of them by the tensor cores and by the time between softmax and product.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _pieces
from dsl_bench.kernels.cuda._maps import device_ints, tiled_map
from dsl_bench.kernels.cuda._pieces import Lists, Span
from dsl_bench.kernels.cuda._plan import SMS, cdiv, ranked

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, int_list

D_QK, D_V, PAGE, ROWS = 576, 512, 64, 64
LOG2_E = 1.4426950408889634
THREADS, TILES = 384, 9
#: what a piece costs beside its blocks of tokens, and a piece of a cut sequence on top, in blocks
PIECE, JOIN = 2.0, 1.5
#: seconds for a block of tokens: the tensor cores' share and what does not overlap, with and without LAG
BLOCK_SECONDS = {0: 1.75e-6, 1: 1.55e-6}
#: bytes a second of the memory and of the L2 cache; seconds for a launch, and for the second one
READ_RATE, L2_RATE, START, SECOND = 4.2e12, 5.5e12, 5.0e-6, 4.0e-6

SPACE: dict[str, Sequence[Any]] = {"cluster": (1, 2), "lag": (0, 1), "plan": _pieces.PLANS}


def smem() -> int:
    """Dynamic shared memory in mla_decode.cu's layout, bytes: q and two blocks, staging, factors, barriers."""
    factors, barriers = 4 * ROWS * 4, 2 * (TILES + 5) + 2
    return 1024 + 3 * TILES * ROWS * 128 + 8 * 1024 + factors + 8 * barriers


def tiles_of(case: Case) -> int:
    """Tiles of 64 query rows a sequence."""
    return cdiv(case["h"] * case["sq"], ROWS)


def valid(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/mla_decode`` cannot do ``case`` with ``config``."""
    tiles = tiles_of(case)
    if config["cluster"] == 2 and tiles % 2:
        return f"{tiles} tiles of query rows are not pairs"
    if tiles > SMS:
        return f"{tiles} tiles of query rows are more than there are SMs"
    return None


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in; no size of the case."""
    return {"cluster": config["cluster"], "lag": config["lag"], "bf16": int(case.dtype == "bf16")}


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """mla_decode.cu with its macros."""
    defines = {name.upper(): value for name, value in static.items()} | {"SMEM_BYTES": smem()}
    file = Path(__file__).with_name("mla_decode.cu")
    return CudaSource(file, "mla_decode", defines, (), smem(), THREADS, (static["cluster"], 1, 1))


@lru_cache(maxsize=256)
def _cut(lens: tuple[int, ...], workers: int, way: str) -> tuple[tuple[Span, ...], Lists]:
    spans = tuple(Span(row, 0, n, cdiv(n, PAGE)) for row, n in enumerate(lens))
    return spans, _pieces.plan([s.units for s in spans], workers, PIECE, way, JOIN)


def cut(case: Case, config: Mapping[str, Any], sms: int = SMS) -> tuple[tuple[Span, ...], Lists]:
    """The jobs (a sequence each) and the pieces of each worker: as many blocks as there are tiles of query rows."""
    return _cut(int_list(str(case.params["lens"])), sms // tiles_of(case), config["plan"])


def joins(case: Case, spans: Sequence[Span], found: Sequence[_pieces.Item]) -> list[int]:
    """Of each cut sequence and tile of query rows: first slot, pieces, first row of o and rows, end to end."""
    tiles, rows = tiles_of(case), case["h"] * case["sq"]
    cut_jobs = {item.job: item for item in found if item.count > 1}
    return [
        number
        for job, item in sorted(cut_jobs.items())
        for t in range(tiles)
        for number in (
            item.first * tiles + t,
            item.count,
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
    tiles, rows = tiles_of(case), case["h"] * case["sq"]
    spans, lists = cut(case, c, module.sms)
    found, starts, slots = _pieces.items(lists)
    groups = joins(case, spans, found)
    items = device_ints(_pieces.pack_items(spans, found), q)
    begins, sets = device_ints(starts, q), device_ints(groups or [0], q)
    sums = module.scratch("sums", slots * tiles * ROWS * D_V * 4)
    scales = module.scratch("scales", slots * tiles * ROWS * 4)
    maps = [
        matrix_map(q, case.dtype, q.numel() // D_QK, min(ROWS, rows)),
        matrix_map(cache, case.dtype, cache.shape[0] * PAGE, PAGE // c["cluster"]),
    ]
    tensors = (table, items, begins, sets, outputs["o"], sums, scales)

    def args(join: int) -> bytes:
        sizes = (join, table.shape[1], case["h"], rows, case["sq"], tiles)
        return struct.pack("<7Q6if4x", *(t.data_ptr() for t in tensors), *sizes, LOG2_E / D_QK**0.5)

    first = module.launcher((len(lists) * tiles,), [*maps, args(0)])
    keep = (*tensors, *inputs.values())
    if not groups:
        return Call(first, keep=keep)
    # a block of the second launch has eight warps that each add up a quarter of a row at a time
    blocks = min(module.sms // 2 * 2, len(groups) // 4 * ROWS * 4 // 8)
    second = module.launcher((blocks,), [*maps, args(len(groups) // 4)], dependent=True)

    def run() -> None:
        first()
        second()

    return Call(run, keep=(*keep, first, second))


def matrix_map(tensor: Any, dtype: str, rows: int, box: int) -> bytes:
    """The map of ``rows`` rows of 576 elements whose box is ``box`` rows of 64."""
    return tiled_map(tensor.data_ptr(), dtype, (D_QK, rows), (D_QK * 2,), (64, box))


# ---- guesses ---------------------------------------------------------------------------------------


def seconds(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated time: the busiest worker's blocks, each by the slowest of tensor cores, memory and L2, and what
    adding up cut sequences costs."""
    spans, lists = cut(case, config)
    tiles, size = tiles_of(case), PAGE * D_QK * 2
    memory = len(lists) * size / READ_RATE
    cached = len(lists) * tiles / config["cluster"] * size / L2_RATE
    # with LAG a buffer is refilled later, which shows where memory is slow
    block = max(BLOCK_SECONDS[config["lag"]], cached, memory * (1.1 if config["lag"] else 1.0))
    busiest = _pieces.makespan([s.units for s in spans], lists, PIECE, JOIN)
    _, _, slots = _pieces.items(lists)
    moved = slots * min(ROWS * tiles, case["h"] * case["sq"]) * D_V * 4
    return START + busiest * block + (SECOND + moved / READ_RATE if slots else 0.0)


def guesses(case: Case) -> list[dict[str, Any]]:
    """All configs, the cost model's best first."""
    every = (
        {"cluster": cluster, "lag": lag, "plan": way}
        for cluster in SPACE["cluster"]
        for lag in SPACE["lag"]
        for way in SPACE["plan"]
    )
    return ranked((c for c in every if valid(case, c) is None), lambda c: seconds(case, c))


def default(case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    return next(iter(guesses(case)), {"cluster": 1, "lag": 0, "plan": "even"})


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
        needs=Needs(archs=("sm_90a",)),
        files=(
            "mla_decode.cu",
            "mla.cuh",
            "decode.cuh",
            "ptx.cuh",
            "wgmma.cuh",
            "_pieces.py",
            "_maps.py",
            "_tma.py",
            "_plan.py",
        ),
        summary="latents by TMA, once for scores and values; sums over two warpgroups; pieces added by a chained launch",
    ),
)
