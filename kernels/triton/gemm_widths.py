"""``triton/gemm_widths``: C = A·Bᵀ for rows that start on 128 bytes, in whole tiles of any multiple of 8
columns, bf16 or fp16.

The trick: under load little else counts than how many columns the busiest block multiplies, so the width is
the one that fills whole waves, not the power of two that Triton's own tensors have. ``pingpong``: two
warpgroups take turns on the tensor cores with tiles of their own, one storing while the other multiplies.
``coop``: they share a tile, which reads less of its operands and shows its epilogue. Ring, loads and products
are ``gemm_pitch``'s; C leaves in boxes of 64 columns, and one of what 64 leaves over.

What limits it: the tensor cores under load; with short K, what of an epilogue shows; at the highest clocks
the way from L2, as narrow tiles read more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from . import _pitch as host
from .gemm_pitch import joined, start, view
from .gemm_ragged import store_box

Sizes = tuple[int, int, int]
PINGPONG = tuple(f"128x{n} pingpong" for n in range(112, 200, 8))
COOP = ("256x160", "256x176", "256x192", "192x160", "192x176", "128x208", "128x224")
SPACE = {
    "tile": (*PINGPONG, *(f"{t} coop" for t in COOP)),
    # blocks side by side that share rows of B (along M) or of A
    "cluster": ("1x1", "2x1", "1x2"),
    # chunks of staged C that the ring leaves a warpgroup room for, at least; it is as deep as that allows
    "buffers": (1, 2),
    # rows of tiles that are walked together
    "group": (16, 8, 32),
}
#: columns' worth of work that a turn costs
TURN = 4
#: valid refuses widths by which the busiest block has this many times the columns of the best, and tiles that
#: the cost model thinks this many times as long as the best
JUNK, NEAR = 1.15, 1.12
#: bytes a clock that an SM gets from L2: cuda/gemm_turns reads as much in tiles of 128x176 and 128x192
L2_BYTES = 56


@dataclass(frozen=True)
class Tile(host.Tile):
    """A tile whose C is stored in chunks of 64 columns, a box each; the last may be narrower."""

    kernel: ClassVar[str] = "gemm_widths"
    share: ClassVar[int] = 4

    @property
    def box_q(self) -> int:
        """Columns of a box."""
        return host.CHUNK

    @property
    def tail(self) -> int:
        """Columns of the last box."""
        return self.q % host.CHUNK or host.CHUNK

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """First and width of what is staged at once."""
        return tuple((at, min(host.CHUNK, self.q - at)) for at in range(0, self.q, host.CHUNK))


@gluon.jit
def store_whole(
    c, sums, chunks, boxes, cls, row, col,
    T: gl.constexpr, OWNER: gl.constexpr, I: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """The N-th chunk of the I-th 64 rows of a warpgroup, through one of its buffers. c is the descriptors of
    a whole chunk and of a tile's last: rows of both are staged 128 bytes apart, and what lies beyond a box
    (the last piece, again) is not stored."""
    t: gl.constexpr = T.value
    FIRST: gl.constexpr = t.chunks[N][0]
    TURN_OF: gl.constexpr = I * len(t.chunks) + N
    BUFFER: gl.constexpr = OWNER * t.buffers + TURN_OF % t.buffers
    YOUNGER: gl.constexpr = t.younger[TURN_OF]
    LAST: gl.constexpr = (I + 1) * (t.q // t.piece) - 1
    x = joined(sums, (I * t.q + FIRST) // t.piece, 64 // t.piece, LAST, t.piece).to(c[0].dtype)
    # only stores from other buffers than this one may still be under way
    tma.store_wait(YOUNGER)
    chunks.index(BUFFER).store(x)
    fence_async_shared()
    if N == len(t.chunks) - 1:
        store_box(c[1], [cls, row + I * 64, col + FIRST], boxes.index(BUFFER))
    else:
        store_box(c[0], [cls, row + I * 64, col + FIRST], boxes.index(BUFFER))


@gluon.jit
def gemm_widths(a, b, c, d, k, tiles_m, tiles_n, steps, group, T: gl.constexpr):
    """a [1, m, k], b [1, n, k] and c, d [1, m, n] are descriptors: both are of C, d's box is as wide as a
    tile's last chunk. T is a ``Tile``."""
    # all rows are one class, see gemm_ragged.place; the raster's group is a number of the launch
    work = (k, tiles_m, tiles_n, 1, 0, 1, tiles_m, -1)
    start((c, d), c, work, steps, T, group, store_whole)


def _sizes(case: Case) -> Sizes:
    return case["m"], case["n"], case["k"]


@lru_cache(maxsize=4096)
def _tile(name: str, cluster: str, buffers: int, half: bool = False) -> Tile:
    """The tile with the deepest ring that leaves room for ``buffers``."""
    stages = 2
    while Tile.of(name, cluster, stages + 1).buffers >= buffers:
        stages += 1
    return Tile.of(name, cluster, stages, half)


def tile_of(config: Mapping[str, Any], half: bool = False) -> Tile:
    """The tile of a config."""
    return _tile(str(config["tile"]), str(config["cluster"]), int(config["buffers"]), half)


def grid(sizes: Sizes, tile: Tile) -> tuple[int, int]:
    """Rows and columns of cluster tiles."""
    return common.cdiv(sizes[0], tile.bm * tile.cm), common.cdiv(sizes[1], tile.bn * tile.cn)


def static(case: Case, config: Config) -> Static:
    """Tile, ring, cluster and type; sizes and raster are runtime values."""
    return {**{x: config[x] for x in ("tile", "cluster", "buffers")}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The kernel for one tile."""
    tile = tile_of(static, static["dtype"] == "fp16")
    # Triton wants powers of two in a type; what is loaded and stored are the boxes below
    box = f"tensordesc<{common.element(static['dtype'])}[1,64,64],{gl.NVMMASharedLayout(128, 16, 3)!r}>"
    sizes = ("k", "tiles_m", "tiles_n", "steps", "group")
    return TritonSource(
        fn=gemm_widths,
        signature={**dict.fromkeys("abcd", box), **dict.fromkeys(sizes, "i32")},
        constexprs={"T": tile},
        options={"num_warps": 4},
        gluon=True,
        cluster=tile.cm * tile.cn,
        boxes={"a": (1, tile.box_a, 64), "b": (1, tile.box_b, 64), "d": (1, 64, tile.tail)},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, and as many clusters as fit, or fewer where tiles are fewer."""
    tile, (m, n, k) = tile_of(config), _sizes(case)
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    heights = ((a, m), (b, n), (c, m), (c, m))
    maps = (view(tensor, 1, 1, height, (64, 64)) for tensor, height in heights)
    rows, columns = grid((m, n, k), tile)
    clusters = min(rows * columns, module.sms // (tile.cm * tile.cn))
    group = max(1, int(config["group"]) // tile.cm)
    return Call(module.launcher((clusters,), *maps, k, rows, columns, k // 64, group), keep=(a, b, c))


def turns(sizes: Sizes, tile: Tile) -> int:
    """Tiles of the busiest of 132 blocks."""
    rows, columns = grid(sizes, tile)
    return common.cdiv(rows * columns, common.SMS // (tile.cm * tile.cn))


def load(sizes: Sizes, columns: int) -> int:
    """Columns that the busiest block multiplies taking turns, and what its turns cost."""
    return turns(sizes, _tile(f"128x{columns} pingpong", "1x1", 1)) * (columns + TURN)


def estimate(sizes: Sizes, tile: Tile) -> float:
    """Estimated µs: waves of tiles at the slowest of tensor cores (4096 FLOP a clock), shared memory (160 B)
    and L2, with a tenth of the next, and what start and epilogues add."""
    tensor = tile.bm * tile.bn / 32
    shared = (tile.p // 64 * 4 * (64 + tile.q) * 32 + tile.stage_bytes) / 160
    l2 = (tile.bm / tile.cn + tile.bn / tile.cm) * host.ROW / L2_BYTES
    _, second, slowest = sorted((tensor, shared, l2))
    exposed = 300.0 if tile.pingpong else 600.0 + 2.0 * tile.mi * tile.q
    steps = sizes[2] // 64
    clocks = 5000 + turns(sizes, tile) * (steps * (slowest + 0.1 * second) + exposed) + exposed
    # among equals the deeper ring, then more room for C
    return (clocks - tile.stages - 0.1 * tile.buffers) / (1000 * host.CLOCK)


def cost(case: Case, config: Config) -> float:
    """Estimated µs."""
    return estimate(_sizes(case), tile_of(config))


def fault(sizes: Sizes, config: Mapping[str, Any]) -> str | None:
    """Why these sizes cannot or need not be done, whatever the time."""
    m, n, k = sizes
    tile = tile_of(config)
    reason = common.tma_reason(K=k, N=n) or tile.reason()
    if reason:
        return reason
    if k % 64:
        return "rows do not start on 128 bytes: triton/gemm_pitch"
    if m <= 128:
        return f"M = {m} is one row of tiles: triton/gemm_skinny and triton/gemm_streamk"
    rows, columns = grid(sizes, tile)
    if rows * columns * (k // 64) > common.INT32_MAX:
        return "more steps in all tiles than an int counts"
    if config["buffers"] > 1 and tile.stages == _tile(config["tile"], config["cluster"], 1).stages:
        return "the deepest ring leaves as many buffers"
    if (tile.cm > 1 and m <= tile.bm) or (tile.cn > 1 and n <= tile.bn):
        return "a single tile along the cluster: nothing to share"
    if tile.pingpong and tile.cn > 1:
        return "taking turns, rows of A are no more than those of B: clusters share B's"
    if tile.pingpong and turns(sizes, tile) < 2:
        return "no block has two tiles: there are no turns to take"
    if rows * columns * tile.cm * tile.cn < common.SMS // 2:
        return "tiles for less than half the SMs: triton/gemm and triton/gemm_streamk have smaller ones"
    return None


def valid(case: Case, config: Config) -> str | None:
    """None, or why this kernel cannot or need not do ``case`` with ``config``."""
    sizes = _sizes(case)
    reason = fault(sizes, config)
    if reason:
        return reason
    tile, (least, best) = tile_of(config), _best(sizes)
    if config["group"] != 16 and grid(sizes, tile)[0] * tile.cm <= 8:
        return "there are no more than 8 rows of tiles: the raster is the same as with groups of 16"
    if tile.pingpong:
        times = load(sizes, tile.bn) / least
        return None if times <= JUNK else f"{times:.2f} times the columns of the best width"
    times = estimate(sizes, tile) / best
    return None if times <= NEAR else f"{times:.2f} times the estimated time of the best"


def _launches(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """All that can be launched, with the first raster."""
    for tile in SPACE["tile"]:
        for cluster in SPACE["cluster"]:
            for buffers in SPACE["buffers"]:
                config = {"tile": tile, "cluster": cluster, "buffers": buffers, "group": SPACE["group"][0]}
                if fault(sizes, config) is None:
                    yield config


@lru_cache(maxsize=1024)
def _best(sizes: Sizes) -> tuple[int, float]:
    """The fewest columns of all widths, and the least estimated µs of all launches."""
    tiles = [tile_of(c) for c in _launches(sizes)]
    least = min((load(sizes, t.bn) for t in tiles if t.pingpong), default=1)
    return least, min((estimate(sizes, t) for t in tiles), default=1e30)


def seeds(case: Case) -> Sequence[Config]:
    """The width with the fewest columns, alone and in clusters, the best shared tile, the next width, the
    width that the cost model likes most; then other rasters, more room for C, a further tile and width."""
    sizes = _sizes(case)
    able = [c for c in _launches(sizes) if valid(case, c) is None]
    alone = [c for c in able if tile_of(c).pingpong and (c["cluster"], c["buffers"]) == ("1x1", 1)]
    widths = sorted(alone, key=lambda c: (load(sizes, tile_of(c).bn), cost(case, c)))
    shared = common.ranked(
        (c for c in able if not tile_of(c).pingpong), lambda c: cost(case, c), lambda c: c["tile"], 3
    )
    if not widths:
        return shared
    first, changes = widths[0], ({"cluster": "2x1"}, {"group": 32}, {"buffers": 2}, {"group": 8})
    in_cluster, far, roomy, near = ({**first, **change} for change in changes)
    liked = min((c for c in able if tile_of(c).pingpong), key=lambda c: cost(case, c))
    order = (first, in_cluster, *shared[:1], *widths[1:2], liked, far, roomy)
    order += (*shared[1:2], *widths[2:3], near)
    found = {tuple(c.items()): c for c in order if valid(case, c) is None}
    return list(found.values())[:8]


def default(case: Case) -> Config:
    """The width that leaves the busiest block the fewest columns, or a usual one where no config is valid."""
    usual = {name: values[0] for name, values in SPACE.items()} | {"tile": "128x176 pingpong"}
    return next(iter(seeds(case)), usual)


KERNELS = (
    Kernel(
        id="triton/gemm_widths",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
        files=("_common.py", "_ragged.py", "_pitch.py", "gemm_ragged.py", "gemm_pitch.py"),
        summary="Gluon with wgmma in PTX: whole tiles of any 8 columns, warpgroups that take turns",
        cost=cost,
    ),
)
