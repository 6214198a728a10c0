"""``triton/gemm_pitch``: C = A·Bᵀ for rows an odd multiple of 16 bytes apart, in tiles of any 16 rows or
columns, bf16 or fp16.

``gemm_ragged`` with three things more, against waves that are nearly empty. Its tiles have sides of any
multiple of 16: the product is a ``wgmma`` in PTX over a tuple of Gluon tensors of 16 columns, which Gluon's
own, with powers of two, cannot be. ``swapped``: rows of C are wgmma's N, so that 176 or 144 of them are a
tile. ``pingpong``: two warpgroups take turns with tiles of their own, one storing while the other multiplies.
And an operand's share of a stage is one load, of as many rows.

Sums, staging and the stores of C are Gluon's; ring, loads and products are PTX (``_pitch.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from . import _pitch as host
from ._pitch import constraints, init_text, load_text, product_text
from ._ragged import arrive_text, rank_text, sync_text, wait_text
from .gemm_ragged import act, part, place, store_box, value

SPACE = {
    "tile": host.TILES,
    "cluster": ("2x1", "1x2", "1x1"),
    "stride": (1, 8, 4),
    "stages": (3, 4, 5, 6),
    "group": (8, 16),
}
#: valid refuses what the cost model thinks this many times as long as the best, and this many µs longer
NEAR, NEAR_US = 1.12, 7.0
SIZES = ("k", "tiles_m", "tiles_n", "stride", "tail", "long", "short", "last", "steps")


@builtin
def multiply(sums, stage, text, marks, _semantic=None):
    """The sums after a text that takes them and a number."""
    pack = sums[0].type.shape[1] // 2
    return gl.inline_asm_elementwise(
        text, marks, [*sums, stage], [gl.float32] * len(sums), False, pack, _semantic=_semantic
    )


@gluon.jit
def blank(COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """COUNT pieces of sums, WIDTH columns each, zero."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero = gl.zeros([64, WIDTH], gl.float32, layout)
    if COUNT == 1:
        out = (zero,)
    else:
        # by halves: the compiler recurses
        out = blank(COUNT // 2, WIDTH) + blank(COUNT - COUNT // 2, WIDTH)
    return out


@gluon.jit
def joined(sums, FIRST: gl.constexpr, COUNT: gl.constexpr, LAST: gl.constexpr, WIDTH: gl.constexpr):
    """COUNT pieces of WIDTH columns side by side, [64, WIDTH · COUNT]; LAST stands for what follows it."""
    if COUNT == 1:
        out = sums[FIRST if FIRST < LAST else LAST]
    else:
        left = joined(sums, FIRST, COUNT // 2, LAST, WIDTH)
        right = joined(sums, FIRST + COUNT // 2, COUNT // 2, LAST, WIDTH)
        out = gl.join(left, right).permute([0, 2, 1]).reshape([64, WIDTH * COUNT])
    return out


@gluon.jit
def produce(work, steps, T: gl.constexpr, GROUP: gl.constexpr):
    """Fills the ring, as far ahead as it is released, tile after tile."""
    t: gl.constexpr = T.value
    BLOCKS: gl.constexpr = t.cm * t.cn
    LOAD: gl.constexpr = load_text(t)
    FREE: gl.constexpr = wait_text(t.barriers + 8 * t.stages)
    value(sync_text(BLOCKS))
    rank = value(rank_text(BLOCKS))
    it = 0
    for tile in range(gl.program_id(0) // BLOCKS, work[1] * work[2], gl.num_programs(0) // BLOCKS):
        c, row, first, j = place(tile, work, t.bm * t.cm, GROUP)
        col = j * (t.bn * t.cn)
        if t.cm > 1:
            row += rank * t.bm
            col += rank * t.box_b
        if t.cn > 1:
            row += rank * t.box_a
            col += rank * t.bn
        for s in range(steps):
            stage = it % t.stages
            act(FREE, stage, (it // t.stages & 1) ^ 1)
            gl.inline_asm_elementwise(
                LOAD, "=r,r,r,r,r,r,r,~{memory}", [stage, rank, first + s * 64, row, c, col],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            it += 1
    value(sync_text(BLOCKS))


@gluon.jit
def store_chunk(
    c, sums, chunks, boxes, cls, row, col,
    T: gl.constexpr, OWNER: gl.constexpr, I: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """The N-th chunk of the I-th 64 of a warpgroup's rows of P, through one of its buffers of staged C."""
    t: gl.constexpr = T.value
    FIRST: gl.constexpr = t.chunks[N][0]
    WIDTH: gl.constexpr = t.chunks[N][1]
    TURN: gl.constexpr = I * len(t.chunks) + N
    BUFFER: gl.constexpr = OWNER * t.buffers + TURN % t.buffers
    BOXES: gl.constexpr = WIDTH // t.box_q
    # only stores from other buffers than this one may still be under way
    YOUNGER: gl.constexpr = t.younger[TURN]
    x = joined(sums, (I * t.q + FIRST) // 16, WIDTH // 16, t.pieces, 16).to(c.dtype)
    tma.store_wait(YOUNGER)
    if t.swapped:
        chunks.index(BUFFER).slice(0, WIDTH).store(x.permute([1, 0]))
    else:
        chunks.index(BUFFER).slice(0, WIDTH, dim=1).store(x)
    fence_async_shared()
    for b in gl.static_range(BOXES):
        box = boxes.index(BUFFER * (64 // t.box_q) + b)
        if t.swapped:
            store_box(c, [cls, row + FIRST + b * t.box_q, col + I * 64], box)
        else:
            store_box(c, [cls, row + I * 64, col + FIRST + b * t.box_q], box)


@gluon.jit
def consume(
    c, chunks, boxes, work, steps,
    OWNER: gl.constexpr, T: gl.constexpr, GROUP: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Multiplies the OWNER-th share of each tile, or every second tile: one step's products stay in flight
    while the next is waited for, then the stage before is released to all blocks that write it. STORE is
    ``store_chunk`` or does what it does."""
    t: gl.constexpr = T.value
    BLOCKS: gl.constexpr = t.cm * t.cn
    FULL: gl.constexpr = wait_text(t.barriers)
    RELEASE: gl.constexpr = arrive_text(BLOCKS, t.barriers + 8 * t.stages)
    MY_TURN: gl.constexpr = wait_text(t.barriers + 16 * t.stages)
    YOUR_TURN: gl.constexpr = arrive_text(1, t.barriers + 16 * t.stages)
    PRODUCT: gl.constexpr = product_text(t, OWNER)
    PRODUCT_MARKS: gl.constexpr = constraints(t, t.piece // 2)
    TURNS: gl.constexpr = 2 if t.pingpong else 1
    MI: gl.constexpr = t.mi
    CHUNKS: gl.constexpr = len(t.chunks)
    value(sync_text(BLOCKS))
    rank = value(rank_text(BLOCKS))
    clusters = gl.num_programs(0) // BLOCKS
    begin = gl.program_id(0) // BLOCKS
    it = 0
    turn = 0
    if t.pingpong:
        begin += OWNER * clusters
        it += OWNER * steps
        turn += 1 - OWNER
    # once: a tile's first product overwrites the sums of the one before
    sums = blank(t.pieces, t.piece)
    for tile in range(begin, work[1] * work[2], TURNS * clusters):
        # first of all: behind the products its divisions would hold up the other warpgroup's turn
        cls, row, _first, j = place(tile, work, t.bm * t.cm, GROUP)
        col = j * (t.bn * t.cn)
        if t.cm > 1:
            row += rank * t.bm
        if t.cn > 1:
            col += rank * t.bn
        if not t.pingpong:
            if t.swapped:
                col += OWNER * t.mi * 64
            else:
                row += OWNER * t.mi * 64
        if t.pingpong:
            # a parity only tells odd from even: look at the ring once the other has gone past
            act(MY_TURN, OWNER, turn & 1)
            turn += 1
        for s in range(steps):
            stage = it % t.stages
            act(FULL, stage, it // t.stages & 1)
            sums = multiply(sums, stage + (t.first if s == 0 else 0), PRODUCT, PRODUCT_MARKS)
            if s > 0:
                act(RELEASE, (it + t.stages - 1) % t.stages, 0)
            it += 1
        if t.pingpong:
            act(YOUR_TURN, 1 - OWNER, 0)
        sums = multiply(sums, it, "wgmma.wait_group.sync.aligned 0;", PRODUCT_MARKS)
        act(RELEASE, (it + t.stages - 1) % t.stages, 0)
        it += (TURNS - 1) * steps
        for i in gl.static_range(MI):
            for n in gl.static_range(CHUNKS):
                STORE(c, sums, chunks, boxes, cls, row, col, T, OWNER, i, n)
    tma.store_wait(0)
    value(sync_text(BLOCKS))


@gluon.jit
def start(c, one, work, steps, T: gl.constexpr, GROUP: gl.constexpr, STORE: gl.constexpr):
    """Starts the warpgroups; c is for STORE, ``one`` a descriptor of C. All shared memory is one allocation,
    so that the PTX knows where its parts lie: ring, staged C, barriers."""
    t: gl.constexpr = T.value
    pool = gl.allocate_shared_memory(
        one.dtype, [t.barriers // 1024 + 1, 8, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    # a chunk of 64 x 64, and the same as boxes that lie one after the other
    layout: gl.constexpr = gl.NVMMASharedLayout(2 * t.store_box[1], 16, 2)
    COUNT: gl.constexpr = t.consumers * t.buffers
    BOXES: gl.constexpr = COUNT * (64 // t.box_q)
    chunks = part(pool, t.ring, t.barriers, one.dtype, [COUNT, 64, 64], layout)
    boxes = part(pool, t.ring, t.barriers, one.dtype, [BOXES, 1, t.store_box[0], t.store_box[1]], one.layout)
    value(init_text(t))
    if t.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (c, chunks, boxes, work, steps, 0, T, GROUP, STORE)),
                (consume, (c, chunks, boxes, work, steps, 1, T, GROUP, STORE)),
                (produce, (work, steps, T, GROUP)),
            ],
            [4, 4],
            [t.consumer_regs, t.producer_regs],
        )
    else:
        gl.static_assert(t.consumers == 3)
        gl.warp_specialize(
            [
                (consume, (c, chunks, boxes, work, steps, 0, T, GROUP, STORE)),
                (consume, (c, chunks, boxes, work, steps, 1, T, GROUP, STORE)),
                (consume, (c, chunks, boxes, work, steps, 2, T, GROUP, STORE)),
                (produce, (work, steps, T, GROUP)),
            ],
            [4, 4, 4],
            [t.consumer_regs, t.consumer_regs, t.producer_regs],
        )


@gluon.jit
def gemm_pitch(
    a, b, c, k, tiles_m, tiles_n, stride, tail, long, short, last, steps, T: gl.constexpr, GROUP: gl.constexpr
):
    """a [classes, rows, k], b [1, n, k] and c [classes, rows, n] are descriptors, T is a ``_pitch.Tile``."""
    work = (k, tiles_m, tiles_n, stride, tail, long, short, last)
    start(c, c, work, steps, T, GROUP, store_chunk)


def static(case: Case, config: Config) -> Static:
    """Tile, ring, cluster, raster and type; sizes and stride are runtime values."""
    return {**{x: config[x] for x in SPACE if x != "stride"}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The kernel for one tile."""
    half = static["dtype"] == "fp16"
    tile = host.Tile.of(static["tile"], static["cluster"], int(static["stages"]), half)
    t = common.element(static["dtype"])

    def box(rows: int, columns: int) -> str:
        return f"tensordesc<{t}[1,{rows},{columns}],{gl.NVMMASharedLayout(2 * columns, 16, 3)!r}>"

    return TritonSource(
        fn=gemm_pitch,
        signature={
            # Triton wants powers of two in a type; what is loaded are the boxes below
            "a": box(64, 64),
            "b": box(64, 64),
            "c": box(*tile.store_box),
            **dict.fromkeys(SIZES, "i32"),
        },
        constexprs={"T": tile, "GROUP": max(1, int(static["group"]) // tile.cm)},
        options={"num_warps": 4},
        gluon=True,
        cluster=tile.cm * tile.cn,
        boxes={"a": (1, tile.box_a, 64), "b": (1, tile.box_b, 64)},
    )


def view(tensor: Any, count: int, stride: int, height: int, block: tuple[int, int]) -> Any:
    """The descriptor of ``count`` classes of ``height`` rows, ``stride`` rows from one to the next."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    pitch = tensor.shape[1]
    shape, strides = [count, height, pitch], [pitch, stride * pitch, 1]
    layout = gl.NVMMASharedLayout(2 * block[1], 16, 3)
    return TensorDescriptor(tensor, shape, strides, [1, *block], layout)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors over classes of rows, and as many clusters as fit, or fewer where tiles are fewer."""
    tile, rows = host.plan(_sizes(case), config)
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    by_class = (rows.count, rows.stride, rows.height)
    maps = (
        view(a, *by_class, (64, 64)),
        view(b, 1, 1, case["n"], (64, 64)),
        view(c, *by_class, tile.store_box),
    )
    tiles_n = common.cdiv(case["n"], tile.bn * tile.cn)
    clusters = min(rows.tiles * tiles_n, module.sms // (tile.cm * tile.cn))
    sizes = (case["k"], rows.tiles, tiles_n, rows.stride, rows.tail, rows.long, rows.short, rows.last)
    return Call(module.launcher((clusters,), *maps, *sizes, rows.steps), keep=(a, b, c))


def _sizes(case: Case) -> tuple[int, int, int]:
    return case["m"], case["n"], case["k"]


def valid(case: Case, config: Config) -> str | None:
    """None, or why this kernel cannot or need not do ``case`` with ``config``."""
    reason = host.reason(_sizes(case), config)
    if reason:
        return reason
    if config["group"] != 8 and case["m"] <= 8 * host.plan(_sizes(case), config)[0].bm:
        return "there are no more than 8 rows of tiles: the raster is the same as with groups of 8"
    time, best = cost(case, config), _best(_sizes(case))
    near = max(NEAR * best, best + NEAR_US)
    return None if time < near else f"{time / best:.1f} times the estimated time of the best"


def _launches(sizes: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """All that can be launched, with the deepest ring that fits."""
    for tile in SPACE["tile"]:
        for cluster in SPACE["cluster"]:
            for stride in SPACE["stride"]:
                for stages in SPACE["stages"]:
                    config = {"tile": tile, "cluster": cluster, "stride": stride, "stages": stages}
                    if host.reason(sizes, config) is None:
                        yield {**config, "group": 8}


@lru_cache(maxsize=65536)
def _cost(sizes: tuple[int, int, int], tile: str, cluster: str, stride: int, stages: int) -> float:
    config = {"tile": tile, "cluster": cluster, "stride": stride, "stages": stages}
    return host.cost(sizes, *host.plan(sizes, config))


def cost(case: Case, config: Config) -> float:
    """Estimated µs."""
    return _cost(_sizes(case), *(config[x] for x in ("tile", "cluster", "stride", "stages")))


@lru_cache(maxsize=1024)
def _best(sizes: tuple[int, int, int]) -> float:
    """The least estimated µs of all launches."""
    names = ("tile", "cluster", "stride", "stages")
    return min((_cost(sizes, *(c[x] for x in names)) for c in _launches(sizes)), default=1e30)


def seeds(case: Case) -> Sequence[Config]:
    """By the cost model: the best, the best with another tile, and the first's tile with another stride and
    cluster; then further tiles, strides and clusters."""
    ranked = sorted(
        (c for c in _launches(_sizes(case)) if valid(case, c) is None), key=lambda c: cost(case, c)
    )
    if not ranked:
        return ()
    best = ranked[0]

    def others(name: str, like: tuple[str, ...]) -> list[dict[str, Any]]:
        """The best config for each other value of ``name`` that agrees with the first in ``like``."""
        agreeing = (c for c in ranked if c[name] != best[name] and all(c[x] == best[x] for x in like))
        return common.ranked(agreeing, lambda c: cost(case, c), lambda c: c[name], 8)

    tiles, strides = others("tile", ()), others("stride", ("tile", "cluster"))
    clusters = others("cluster", ("tile",))
    order = [best, *tiles[:1], *strides[:1], *clusters[:1]]
    order += [*tiles[1:4], *strides[1:], *clusters[1:], *tiles[4:]]
    order += common.ranked(ranked, lambda c: cost(case, c), lambda c: (c["tile"], c["stride"]), 8)
    return list({tuple(c.items()): c for c in order}.values())


def default(case: Case) -> Config:
    """The cost model's first choice, or a usual tile where no config is valid."""
    usual = {"tile": "128x256 coop", "cluster": "2x1", "stride": 1, "stages": 4, "group": 8}
    return next(iter(seeds(case)), usual)


KERNELS = (
    Kernel(
        id="triton/gemm_pitch",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
        files=("_common.py", "_ragged.py", "_pitch.py", "gemm_ragged.py"),
        summary="Gluon with wgmma in PTX: tiles of any 16 rows or columns for rows off 128 bytes",
        cost=cost,
    ),
)
