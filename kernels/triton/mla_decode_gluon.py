"""``triton/mla_decode_gluon``: latent attention in Gluon, two warpgroups that take turns at the logits.

A block holds 64 query rows and two tiles of 64 tokens. Each tile has an owner, one consumer or the other by
turns: it multiplies queries and keys, weighs, and leaves weights and factors in shared memory; then both add
the tile's values, each to its 256 columns. So one weighs while the other multiplies, the logits are computed
once, and no weight is rounded twice. Shares of the cache are as in ``triton/mla_decode``.
Bound by the tensor cores with many heads, by the cache's bytes with few.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static, int_list

from . import _attention as attention
from . import _common as common
from ._attention import combine
from ._mla_gluon import fresh, multiply, produce, weigh

SPACE = {
    "overhead": (3, 1, 5),
    "add": (1, 2, 4),
    "lag": (False, True),
}
#: query rows of a block, tokens of a tile (a page), columns of a load and a sum, rotary columns
BM, BN, PART, ROPE = 64, 64, 128, 64


@gluon.jit
def tell(shared, bars, p, alpha, total, it):
    """Leave a tile's weights and factors, and the sums of weights so far, for the right warpgroup."""
    _queries, _queries_rope, _latent, _rope, weights, stats = shared
    _q_full, _q_free, _full, _free, told, heard, _scored = bars
    mbarrier.wait(heard, (it & 1) ^ 1)
    weights.index(0).store(p)
    stats.index(0).store(alpha)
    stats.index(1).store(total)
    fence_async_shared()
    mbarrier.arrive(told)


@gluon.jit
def add(shared, p, alpha, acc, acc2, it):
    """The sums of the left 256 columns with tile ``it``, on their way."""
    _queries, _queries_rope, latent, _rope, _weights, _stats = shared
    scale = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    w = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))
    mine = (it & 1) * 4
    acc = warpgroup_mma(w, latent.index(mine), acc * scale, is_async=True)
    acc2 = warpgroup_mma(w, latent.index(mine + 1), acc2 * scale, is_async=True)
    return acc, acc2


@gluon.jit
def save(where, x, rows, column, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """x [64, 128] to rows of 512 at ``where``, those below ROWS, from ``column`` on."""
    at = rows[:, None] * 512 + column + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(where + at, x.to(where.dtype.element_ty), mask=(rows < ROWS)[:, None])


@gluon.jit
def leave(o, part, acc, acc2, total, seq, slot, row, column, ROWS: gl.constexpr):
    """The sums of 256 columns from ``column`` on: divided to the output, or as they are to their slot."""
    sums: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, sums))
    if slot < 0:
        below = gl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        whole = o + seq.to(gl.int64) * (ROWS * 512)
        save(whole, acc * below, rows, column, ROWS, sums)
        save(whole, acc2 * below, rows, column + 128, ROWS, sums)
    else:
        piece = part + slot.to(gl.int64) * (ROWS * 512)
        save(piece, acc, rows, column, ROWS, sums)
        save(piece, acc2, rows, column + 128, ROWS, sums)


@gluon.jit
def sum_left(
    o, part, stat, first, items, row, share, shared, bars,
    H: gl.constexpr, SQ: gl.constexpr, SCALE: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """All logits and weights, and the left 256 columns of the output."""
    ROWS: gl.constexpr = H * SQ
    _queries, _queries_rope, latent, _rope, _weights, _stats = shared
    q_full, q_free, _full, free, _told, _heard, scored = bars
    logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    begin = gl.load(first + share)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, logits))
    it = 0
    for item in range(begin, gl.load(first + share + 1)):
        seq = gl.load(items + item * 8)
        tile = gl.load(items + item * 8 + 1)
        end = gl.load(items + item * 8 + 2)
        tokens = gl.load(items + item * 8 + 3)
        slot = gl.load(items + item * 8 + 4)
        last = tokens - SQ + rows // H
        top = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, logits))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, logits))
        acc = gl.zeros([64, 128], gl.float32, sums)
        acc2 = gl.zeros([64, 128], gl.float32, sums)
        mbarrier.wait(q_full, (item - begin) & 1)
        if tile < end:
            s = warpgroup_mma_wait(0, deps=[multiply(shared, bars, it, logits)])
            if LAG:
                mbarrier.arrive(scored)
            while tile + 1 < end:
                p, top, alpha = weigh(s, top, tile, tokens, last, SQ, SCALE, logits)
                rounded = p.to(latent.dtype)
                acc, acc2 = add(shared, rounded, alpha, acc, acc2, it)
                total = total * alpha + gl.sum(p, 1)
                tell(shared, bars, rounded, alpha, total, it)
                s = multiply(shared, bars, it + 1, logits)
                acc, acc2 = warpgroup_mma_wait(5, deps=[acc, acc2])
                mbarrier.arrive(free.index((it & 1) * 3))
                s = warpgroup_mma_wait(0, deps=[s])
                if LAG:
                    mbarrier.arrive(scored)
                tile += 1
                it += 1
            mbarrier.arrive(q_free)
            p, top, alpha = weigh(s, top, tile, tokens, last, SQ, SCALE, logits)
            rounded = p.to(latent.dtype)
            acc, acc2 = add(shared, rounded, alpha, acc, acc2, it)
            total = total * alpha + gl.sum(p, 1)
            tell(shared, bars, rounded, alpha, total, it)
            acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
            mbarrier.arrive(free.index((it & 1) * 3))
            it += 1
        else:
            mbarrier.arrive(q_free)
        leave(o, part, acc, acc2, gl.convert_layout(total, gl.SliceLayout(1, sums)), seq, slot, row, 0, ROWS)
        if slot >= 0:
            gl.store(stat + slot * (2 * ROWS) + rows, top, mask=rows < ROWS)
            gl.store(stat + slot * (2 * ROWS) + ROWS + rows, total, mask=rows < ROWS)


@gluon.jit
def sum_right(
    o, part, first, items, row, share, shared, bars, ROWS: gl.constexpr, LAG: gl.constexpr
):  # fmt: skip
    """The right 256 columns of the output. With LAG a tile's product waits for the next tile's logits, and
    runs beneath their softmax."""
    _queries, _queries_rope, latent, _rope, weights, stats = shared
    _q_full, _q_free, full, free, told, heard, scored = bars
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    line: gl.constexpr = gl.SliceLayout(1, sums)
    begin = gl.load(first + share)
    it = 0
    for item in range(begin, gl.load(first + share + 1)):
        seq = gl.load(items + item * 8)
        start = gl.load(items + item * 8 + 1)
        end = gl.load(items + item * 8 + 2)
        slot = gl.load(items + item * 8 + 4)
        total = gl.zeros([64], gl.float32, line)
        acc = gl.zeros([64, 128], gl.float32, sums)
        acc2 = gl.zeros([64, 128], gl.float32, sums)
        for tile in range(start, end):
            stage = it & 1
            phase = it >> 1 & 1
            mbarrier.wait(told, it & 1)
            scale = stats.index(0).load(line)[:, None]
            total = stats.index(1).load(line)
            acc = acc * scale
            acc2 = acc2 * scale
            if LAG:
                if tile + 1 < end:
                    mbarrier.wait(scored, (it + 1) & 1)
            mbarrier.wait(full.index(stage * 3 + 1), phase)
            acc = warpgroup_mma(weights.index(fresh(0)), latent.index(stage * 4 + 2), acc, is_async=True)
            mbarrier.wait(full.index(stage * 3 + 2), phase)
            acc2 = warpgroup_mma(weights.index(fresh(0)), latent.index(stage * 4 + 3), acc2, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(stage * 3 + 1))
            acc2 = warpgroup_mma_wait(0, deps=[acc2])
            mbarrier.arrive(free.index(stage * 3 + 2))
            mbarrier.arrive(heard)
            it += 1
        leave(o, part, acc, acc2, total, seq, slot, row, 256, ROWS)


@gluon.jit
def mla_gluon(
    q, q_rope, kv, kv_rope, table, o, part, stat, first, items, width,
    H: gl.constexpr, SQ: gl.constexpr, SCALE: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """q [seqs·SQ·H, 576] and kv [pool·64, 576] are descriptors of 64 rows and 128 columns, q_rope and kv_rope
    the same of 64; table [seqs, width]; o [seqs, SQ·H, 512]; SCALE is for base 2."""
    ROWS: gl.constexpr = H * SQ
    BLOCKS: gl.constexpr = (ROWS + 63) // 64
    row = gl.program_id(0) % BLOCKS * 64
    share = gl.program_id(0) // BLOCKS
    queries = gl.allocate_shared_memory(q.dtype, [4, 64, 128], q.layout)
    queries_rope = gl.allocate_shared_memory(q.dtype, [1, 64, 64], q_rope.layout)
    latent = gl.allocate_shared_memory(kv.dtype, [8, 64, 128], kv.layout)
    rope = gl.allocate_shared_memory(kv.dtype, [2, 64, 64], kv_rope.layout)
    weights = gl.allocate_shared_memory(kv.dtype, [1, 64, 64], kv_rope.layout)
    stats = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(6):
        mbarrier.init(full.index(bar), count=1)
        mbarrier.init(free.index(bar), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=1)
    mbarrier.init(told, count=1)
    mbarrier.init(heard, count=1)
    mbarrier.init(scored, count=1)
    fence_async_shared()
    shared = (queries, queries_rope, latent, rope, weights, stats)
    bars = (q_full, q_free, full, free, told, heard, scored)
    gl.warp_specialize(
        [
            (sum_left, (o, part, stat, first, items, row, share, shared, bars, H, SQ, SCALE, LAG)),
            (sum_right, (o, part, first, items, row, share, shared, bars, ROWS, LAG)),
            (produce, (q, q_rope, kv, kv_rope, table, first, items, width, row, share, shared, bars, ROWS)),
        ],
        [4, 4],
        [240, 24],
    )


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def static(case: Case, config: Config) -> Static:
    """Heads, queries, and the rows that the second launch adds up a block; lengths stay runtime."""
    return {
        "h": case["h"],
        "sq": case["sq"],
        "add": config["add"],
        "lag": config["lag"],
        "dtype": case.dtype,
    }


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation, and the launch that adds up parts."""
    t = common.element(static["dtype"])
    layout = gl.NVMMASharedLayout(128, 16, 2)
    add = TritonSource(
        fn=combine,
        signature={"o": f"*{t}", "part": "*fp32", "stat": "*fp32", "splits": "*i32"},
        constexprs={
            "ROWS": static["h"] * static["sq"],
            "R": static["add"],
            "D": 512,
            "C": 8 // static["add"],
        },
        attrs=dict.fromkeys(("o", "part", "stat", "splits"), 16),
        options={"num_warps": 4, "num_stages": 1},
    )
    box = {cols: f"tensordesc<{t}[64,{cols}],{layout!r}>" for cols in (PART, ROPE)}
    return TritonSource(
        fn=mla_gluon,
        signature={
            "q": box[PART],
            "q_rope": box[ROPE],
            "kv": box[PART],
            "kv_rope": box[ROPE],
            "table": "*i32",
            "o": f"*{t}",
            **dict.fromkeys(("part", "stat"), "*fp32"),
            **dict.fromkeys(("first", "items"), "*i32"),
            "width": "i32",
        },
        constexprs={
            "H": static["h"],
            "SQ": static["sq"],
            "SCALE": math.log2(math.e) / math.sqrt(576),
            "LAG": static["lag"],
        },
        attrs=dict.fromkeys(("table", "o", "part", "stat", "first", "items"), 16),
        options={"num_warps": 4},
        extra=(add,),
        gluon=True,
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, the plan, its workspace, and a launch or two."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    table, o = inputs["page_table"], outputs["o"]
    rows = case["h"] * case["sq"]
    blocks = common.cdiv(rows, BM)
    plan = attention.plan(_lengths(case), BN, max(1, module.sms // blocks), int(config["overhead"]))
    work = attention.tensors(plan, rows, 512, blocks, o.device)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    maps = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, cols], layout)
        for x in (inputs["q"].flatten(0, 2), inputs["kv_cache"].flatten(0, 1))
        for cols in (PART, ROPE)
    ]
    run = module.launcher(
        (plan.shares * blocks,), *maps, table, o,
        *(work[x] for x in ("part", "stat", "first", "items")), table.shape[1],
    )  # fmt: skip
    keep = (*work.values(), *maps)
    if not plan.cuts:
        return Call(run, keep=keep)
    grid = (len(plan.cuts) * common.cdiv(rows, int(config["add"])),)
    add = module.extra[0].launcher(grid, o, work["part"], work["stat"], work["splits"])

    def both() -> None:
        run()
        add()

    return Call(both, keep=keep)


def valid(case: Case, config: Config) -> str | None:
    """Every case: rows beyond a sequence's are read and not stored."""
    return None


def seeds(case: Case) -> Sequence[Config]:
    """FlashMLA's five tiles of overhead a run, and fewer where sequences are short."""
    picks = ((5, 1, False), (3, 1, False), (5, 1, True), (1, 1, False), (3, 4, False))
    return [dict(zip(SPACE, pick, strict=True)) for pick in picks]


def default(case: Case) -> Config:
    """The first seed."""
    return seeds(case)[0]


KERNEL = Kernel(
    id="triton/mla_decode_gluon",
    workload="mla_decode",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py", "_attention.py", "_attention_gluon.py", "_mla_gluon.py"),
    summary="Gluon: two consumers by turns at the logits, each with half of the sums, a producer beside them",
)
KERNELS = (KERNEL,)
