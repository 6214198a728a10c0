"""``triton/gemm_ragged``: C = A·Bᵀ in Gluon for rows an odd multiple of 16 bytes apart, bf16 or fp16.

There, nearly every 128-byte row of a tensor map's box lies in two lines of L2, and lines are what limits. Two
things halve them. ``cluster``: two blocks share an operand by multicast. ``stride``: a tile takes every
eighth row of A, so that all its rows lie the same way in their lines, and starts so far before K = 0 that
they start with one; what lies before a row's first element reads as zero. With every fourth row, half do.

A producer warpgroup fills the ring, one to three others multiply. Gluon of Triton 3.6 knows no multicast and
no arrival in another block, so ring barriers and loads are PTX (``_ragged.py``); products, staging and the
stores of C are Gluon's.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from . import _ragged as host
from ._ragged import arrive_text, init_text, load_text, rank_text, sync_text, wait_text

SPACE = {
    "tile": tuple(host.TILES),
    "cluster": ("2x1", "1x2", "1x1"),
    "stride": (1, 8, 4),
    "stages": (3, 4, 5, 6),
    "group": (8, 16),
}
SIZES = ("k", "tiles_m", "tiles_n", "stride", "tail", "long", "short", "last", "steps")
#: Triton renamed it between 3.6 and 3.9
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def part(pool, begin, end, dtype, shape, layout, _semantic=None):
    """Bytes from ``begin`` to ``end`` of ``pool`` [n, 8, 64] as what they hold. Triton 3.6 slices only what
    has a power of two of rows, and 3.9 refuses a view of more than was there."""
    if hasattr(pool, "reinterpret"):
        some = pool.slice(begin // 1024, (end - begin) // 1024, _semantic=_semantic)
        return some.reinterpret(dtype, shape, layout, _semantic=_semantic)
    return pool.index(begin // 1024, _semantic=_semantic)._reinterpret(
        dtype, shape, layout, _semantic=_semantic
    )


@gluon.jit
def value(TEXT: gl.constexpr):
    """What a PTX text without operands leaves in $0; all threads run it."""
    return gl.inline_asm_elementwise(TEXT, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def act(TEXT: gl.constexpr, x, y):
    """A PTX text that does something with two integers, $1 and $2."""
    gl.inline_asm_elementwise(TEXT, "=r,r,r,~{memory}", [x, y], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def place(tile, work, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Class, first row, first column of A, and column of tiles, for a cluster's tile of ROWS rows. Tiles are
    walked in bands of GROUP rows of tiles, column by column.

    Class c holds rows c, c + stride, …: the first ``tail`` classes have one row more and ``long`` tiles, the
    others ``short``. A descriptor with that row more would reach beyond A, so the last tile of a long class
    is taken from class c + stride, whose row r is row r + 1 of class c, from row ``last`` on."""
    k, tiles_m, tiles_n, stride, tail, long, short, last = work
    band = tile // (GROUP * tiles_n)
    inside = tile - band * (GROUP * tiles_n)
    height = min(tiles_m - band * GROUP, GROUP)
    i = band * GROUP + inside % height
    rest = i - tail * long
    extra = rest < 0
    c = gl.where(extra, i // long, tail + rest // short)
    q = gl.where(extra, i % long, rest % short)
    end = extra & (q == long - 1)
    return gl.where(end, c + stride, c), gl.where(end, last, q * ROWS), -((c * k) % 64), inside // height


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
        col = j * (t.columns * t.cn)
        if t.cm > 1:
            row += rank * t.bm
            col += rank * t.box_b
        if t.cn > 1:
            row += rank * t.box_a
            col += rank * t.columns
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
def store_slices(c, staged, acc, cls, row, col, ROWS: gl.constexpr, COLS: gl.constexpr, SLICES: gl.constexpr):
    """acc [ROWS, COLS] fp32 to C, a slice of columns after the other through ``staged``."""
    if SLICES == 1:
        tma.store_wait(0)
        staged.reshape([ROWS, COLS]).store(acc.to(c.dtype))
        fence_async_shared()
        store_box(c, [cls, row, col], staged)
    else:
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute([0, 2, 1]).split()
        store_slices(c, staged, left, cls, row, col, ROWS, COLS // 2, SLICES // 2)
        store_slices(c, staged, right, cls, row, col + COLS // 2, ROWS, COLS // 2, SLICES // 2)


@gluon.jit
def consume(c, rings, staged, work, steps, OWNER: gl.constexpr, T: gl.constexpr, GROUP: gl.constexpr):
    """Multiplies the OWNER-th share of each tile's rows: one step's wgmmas stay in flight while the next is
    waited for, then the stage before is released to all blocks that write it."""
    t: gl.constexpr = T.value
    BLOCKS: gl.constexpr = t.cm * t.cn
    ROWS: gl.constexpr = t.rows
    BN: gl.constexpr = t.bn
    FULL: gl.constexpr = wait_text(t.barriers)
    RELEASE: gl.constexpr = arrive_text(BLOCKS, t.barriers + 8 * t.stages)
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ring_a, ring_b, ring_x = rings
    value(sync_text(BLOCKS))
    rank = value(rank_text(BLOCKS))
    it = 0
    for tile in range(gl.program_id(0) // BLOCKS, work[1] * work[2], gl.num_programs(0) // BLOCKS):
        acc = gl.zeros([ROWS, BN], gl.float32, wide)
        if t.bx > 0:
            more = gl.zeros([ROWS, 64], gl.float32, narrow)
        for s in range(steps):
            stage = it % t.stages
            act(FULL, stage, it // t.stages & 1)
            x = ring_a.index(stage * t.consumers + OWNER)
            acc = warpgroup_mma(x, ring_b.index(stage).permute([1, 0]), acc, is_async=True)
            if t.bx > 0:
                more = warpgroup_mma(x, ring_x.index(stage).permute([1, 0]), more, is_async=True)
                acc, more = warpgroup_mma_wait(2, deps=[acc, more])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            if s > 0:
                act(RELEASE, (it + t.stages - 1) % t.stages, 0)
            it += 1
        if t.bx > 0:
            acc, more = warpgroup_mma_wait(0, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        act(RELEASE, (it + t.stages - 1) % t.stages, 0)
        cls, row, _first, j = place(tile, work, t.bm * t.cm, GROUP)
        row += OWNER * t.rows
        col = j * (t.columns * t.cn)
        if t.cm > 1:
            row += rank * t.bm
        if t.cn > 1:
            col += rank * t.columns
        store_slices(c, staged.index(OWNER), acc, cls, row, col, t.rows, t.bn, t.slices)
        if t.bx > 0:
            store_slices(c, staged.index(OWNER), more, cls, row, col + t.bn, t.rows, t.bx, 1)
    tma.store_wait(0)
    value(sync_text(BLOCKS))


@gluon.jit
def gemm_ragged(
    a, b, c, k, tiles_m, tiles_n, stride, tail, long, short, last, steps, T: gl.constexpr, GROUP: gl.constexpr
):
    """a [classes, rows, k], b [1, n, k] and c [classes, rows, n] are descriptors, T is a ``_ragged.Tile``.
    All shared memory is one allocation, so that the PTX knows where its parts lie: the ring of A, that of B
    in one or two parts, staged C, barriers."""
    t: gl.constexpr = T.value
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pool = gl.allocate_shared_memory(a.dtype, [t.barriers // 1024 + 1, 8, 64], operand)
    ring_a = part(pool, 0, t.ring_b, a.dtype, [t.stages * t.consumers, t.rows, 64], operand)
    ring_b = part(pool, t.ring_b, t.ring_x, a.dtype, [t.stages, t.bn, 64], operand)
    ring_x = ring_b
    if t.bx > 0:
        ring_x = part(pool, t.ring_x, t.ring, a.dtype, [t.stages, t.bx, 64], operand)
    staged = part(pool, t.ring, t.barriers, c.dtype, [t.consumers, 1, t.rows, t.bn // t.slices], c.layout)
    rings = (ring_a, ring_b, ring_x)
    work = (k, tiles_m, tiles_n, stride, tail, long, short, last)
    value(init_text(t))
    if t.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (c, rings, staged, work, steps, 0, T, GROUP)),
                (consume, (c, rings, staged, work, steps, 1, T, GROUP)),
                (produce, (work, steps, T, GROUP)),
            ],
            [4, 4],
            [t.consumer_regs, t.producer_regs],
        )
    else:
        gl.static_assert(t.consumers == 3)
        gl.warp_specialize(
            [
                (consume, (c, rings, staged, work, steps, 0, T, GROUP)),
                (consume, (c, rings, staged, work, steps, 1, T, GROUP)),
                (consume, (c, rings, staged, work, steps, 2, T, GROUP)),
                (produce, (work, steps, T, GROUP)),
            ],
            [4, 4, 4],
            [t.consumer_regs, t.consumer_regs, t.producer_regs],
        )


def static(case: Case, config: Config) -> Static:
    """Tile, ring, cluster, raster and type; sizes and stride are runtime values."""
    return {**{x: config[x] for x in SPACE if x != "stride"}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The kernel for one tile."""
    plan = host.Tile.of(static["tile"], static["cluster"], int(static["stages"]))
    t = common.element(static["dtype"])
    layout = gl.NVMMASharedLayout(128, 16, 3)

    def box(rows: int, columns: int) -> str:
        return f"tensordesc<{t}[1,{rows},{columns}],{layout!r}>"

    return TritonSource(
        fn=gemm_ragged,
        signature={
            "a": box(plan.box_a, 64),
            "b": box(plan.box_b, 64),
            "c": box(plan.rows, plan.bn // plan.slices),
            **dict.fromkeys(SIZES, "i32"),
        },
        constexprs={"T": plan, "GROUP": max(1, int(static["group"]) // plan.cm)},
        options={"num_warps": 4},
        gluon=True,
        cluster=plan.cm * plan.cn,
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors over classes of rows, and as many clusters as fit, or fewer where tiles are fewer."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    plan = host.Tile.of(config["tile"], config["cluster"], int(config["stages"]))
    rows = host.classes(case["m"], case["k"], plan.bm * plan.cm, int(config["stride"]))
    layout = gl.NVMMASharedLayout(128, 16, 3)

    def view(tensor: Any, count: int, stride: int, height: int, block: tuple[int, int]) -> Any:
        pitch = tensor.shape[1]
        shape, strides = [count, height, pitch], [pitch, stride * pitch, 1]
        return TensorDescriptor(tensor, shape, strides, [1, *block], layout)

    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    maps = (
        view(a, rows.count, rows.stride, rows.height, (plan.box_a, 64)),
        view(b, 1, 1, case["n"], (plan.box_b, 64)),
        view(c, rows.count, rows.stride, rows.height, (plan.rows, plan.bn // plan.slices)),
    )
    tiles_n = common.cdiv(case["n"], plan.columns * plan.cn)
    clusters = min(rows.tiles * tiles_n, module.sms // (plan.cm * plan.cn))
    sizes = (
        case["k"],
        rows.tiles,
        tiles_n,
        rows.stride,
        rows.tail,
        rows.long,
        rows.short,
        rows.last,
        rows.steps,
    )
    return Call(module.launcher((clusters,), *maps, *sizes), keep=(a, b, c))


def valid(case: Case, config: Config) -> str | None:
    """None, or why this kernel cannot or need not do ``case`` with ``config``."""
    plan = host.Tile.of(config["tile"], config["cluster"], int(config["stages"]))
    reason = common.tma_reason(K=case["k"], N=case["n"]) or plan.reason()
    if reason:
        return reason
    if case["k"] % 64 == 0:
        return "rows start on 128 bytes: nothing that triton/gemm lacks"
    if case["m"] < 64:
        return "fewer rows than a warpgroup multiplies: triton/gemm_skinny"
    if config["stride"] > 1 and case["m"] < 64 * config["stride"]:
        return f"classes of every {config['stride']}th row hold fewer rows than a warpgroup multiplies"
    if plan.cm > 1 and host.classes(case["m"], case["k"], plan.bm, int(config["stride"])).tiles < 2:
        return "a single tile along M: nothing for a cluster to share"
    if plan.cn > 1 and case["n"] <= plan.columns:
        return "a single tile along N: nothing for a cluster to share"
    if config["group"] != 8 and case["m"] <= 8 * plan.bm:
        return "there are no more than 8 rows of tiles: the raster is the same as with groups of 8"
    best = _best(case["m"], case["n"], case["k"])
    time = host.cost((case["m"], case["n"], case["k"]), plan, int(config["stride"]))
    near = max(1.1 * best, best + 6)
    return None if time < near else f"{time / best:.1f} times the estimated time of the best"


def _launches() -> Iterator[dict[str, Any]]:
    """Every tile, cluster and stride with the deepest ring that fits."""
    for tile in SPACE["tile"]:
        for cluster in SPACE["cluster"]:
            stages = max(
                (s for s in SPACE["stages"] if not host.Tile.of(tile, cluster, s).reason()), default=0
            )
            for stride in SPACE["stride"]:
                if stages:
                    yield {"tile": tile, "cluster": cluster, "stride": stride, "stages": stages, "group": 8}


@lru_cache(maxsize=1024)
def _best(m: int, n: int, k: int) -> float:
    """The least estimated µs of all launches."""
    return min(
        host.cost((m, n, k), host.Tile.of(c["tile"], c["cluster"], c["stages"]), c["stride"])
        for c in _launches()
    )


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile, cluster and stride by the cost model, best first."""
    sizes = (case["m"], case["n"], case["k"])
    return common.ranked(
        (c for c in _launches() if valid(case, c) is None),
        lambda c: host.cost(sizes, host.Tile.of(c["tile"], c["cluster"], c["stages"]), c["stride"]),
        lambda c: (c["tile"], c["cluster"], c["stride"]),
        # its products of powers of two win where 256x128 or 128x256 fit; gemm_pitch has the other tiles
        3,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the usual tile where no config is valid."""
    return next(iter(seeds(case)), next(_launches()))


KERNELS = (
    Kernel(
        id="triton/gemm_ragged",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
        files=("_common.py", "_ragged.py"),
        summary="Gluon: a producer warpgroup, multicast in clusters, tiles of every eighth row",
    ),
)
