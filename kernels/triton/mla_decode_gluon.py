"""``triton/mla_decode_gluon``: latent attention in Gluon, the output in halves over two warpgroups.

A block holds 64 query rows and two tiles of 64 tokens. The left warpgroup computes a tile's logits and
weights, hands the weights over in shared memory and adds the left 256 columns of the output; the right one
adds the others. The logits are computed once, and the left one issues the next tile's behind its sums.
Shares of the cache are as in ``triton/mla_decode``; a second launch, which starts beneath the end of the
first, adds up the parts of cut sequences.
Bound by the tensor cores with many heads, by the cache's bytes with few.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
from ._mla_gluon import fresh, join, leave, multiply, produce, weigh

SPACE = {
    "overhead": (3, 1, 5),
    "add": (4, 8, 32),
    "lag": (False, True),
    "prefetch": (True, False),
}
#: rows and columns that a block of the second launch adds up, by the parts it takes at once
ADDED = {4: (4, 512), 8: (1, 512), 32: (1, 256)}
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
def sum_left(
    o, part, stat, items, most, row, share, shared, bars,
    H: gl.constexpr, SQ: gl.constexpr, SCALE: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """All logits and weights, and the left 256 columns of the output."""
    ROWS: gl.constexpr = H * SQ
    _queries, _queries_rope, latent, _rope, _weights, _stats = shared
    q_full, q_free, _full, free, _told, _heard, scored = bars
    logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, logits))
    item = share * most
    more = item >= 0
    turn = 0
    it = 0
    while more:
        seq = gl.load(items + item * 8)
        tile = gl.load(items + item * 8 + 1)
        end = gl.load(items + item * 8 + 2)
        tokens = gl.load(items + item * 8 + 3)
        slot = gl.load(items + item * 8 + 4)
        more = gl.load(items + item * 8 + 5) != 0
        last = tokens - SQ + rows // H
        top = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, logits))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, logits))
        acc = gl.zeros([64, 128], gl.float32, sums)
        acc2 = gl.zeros([64, 128], gl.float32, sums)
        mbarrier.wait(q_full, turn)
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
        item += 1
        turn ^= 1


@gluon.jit
def sum_right(
    o, part, items, most, row, share, shared, bars, ROWS: gl.constexpr, LAG: gl.constexpr
):  # fmt: skip
    """The right 256 columns of the output. With LAG a tile's product waits for the next tile's logits, and
    runs beneath their softmax."""
    _queries, _queries_rope, latent, _rope, weights, stats = shared
    _q_full, _q_free, full, free, told, heard, scored = bars
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    line: gl.constexpr = gl.SliceLayout(1, sums)
    item = share * most
    more = item >= 0
    it = 0
    while more:
        seq = gl.load(items + item * 8)
        start = gl.load(items + item * 8 + 1)
        end = gl.load(items + item * 8 + 2)
        slot = gl.load(items + item * 8 + 4)
        more = gl.load(items + item * 8 + 5) != 0
        total = gl.zeros([64], gl.float32, line)
        acc = gl.zeros([64, 128], gl.float32, sums)
        acc2 = gl.zeros([64, 128], gl.float32, sums)
        for tile in range(start, end):
            stage = it & 1
            mbarrier.wait(full.index(stage * 3 + 1), it >> 1 & 1)
            mbarrier.wait(full.index(stage * 3 + 2), it >> 1 & 1)
            mbarrier.wait(told, it & 1)
            scale = stats.index(0).load(line)[:, None]
            total = stats.index(1).load(line)
            acc = acc * scale
            acc2 = acc2 * scale
            if LAG:
                if tile + 1 < end:
                    mbarrier.wait(scored, (it + 1) & 1)
            acc = warpgroup_mma(weights.index(fresh(0)), latent.index(stage * 4 + 2), acc, is_async=True)
            acc2 = warpgroup_mma(weights.index(fresh(0)), latent.index(stage * 4 + 3), acc2, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(stage * 3 + 1))
            acc2 = warpgroup_mma_wait(0, deps=[acc2])
            mbarrier.arrive(free.index(stage * 3 + 2))
            mbarrier.arrive(heard)
            it += 1
        leave(o, part, acc, acc2, total, seq, slot, row, 256, ROWS)
        item += 1


@gluon.jit
def mla_gluon(
    q, q_rope, kv, kv_rope, cache, table, o, part, stat, items, most, width,
    H: gl.constexpr, SQ: gl.constexpr, SCALE: gl.constexpr, LAG: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """q [seqs·SQ·H, 576] and kv [pool·64, 576] are descriptors of 64 rows and 128 columns, q_rope and kv_rope
    the same of 64; cache is kv as a pointer; table [seqs, width]; o [seqs, SQ·H, 512]; SCALE is for base 2.
    Share i takes items int32 [shares, most, 8] from [i, 0] on: sequence, first tile, end, tokens, slot (-1
    for a whole sequence), whether another follows."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
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
    maps = (q, q_rope, kv, kv_rope)
    gl.warp_specialize(
        [
            (sum_left, (o, part, stat, items, most, row, share, shared, bars, H, SQ, SCALE, LAG)),
            (sum_right, (o, part, items, most, row, share, shared, bars, ROWS, LAG)),
            (produce, (maps, cache, table, items, most, width, row, share, shared, bars, ROWS, PREFETCH)),
        ],
        [4, 4],
        [240, 24],
    )


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def static(case: Case, config: Config) -> Static:
    """Heads, queries, and the rows that the second launch adds up a block; lengths stay runtime."""
    baked = {x: config[x] for x in SPACE if x != "overhead"}
    return {**baked, "h": case["h"], "sq": case["sq"], "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation, and the launch that adds up parts."""
    t = common.element(static["dtype"])
    layout = gl.NVMMASharedLayout(128, 16, 2)
    rows, cols = ADDED[static["add"]]
    add = TritonSource(
        fn=join,
        signature={"o": f"*{t}", "part": "*fp32", "stat": "*fp32", "splits": "*i32"},
        constexprs={"ROWS": static["h"] * static["sq"], "R": rows, "C": static["add"], "COLS": cols},
        attrs=dict.fromkeys(("o", "part", "stat", "splits"), 16),
        options={"num_warps": 4, "num_stages": 1, "launch_pdl": True},
    )
    box = {cols: f"tensordesc<{t}[64,{cols}],{layout!r}>" for cols in (PART, ROPE)}
    return TritonSource(
        fn=mla_gluon,
        signature={
            "q": box[PART],
            "q_rope": box[ROPE],
            "kv": box[PART],
            "kv_rope": box[ROPE],
            "cache": f"*{t}",
            "table": "*i32",
            "o": f"*{t}",
            **dict.fromkeys(("part", "stat"), "*fp32"),
            "items": "*i32",
            **dict.fromkeys(("most", "width"), "i32"),
        },
        constexprs={
            "H": static["h"],
            "SQ": static["sq"],
            "SCALE": math.log2(math.e) / math.sqrt(576),
            "LAG": static["lag"],
            "PREFETCH": static["prefetch"],
        },
        attrs=dict.fromkeys(("cache", "table", "o", "part", "stat", "items"), 16),
        # the largest logit's weight must be 1: scaled and compared, it must not be scaled anew unrounded
        options={"num_warps": 4, "enable_fp_fusion": False},
        extra=(add,),
        gluon=True,
    )


def shares(plan: attention.Plan) -> list[list[tuple[int, ...]]]:
    """The items of every share, as ``mla_gluon`` takes them, all filled up to the same number."""
    bounds = list(pairwise(plan.first))
    most = max(stop - begin for begin, stop in bounds)
    nothing = (0,) * attention.ITEM
    found = []
    for begin, stop in bounds:
        own = [(*plan.items[i][:5], int(i + 1 < stop), 0, 0) for i in range(begin, stop)]
        found.append(own + [nothing] * (most - len(own)))
    return found


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, the plan, its workspace, and a launch or two."""
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    table, o, cache = inputs["page_table"], outputs["o"], inputs["kv_cache"]
    rows = case["h"] * case["sq"]
    blocks = common.cdiv(rows, BM)
    plan = attention.plan(_lengths(case), BN, max(1, module.sms // blocks), int(config["overhead"]))
    work = attention.tensors(plan, rows, 512, blocks, o.device)
    items = torch.tensor(shares(plan), dtype=torch.int32, device=o.device)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    maps = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, cols], layout)
        for x in (inputs["q"].flatten(0, 2), cache.flatten(0, 1))
        for cols in (PART, ROPE)
    ]
    run = module.launcher(
        (plan.shares * blocks,), *maps, cache, table, o, work["part"], work["stat"],
        items, items.shape[1], table.shape[1],
    )  # fmt: skip
    keep = (*work.values(), items, *maps)
    if not plan.cuts:
        return Call(run, keep=keep)
    added, cols = ADDED[int(config["add"])]
    grid = (len(plan.cuts) * common.cdiv(rows, added) * (512 // cols),)
    add = module.extra[0].launcher(grid, o, work["part"], work["stat"], work["splits"])

    def both() -> None:
        run()
        add()

    return Call(both, keep=keep)


def valid(case: Case, config: Config) -> str | None:
    """Every case: rows beyond a sequence's are read and not stored."""
    return None


def parts(case: Case) -> int:
    """About how many shares the longest sequence is cut over."""
    tiles = [common.cdiv(n, BN) for n in _lengths(case)]
    slots = max(1, common.SMS // common.cdiv(case["h"] * case["sq"], BM))
    return common.cdiv(max(tiles) * slots, max(1, sum(tiles))) + 1


def seeds(case: Case) -> Sequence[Config]:
    """FlashMLA's five tiles of overhead a run, and fewer where sequences are short; parts as many at once as
    there are."""
    count = parts(case)
    add = next((n for n in ADDED if count <= n), 32)
    picks = (
        (5, add, False, True),
        (3, add, True, True),
        (3, add, False, True),
        (5, add, True, True),
        (1, add, False, True),
        (3, add, False, False),
        (3, 8, False, True),
    )
    found = [dict(zip(SPACE, pick, strict=True)) for pick in picks]
    return [config for i, config in enumerate(found) if config not in found[:i]]


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
    summary="Gluon: logits in one warpgroup, the output in halves over two, a producer beside them",
)
KERNELS = (KERNEL,)
