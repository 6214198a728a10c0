"""``triton/gemm_ragged_split``: ``gemm_ragged`` with its last tiles cut along K, bf16 or fp16.

Tiles of powers of two leave the last wave of many a ragged case nearly empty. Here whole waves are walked
as there, and the K steps of what is left are dealt to all clusters in equal shares (``_split.py``). A cluster
that has not the last step of a tile leaves its sums in fp32; the one that has adds them, always in the same
order. Both blocks of a cluster take the same steps of the same tiles, so the ring's phases stay in step.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from . import _ragged as ragged
from . import _split as host
from ._ragged import arrive_text, init_text, rank_text, sync_text, wait_text
from ._split import hear_text, load_split_text, post_text
from .gemm_ragged import act, part, place, store_box, value

SPACE = {
    "tile": ("128x256", "256x128", "192x128"),
    "cluster": ("2x1", "1x2"),
    "stride": (1, 4, 8),
    "stages": (4, 5),
    "group": (8, 16),
    # whole waves that are cut as well
    "more": (0, 1),
}
SIZES = ("k", "tiles_m", "tiles_n", "stride", "tail", "long", "short", "last", "steps", "waves", "total")


@gluon.jit
def edge(worker, workers, total, steps, LEAST: gl.constexpr):
    """Where a cluster's share of ``total`` K steps begins: ``Cut.edge``."""
    at = worker * total // workers
    over = at % steps
    up = gl.where(over > steps - LEAST, at - over + steps, at)
    return gl.where(over < LEAST, at - over, up)


@gluon.jit
def share(worker, workers, dealt, LEAST: gl.constexpr):
    """Begin and end of a cluster's share, and the tiles that it takes in all."""
    steps, waves, total = dealt
    low = edge(worker, workers, total, steps, LEAST)
    high = edge(worker + 1, workers, total, steps, LEAST)
    cut = gl.where(high > low, (high - 1) // steps - low // steps + 1, 0)
    return low, high, waves + cut


@gluon.jit
def unit_at(u, worker, workers, dealt, low, high):
    """Tile, first and last K step of a cluster's u-th unit, and the tile among the cut ones."""
    steps, waves, _total = dealt
    whole = u < waves
    q = (high - 1) // steps - (u - waves)
    tile = gl.where(whole, u * workers + worker, waves * workers + q)
    begin = gl.where(whole, 0, max(low - q * steps, 0))
    end = gl.where(whole, steps, min(high - q * steps, steps))
    return tile, begin, end, q


@gluon.jit
def produce(work, dealt, T: gl.constexpr, GROUP: gl.constexpr, LEAST: gl.constexpr):
    """Fills the ring, as far ahead as it is released, unit after unit."""
    t: gl.constexpr = T.value
    BLOCKS: gl.constexpr = t.cm * t.cn
    LOAD: gl.constexpr = load_split_text(t)
    FREE: gl.constexpr = wait_text(t.barriers + 8 * t.stages)
    value(sync_text(BLOCKS))
    rank = value(rank_text(BLOCKS))
    worker = gl.program_id(0) // BLOCKS
    workers = gl.num_programs(0) // BLOCKS
    low, high, units = share(worker, workers, dealt, LEAST)
    it = 0
    for u in range(units):
        tile, begin, end, _q = unit_at(u, worker, workers, dealt, low, high)
        c, row, first, j = place(tile, work, t.bm * t.cm, GROUP)
        col = j * (t.columns * t.cn)
        if t.cm > 1:
            row += rank * t.bm
            col += rank * t.box_b
        if t.cn > 1:
            row += rank * t.box_a
            col += rank * t.columns
        for s in range(begin, end):
            stage = it % t.stages
            act(FREE, stage, (it // t.stages & 1) ^ 1)
            gl.inline_asm_elementwise(
                LOAD, "=r,r,r,r,r,r,r,~{memory}", [stage, rank, first + s * 64, row, c, col],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            it += 1
    value(sync_text(BLOCKS))


@gluon.jit
def signal(TEXT: gl.constexpr, flags, slot):
    """A PTX text on the flags of a slot, one a warp."""
    at = (flags + slot * 4).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(TEXT, "=r,l,~{memory}", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def inside(ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Where elements of a slice of a part lie: eight columns of all rows after the other, so that a warp's
    pairs lie together."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    return (cols // 8 * ROWS + rows) * 8 + cols % 8


@gluon.jit
def leave_slices(at, acc, ROWS: gl.constexpr, COLS: gl.constexpr):
    """acc [ROWS, COLS] fp32 to a part at ``at``, 64 columns after the other."""
    if COLS <= 64:
        LAYOUT: gl.constexpr = acc.type.layout
        gl.store(at + inside(ROWS, COLS, LAYOUT), acc, cache_modifier=".cg")
    else:
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute([0, 2, 1]).split()
        leave_slices(at, left, ROWS, COLS // 2)
        leave_slices(at + ROWS * COLS // 2, right, ROWS, COLS // 2)


@gluon.jit
def finish_slices(
    c, staged, acc, at, pitch, parts, cls, row, col,
    ROWS: gl.constexpr, COLS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """acc [ROWS, COLS] fp32 and ``parts`` parts, the first at ``at``, each ``pitch`` before the other,
    to C: a slice of columns after the other through ``staged``."""
    if SLICES == 1:
        LAYOUT: gl.constexpr = acc.type.layout
        for p in range(parts):
            acc += gl.load(at - p * pitch + inside(ROWS, COLS, LAYOUT), cache_modifier=".cg")
        tma.store_wait(0)
        staged.reshape([ROWS, COLS]).store(acc.to(c.dtype))
        fence_async_shared()
        store_box(c, [cls, row, col], staged)
    else:
        HALF: gl.constexpr = COLS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        finish_slices(c, staged, left, at, pitch, parts, cls, row, col, ROWS, HALF, SLICES // 2)
        at += ROWS * HALF
        finish_slices(c, staged, right, at, pitch, parts, cls, row, col + HALF, ROWS, HALF, SLICES // 2)


@gluon.jit
def consume(
    c, partial, flags, rings, staged, work, dealt,
    OWNER: gl.constexpr, T: gl.constexpr, GROUP: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Multiplies the OWNER-th share of each unit's rows, as gemm_ragged does; then leaves the sums, or adds
    what others left of the same rows, and stores."""
    t: gl.constexpr = T.value
    BLOCKS: gl.constexpr = t.cm * t.cn
    ROWS: gl.constexpr = t.rows
    BN: gl.constexpr = t.bn
    FULL: gl.constexpr = wait_text(t.barriers)
    RELEASE: gl.constexpr = arrive_text(BLOCKS, t.barriers + 8 * t.stages)
    PEERS: gl.constexpr = BLOCKS * t.consumers
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ring_a, ring_b = rings
    steps, _waves, total = dealt
    value(sync_text(BLOCKS))
    rank = value(rank_text(BLOCKS))
    worker = gl.program_id(0) // BLOCKS
    workers = gl.num_programs(0) // BLOCKS
    low, high, units = share(worker, workers, dealt, LEAST)
    it = 0
    for u in range(units):
        tile, begin, end, q = unit_at(u, worker, workers, dealt, low, high)
        acc = gl.zeros([ROWS, BN], gl.float32, wide)
        for s in range(begin, end):
            stage = it % t.stages
            act(FULL, stage, it // t.stages & 1)
            x = ring_a.index(stage * t.consumers + OWNER)
            acc = warpgroup_mma(x, ring_b.index(stage).permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if s > begin:
                act(RELEASE, (it + t.stages - 1) % t.stages, 0)
            it += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        act(RELEASE, (it + t.stages - 1) % t.stages, 0)
        slot = worker * PEERS + rank * t.consumers + OWNER
        if end < steps:
            leave_slices(partial + slot * (ROWS * BN), acc, ROWS, BN)
            signal(post_text(), flags, slot)
        else:
            parts = 0
            if begin > 0:
                while edge(worker - parts, workers, total, steps, LEAST) > q * steps:
                    parts += 1
                    signal(hear_text(), flags, slot - parts * PEERS)
            cls, row, _first, j = place(tile, work, t.bm * t.cm, GROUP)
            row += OWNER * t.rows
            col = j * (t.columns * t.cn)
            if t.cm > 1:
                row += rank * t.bm
            if t.cn > 1:
                col += rank * t.columns
            at = partial + (slot - PEERS) * (ROWS * BN)
            finish_slices(
                c, staged.index(OWNER), acc, at, PEERS * ROWS * BN, parts, cls, row, col, ROWS, BN, t.slices
            )
    tma.store_wait(0)
    value(sync_text(BLOCKS))


@gluon.jit
def gemm_ragged_split(
    a, b, c, partial, flags, k, tiles_m, tiles_n, stride, tail, long, short, last, steps, waves, total,
    T: gl.constexpr, GROUP: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """a [classes, rows, k], b [1, n, k] and c [classes, rows, n] are descriptors, T is a ``_ragged.Tile``.
    partial fp32 [slots, rows · columns] and flags int32 [slots, 4], zero, with a slot a warpgroup; each
    cluster takes ``waves`` tiles and its share of ``total`` K steps. Shared memory as in gemm_ragged."""
    t: gl.constexpr = T.value
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pool = gl.allocate_shared_memory(a.dtype, [t.barriers // 1024 + 1, 8, 64], operand)
    ring_a = part(pool, 0, t.ring_b, a.dtype, [t.stages * t.consumers, t.rows, 64], operand)
    ring_b = part(pool, t.ring_b, t.ring, a.dtype, [t.stages, t.bn, 64], operand)
    staged = part(pool, t.ring, t.barriers, c.dtype, [t.consumers, 1, t.rows, t.bn // t.slices], c.layout)
    rings = (ring_a, ring_b)
    work = (k, tiles_m, tiles_n, stride, tail, long, short, last)
    dealt = (steps, waves, total)
    value(init_text(t))
    if t.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (c, partial, flags, rings, staged, work, dealt, 0, T, GROUP, LEAST)),
                (consume, (c, partial, flags, rings, staged, work, dealt, 1, T, GROUP, LEAST)),
                (produce, (work, dealt, T, GROUP, LEAST)),
            ],
            [4, 4],
            [t.consumer_regs, t.producer_regs],
        )
    else:
        gl.static_assert(t.consumers == 3)
        gl.warp_specialize(
            [
                (consume, (c, partial, flags, rings, staged, work, dealt, 0, T, GROUP, LEAST)),
                (consume, (c, partial, flags, rings, staged, work, dealt, 1, T, GROUP, LEAST)),
                (consume, (c, partial, flags, rings, staged, work, dealt, 2, T, GROUP, LEAST)),
                (produce, (work, dealt, T, GROUP, LEAST)),
            ],
            [4, 4, 4],
            [t.consumer_regs, t.consumer_regs, t.producer_regs],
        )


def static(case: Case, config: Config) -> Static:
    """Tile, ring, cluster, raster and type; sizes, stride and the cut are runtime values."""
    return {**{x: config[x] for x in SPACE if x not in ("stride", "more")}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The kernel for one tile."""
    plan = ragged.Tile.of(static["tile"], static["cluster"], int(static["stages"]))
    t = common.element(static["dtype"])
    layout = gl.NVMMASharedLayout(128, 16, 3)

    def box(rows: int, columns: int) -> str:
        return f"tensordesc<{t}[1,{rows},{columns}],{layout!r}>"

    return TritonSource(
        fn=gemm_ragged_split,
        signature={
            "a": box(plan.box_a, 64),
            "b": box(plan.box_b, 64),
            "c": box(plan.rows, plan.bn // plan.slices),
            "partial": "*fp32",
            "flags": "*i32",
            **dict.fromkeys(SIZES, "i32"),
        },
        constexprs={"T": plan, "GROUP": max(1, int(static["group"]) // plan.cm), "LEAST": host.STEPS},
        attrs={"partial": 16, "flags": 16},
        options={"num_warps": 4},
        gluon=True,
        cluster=plan.cm * plan.cn,
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors over classes of rows, a slot for every warpgroup's part, and as many clusters as fit."""
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tile, rows = host.plan((case["m"], case["n"], case["k"]), config)
    layout = gl.NVMMASharedLayout(128, 16, 3)

    def view(tensor: Any, count: int, stride: int, height: int, block: tuple[int, int]) -> Any:
        pitch = tensor.shape[1]
        shape, strides = [count, height, pitch], [pitch, stride * pitch, 1]
        return TensorDescriptor(tensor, shape, strides, [1, *block], layout)

    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    maps = (
        view(a, rows.count, rows.stride, rows.height, (tile.box_a, 64)),
        view(b, 1, 1, case["n"], (tile.box_b, 64)),
        view(c, rows.count, rows.stride, rows.height, (tile.rows, tile.bn // tile.slices)),
    )
    tiles_n = common.cdiv(case["n"], tile.columns * tile.cn)
    blocks = tile.cm * tile.cn
    cut = host.Cut.of(rows.tiles * tiles_n, rows.steps, module.sms // blocks, int(config["more"]))
    slots = cut.workers * blocks * tile.consumers
    partial = torch.empty((slots, tile.rows * tile.bn), dtype=torch.float32, device=c.device)
    flags = torch.zeros((slots, 4), dtype=torch.int32, device=c.device)
    sizes = (case["k"], rows.tiles, tiles_n, rows.stride, rows.tail, rows.long, rows.short, rows.last)
    dealt = (rows.steps, cut.waves, cut.shared * rows.steps)
    run = module.launcher((cut.workers,), *maps, partial, flags, *sizes, *dealt)
    return Call(run, keep=(a, b, c, partial, flags))


def valid(case: Case, config: Config) -> str | None:
    """None, or why this kernel cannot or need not do ``case`` with ``config``."""
    sizes = (case["m"], case["n"], case["k"])
    reason = host.reason(sizes, config)
    if reason:
        return reason
    time, best = _cost(sizes, config), _best(sizes)
    near = max(1.06 * best, best + 5)
    return None if time < near else f"{time / best:.1f} times the estimated time of the best"


def _cost(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> float:
    return host.cost(sizes, *host.plan(sizes, config), int(config["more"]))


def _launches() -> Iterator[dict[str, Any]]:
    """Every tile, cluster, stride and cut with the deepest ring that fits."""
    for tile in SPACE["tile"]:
        for cluster in SPACE["cluster"]:
            fitting = (s for s in SPACE["stages"] if not ragged.Tile.of(tile, cluster, s).reason())
            stages = max(fitting, default=0)
            for stride in SPACE["stride"]:
                for more in SPACE["more"]:
                    if stages:
                        config = {"tile": tile, "cluster": cluster, "stride": stride, "stages": stages}
                        yield {**config, "group": 8, "more": more}


@lru_cache(maxsize=1024)
def _best(sizes: tuple[int, int, int]) -> float:
    """The least estimated µs of all launches."""
    return min((_cost(sizes, c) for c in _launches() if host.reason(sizes, c) is None), default=1e30)


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile, cluster, stride and cut by the cost model, best first."""
    sizes = (case["m"], case["n"], case["k"])
    return common.ranked(
        (c for c in _launches() if valid(case, c) is None),
        lambda c: _cost(sizes, c),
        lambda c: (c["tile"], c["cluster"], c["stride"], c["more"]),
        12,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the usual tile where no config is valid."""
    return next(iter(seeds(case)), next(_launches()))


KERNELS = (
    Kernel(
        id="triton/gemm_ragged_split",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
        files=("_common.py", "_ragged.py", "_split.py", "gemm_ragged.py"),
        summary="gemm_ragged with the ragged end cut along K, parts added in a fixed order",
    ),
)
