"""``triton/attention_prefill_gluon``: ragged prefill in Gluon, a producer and two consumers of 64 rows each.

Each consumer issues the product of the next keys, then that of these weights with their values, and weighs
the next logits while the second runs; the two consumers fall out of step, so that one weighs while the other
multiplies. Blocks are persistent: each has a list of tiles, dealt out by falling work when binding, and the
producer loads the next tile's keys beneath the end of this one. Bound by the tensor cores.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import constexpr_function
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static, int_list

from . import _common as common
from ._attention_gluon import BM, computed, deal, load_box

SPACE = {
    "bn": (128, 64),
    "stages": (2, 3, 4),
    "pingpong": (True, False),
}


@gluon.jit
def blocks_of(tokens, row, CAUSAL: gl.constexpr, BN: gl.constexpr):
    """Blocks of keys that a tile of 128 queries from ``row`` on sees."""
    if CAUSAL:
        end = min(tokens, row + 128)
    else:
        end = tokens
    return (end + BN - 1) // BN


@gluon.jit
def produce(
    q, k, v, first, items, shared, bars,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Loads each tile's queries, then its keys and values from the last block down."""
    queries, ring_k, ring_v = shared
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    DV: gl.constexpr = min(D, 128)
    PARTS: gl.constexpr = D // DV
    pid = gl.program_id(0)
    begin = gl.load(first + pid)
    it = 0
    for item in range(begin, gl.load(first + pid + 1)):
        start = gl.load(items + item * 4)
        tokens = gl.load(items + item * 4 + 1)
        row = gl.load(items + item * 4 + 2)
        head = gl.load(items + item * 4 + 3)
        column = head // (HQ // HKV) * D
        mbarrier.wait(q_free, ((item - begin) & 1) ^ 1)
        mbarrier.expect(q_full, 128 * D * 2)
        load_box(q, [start + row, head * D], q_full, queries.index(0))
        load_box(q, [start + row + 64, head * D], q_full, queries.index(1))
        at = start + blocks_of(tokens, row, CAUSAL, BN) * BN
        while at > start:
            at -= BN
            stage = it % STAGES
            phase = (it // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BN * D * 2)
            load_box(k, [at, column], k_full.index(stage), ring_k.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BN * D * 2)
            for part in gl.static_range(PARTS):
                load_box(v, [at, column + part * DV], v_full.index(stage), ring_v.index(stage * PARTS + part))
            it += 1


@gluon.jit
def hide(s, row, col, tokens, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """Logits s [64, BN] of queries from ``row`` and keys from ``col``, -inf where a key is beyond the end or,
    if CAUSAL, after the query."""
    keys = col + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    seen = keys < tokens
    if CAUSAL:
        seen = seen & (keys <= row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weigh(s, top, total, SCALE: gl.constexpr):
    """Weights of one block of raw logits in base 2, the new largest scaled logit and sum, and the factor of
    what was summed before."""
    new = gl.maximum(top, gl.max(s, 1) * SCALE)
    p = gl.exp2(s * SCALE - new[:, None])
    alpha = gl.exp2(top - new)
    return p, new, total * alpha + gl.sum(p, 1), alpha


@constexpr_function
def turn(what: str, owner: int) -> str:
    """The PTX to wait for the turn of consumer ``owner``, or to give it; nothing without ``what``."""
    # the compiler's own barriers have low numbers
    return f"bar.{what} {12 + owner}, 256; mov.u32 $0, 0;" if what else "mov.u32 $0, 0;"


@gluon.jit
def command(TEXT: gl.constexpr):
    """One PTX instruction without operands, in every thread."""
    gl.inline_asm_elementwise(TEXT, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(
    x, shared, bars, state, it, row, at, tokens, SYNC: gl.constexpr, ARRIVE: gl.constexpr,
    D: gl.constexpr, SCALE: gl.constexpr, MASKED: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys from ``at`` on, block it + 1 of the ring: their logits, the product of the block before, and their
    weights beneath that. ``state``: sums, weights of the block before, largest and sum of the softmax."""
    _queries, ring_k, ring_v = shared
    _q_full, _q_free, k_full, k_free, v_full, v_free = bars
    acc, acc2, w, top, total = state
    DV: gl.constexpr = min(D, 128)
    PARTS: gl.constexpr = D // DV
    logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    sums: gl.constexpr = acc.type.layout
    stage = (it + 1) % STAGES
    before = it % STAGES
    zero = gl.zeros([64, BN], gl.float32, logits)
    mbarrier.wait(k_full.index(stage), (it + 1) // STAGES & 1)
    mbarrier.wait(v_full.index(before), it // STAGES & 1)
    command(SYNC)
    s = warpgroup_mma(x, ring_k.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(w, ring_v.index(before * PARTS), acc, is_async=True)
    if PARTS > 1:
        acc2 = warpgroup_mma(w, ring_v.index(before * PARTS + 1), acc2, is_async=True)
    command(ARRIVE)
    s = warpgroup_mma_wait(PARTS, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    if MASKED:
        s = hide(s, row, at, tokens, True, logits)
    p, top, total, alpha = weigh(s, top, total, SCALE)
    scale = gl.convert_layout(alpha, gl.SliceLayout(1, sums))[:, None]
    total = computed(total)
    if PARTS > 1:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
        acc2 = acc2 * scale
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before))
    w = gl.convert_layout(p.to(w.dtype), gl.DotOperandLayout(0, sums, 2))
    return acc * scale, acc2, w, top, total


@gluon.jit
def save(o, out, start, row, tokens, column, PITCH: gl.constexpr, D: gl.constexpr):
    """out [64, D] to o [tokens, PITCH] from ``column`` on, the sequence's rows only."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    out = gl.convert_layout(out.to(o.dtype.element_ty), wide)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, wide))
    cols = column + gl.arange(0, D, gl.SliceLayout(0, wide))
    at = (start + rows).to(gl.int64)[:, None] * PITCH + cols[None, :]
    gl.store(o + at, out, mask=(rows < tokens)[:, None])


@gluon.jit
def consume(
    o, first, items, shared, bars, OWNER: gl.constexpr,
    HQ: gl.constexpr, D: gl.constexpr, SCALE: gl.constexpr, CAUSAL: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """The OWNER-th 64 queries of each tile. With PINGPONG the two consumers issue products in turns, by two
    named barriers, each of which one waits for and the other arrives at."""
    SYNC: gl.constexpr = turn("sync", OWNER) if PINGPONG else turn("", 0)
    ARRIVE: gl.constexpr = turn("arrive", 1 - OWNER) if PINGPONG else turn("", 0)
    if PINGPONG and OWNER == 1:
        command(ARRIVE)
    queries, ring_k, ring_v = shared
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    DV: gl.constexpr = min(D, 128)
    PARTS: gl.constexpr = D // DV
    logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    pid = gl.program_id(0)
    begin = gl.load(first + pid)
    x = queries.index(OWNER)
    zero = gl.zeros([64, BN], gl.float32, logits)
    it = 0
    for item in range(begin, gl.load(first + pid + 1)):
        start = gl.load(items + item * 4)
        tokens = gl.load(items + item * 4 + 1)
        row = gl.load(items + item * 4 + 2)
        head = gl.load(items + item * 4 + 3)
        mine = row + OWNER * 64
        at = blocks_of(tokens, row, CAUSAL, BN) * BN - BN
        mbarrier.wait(q_full, (item - begin) & 1)
        mbarrier.wait(k_full.index(it % STAGES), it // STAGES & 1)
        s = warpgroup_mma(x, ring_k.index(it % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(it % STAGES))
        s = hide(s, mine, at, tokens, CAUSAL, logits)
        top = gl.max(s, 1) * SCALE
        # all keys of a block may be hidden from the first queries, where there are several such blocks
        top = gl.where(top == float("-inf"), -1.0e30, top)
        p = gl.exp2(s * SCALE - top[:, None])
        total = gl.sum(p, 1)
        w = gl.convert_layout(p.to(o.dtype.element_ty), weights)
        acc = gl.zeros([64, DV], gl.float32, sums)
        acc2 = gl.zeros([64, DV], gl.float32, sums)
        state = (acc, acc2, w, top, total)
        if CAUSAL and BN < 128:
            while at > row:
                at -= BN
                state = advance(
                    x, shared, bars, state, it, mine, at, tokens, SYNC, ARRIVE, D, SCALE, True, BN, STAGES
                )
                it += 1
        while at > 0:
            at -= BN
            state = advance(
                x, shared, bars, state, it, mine, at, tokens, SYNC, ARRIVE, D, SCALE, False, BN, STAGES
            )
            it += 1
        acc, acc2, w, top, total = state
        mbarrier.arrive(q_free)
        mbarrier.wait(v_full.index(it % STAGES), it // STAGES & 1)
        values = it % STAGES * PARTS
        acc = warpgroup_mma(w, ring_v.index(values), acc, is_async=True)
        if D > DV:
            acc2 = warpgroup_mma(w, ring_v.index(values + 1), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(it % STAGES))
        it += 1
        below = gl.convert_layout(1.0 / total, gl.SliceLayout(1, sums))[:, None]
        save(o, acc * below, start, mine, tokens, head * D, HQ * D, DV)
        if D > DV:
            save(o, acc2 * below, start, mine, tokens, head * D + DV, HQ * D, DV)
    if PINGPONG and OWNER == 0:
        # the other's last arrival
        command(SYNC)


@gluon.jit
def prefill(
    q, k, v, o, first, items,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, SCALE: gl.constexpr, CAUSAL: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """q [tokens, HQ·D], k and v [tokens, HKV·D] are descriptors with blocks of 64 or BN tokens of a head (v
    of at most 128 of its columns), o [tokens, HQ·D] a pointer. Block i takes items first[i] … first[i + 1]
    of items int32 [tiles, 4]: first token of the sequence, its tokens, first query, head."""
    DV: gl.constexpr = min(D, 128)
    queries = gl.allocate_shared_memory(q.dtype, [2, 64, D], q.layout)
    ring_k = gl.allocate_shared_memory(k.dtype, [STAGES, BN, D], k.layout)
    ring_v = gl.allocate_shared_memory(v.dtype, [STAGES * (D // DV), BN, DV], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    shared = (queries, ring_k, ring_v)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free)
    gl.warp_specialize(
        [
            (consume, (o, first, items, shared, bars, 0, HQ, D, SCALE, CAUSAL, BN, STAGES, PINGPONG)),
            (consume, (o, first, items, shared, bars, 1, HQ, D, SCALE, CAUSAL, BN, STAGES, PINGPONG)),
            (produce, (q, k, v, first, items, shared, bars, HQ, HKV, D, CAUSAL, BN, STAGES)),
        ],
        [4, 4],
        [240, 24],
    )


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def static(case: Case, config: Config) -> Static:
    """The whole config, heads and mask; lengths stay runtime values."""
    return {**config, **{x: case[x] for x in ("hq", "hkv", "d", "causal")}, "dtype": case.dtype}


def _boxes(d: int, bn: int) -> dict[str, tuple[int, int]]:
    return {"q": (64, d), "k": (bn, d), "v": (bn, min(d, 128))}


def source(static: Static, arch: str) -> TritonSource:
    """The kernel for one specialisation."""
    t = common.element(static["dtype"])
    d, bn = static["d"], static["bn"]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    boxes = _boxes(d, bn).items()
    return TritonSource(
        fn=prefill,
        signature={
            **{name: f"tensordesc<{t}[{rows},{cols}],{layout!r}>" for name, (rows, cols) in boxes},
            "o": f"*{t}",
            "first": "*i32",
            "items": "*i32",
        },
        constexprs={
            "HQ": static["hq"], "HKV": static["hkv"], "D": d,
            "SCALE": math.log2(math.e) / math.sqrt(d), "CAUSAL": bool(static["causal"]),
            "BN": bn, "STAGES": static["stages"], "PINGPONG": static["pingpong"],
        },
        attrs={"o": 16, "first": 16, "items": 16},
        options={"num_warps": 4},
        gluon=True,
    )  # fmt: skip


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors and the lists of tiles, a block an SM."""
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    d, bn, o = case["d"], int(config["bn"]), outputs["o"]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    lists = deal(_lengths(case), case["hq"], bn, bool(case["causal"]), module.sms)
    first = [0]
    for some in lists:
        first.append(first[-1] + len(some))
    maps = []
    for name, box in _boxes(d, bn).items():
        x = inputs[name].flatten(1)
        maps.append(TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout))
    begins, items = (
        torch.tensor(x, dtype=torch.int32, device=o.device)
        for x in (first, [item for some in lists for item in some])
    )
    return Call(module.launcher((len(lists),), *maps, o, begins, items), keep=(*maps, begins, items))


def _smem(case: Case, config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: queries, the rings of K and V, and what stores need to turn rows."""
    staged = 2 * 64 * min(case["d"], 128) * 2
    return int((BM + config["stages"] * 2 * config["bn"]) * case["d"] * 2 + staged + 2048)


def valid(case: Case, config: Config) -> str | None:
    """What fits into shared memory, as deep as it does."""
    bn, stages = int(config["bn"]), int(config["stages"])
    smem = _smem(case, config)
    if smem > common.SMEM_LIMIT:
        return f"about {smem} bytes of shared memory, over {common.SMEM_LIMIT}"
    if stages < 4 and smem + 4 * bn * case["d"] <= common.SMEM_LIMIT:
        return "one more stage fits"
    return None


def seeds(case: Case) -> Sequence[Config]:
    """Everything that fits: there is little of it."""
    return [config for config in KERNEL.configs() if valid(case, config) is None]


def default(case: Case) -> Config:
    """The widest block of keys that fits."""
    return next(iter(seeds(case)))


KERNEL = Kernel(
    id="triton/attention_prefill_gluon",
    workload="attention_prefill",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py", "_attention_gluon.py"),
    summary="Gluon: a producer, two consumers of 64 queries by turns; tiles dealt out by falling work",
)
KERNELS = (KERNEL,)
