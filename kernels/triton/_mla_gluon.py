"""Parts of ``triton/mla_decode_gluon``: loads, the logits and weights of a tile, stores, the second launch.

``shared``: queries [4, 64, 128] and [1, 64, 64], two tiles of the latent cache [8, 64, 128] and [2, 64, 64],
weights [1, 64, 64], stats fp32 [2, 64]. A tile comes in three pieces, each with a barrier for its arrival and
one for its return: the left 256 columns with the rotary ones, and twice 128 of the right. ``bars``: queries
full and free, pieces full and free, weights told and heard, logits computed.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ._attention_gluon import load_box


@gluon.jit
def fresh(x):
    """x, but to the compiler a new number each time: what is computed from it is not moved out of the loop
    and kept. Descriptors of 36 steps of queries are 72 registers, and there are none to spare."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(cache, page, block, BLOCKS: gl.constexpr):
    """Ask for a page's lines of 128 bytes to be brought into L2, the ``block``-th part of BLOCKS: a few for
    each of the 128 threads, for a single thread's branch would keep the addresses of loads out of uniform
    registers."""
    LINES: gl.constexpr = (576 + BLOCKS - 1) // BLOCKS
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = (cache + page.to(gl.int64) * (64 * 576)).to(gl.int64)
    for step in gl.static_range((LINES + 127) // 128):
        line = gl.minimum(block * LINES + step * 128 + gl.arange(0, 128, threads), 575)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l,~{memory}", [at + line * 128], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def produce(
    maps, cache, table, items, most, width, row, share, shared, bars,
    ROWS: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Loads each item's queries, then its tiles, in the order in which places in the ring are given back.
    With PREFETCH the tile for which there is no place yet is asked for in L2: the blocks that share a
    sequence ask for a part of it each."""
    BLOCKS: gl.constexpr = (ROWS + 63) // 64
    q, q_rope, kv, kv_rope = maps
    queries, queries_rope, latent, rope, _weights, _stats = shared
    q_full, q_free, full, free, _told, _heard, _scored = bars
    item = share * most
    more = item >= 0
    turn = 0
    it = 0
    while more:
        seq = gl.load(items + item * 8)
        start = gl.load(items + item * 8 + 1)
        end = gl.load(items + item * 8 + 2)
        more = gl.load(items + item * 8 + 5) != 0
        pages = table + seq.to(gl.int64) * width
        page = gl.load(pages + start, mask=start < end, other=0)
        far = gl.load(pages + start + 1, mask=start + 1 < end, other=0)
        line = seq * ROWS + row
        mbarrier.wait(q_free, turn ^ 1)
        mbarrier.expect(q_full, 64 * 576 * 2)
        for part in gl.static_range(4):
            load_box(q, [line, part * 128], q_full, queries.index(part))
        load_box(q_rope, [line, 512], q_full, queries_rope.index(0))
        for tile in range(start, end):
            at = page * 64
            page = far
            # behind the end the same page again, which costs little
            far = gl.load(pages + min(tile + 2, end - 1))
            stage = it & 1
            phase = (it >> 1 & 1) ^ 1
            mbarrier.wait(free.index(stage * 3), phase)
            mbarrier.expect(full.index(stage * 3), 64 * 320 * 2)
            load_box(kv, [at, 0], full.index(stage * 3), latent.index(stage * 4))
            load_box(kv, [at, 128], full.index(stage * 3), latent.index(stage * 4 + 1))
            load_box(kv_rope, [at, 512], full.index(stage * 3), rope.index(stage))
            for part in gl.static_range(1, 3):
                bar = full.index(stage * 3 + part)
                mbarrier.wait(free.index(stage * 3 + part), phase)
                mbarrier.expect(bar, 64 * 128 * 2)
                load_box(kv, [at, 128 + part * 128], bar, latent.index(stage * 4 + 1 + part))
            if PREFETCH:
                fetch(cache, far, row // 64, BLOCKS)
            it += 1
        item += 1
        turn ^= 1


@gluon.jit
def multiply(shared, bars, it, LAYOUT: gl.constexpr):
    """The logits of tile ``it`` of the ring, on their way: five products, each issued as its columns come."""
    queries, queries_rope, latent, rope, _weights, _stats = shared
    _q_full, _q_free, full, _free, _told, _heard, _scored = bars
    stage = it & 1
    phase = it >> 1 & 1
    s = gl.zeros([64, 64], gl.float32, LAYOUT)
    mbarrier.wait(full.index(stage * 3), phase)
    s = warpgroup_mma(
        queries.index(fresh(0)), latent.index(stage * 4).permute([1, 0]), s, use_acc=False, is_async=True
    )
    s = warpgroup_mma(
        queries.index(fresh(1)), latent.index(fresh(stage) * 4 + 1).permute([1, 0]), s, is_async=True
    )
    s = warpgroup_mma(
        queries_rope.index(fresh(0)), rope.index(fresh(stage)).permute([1, 0]), s, is_async=True
    )
    for part in gl.static_range(1, 3):
        mbarrier.wait(full.index(stage * 3 + part), phase)
        keys = latent.index(fresh(stage) * 4 + 1 + part).permute([1, 0])
        s = warpgroup_mma(queries.index(fresh(1 + part)), keys, s, is_async=True)
    return s


@gluon.jit
def weigh(s, top, tile, tokens, last, SQ: gl.constexpr, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of one tile of raw logits in base 2, the new largest, and the factor of what was summed
    before. Row r sees the keys up to last[r], which is no less than tokens - SQ."""
    if tile * 64 + 63 > tokens - SQ:
        keys = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        s = gl.where(keys[None, :] <= last[:, None], s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1) * SCALE)
    return gl.exp2(s * SCALE - new[:, None]), new, gl.exp2(top - new)


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


@triton.jit
def join(
    o, part, stat, splits,
    ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Adds the parts of every cut sequence: R rows and COLS columns a block, C parts at once, in their order.
    splits int32 [cuts, 3] (sequence, first slot, slots); part [slots, ROWS, 512]; stat [slots, 2, ROWS]
    (largest logit, sum of weights). Starts beneath the end of the launch that leaves the parts."""
    BLOCKS: tl.constexpr = (ROWS + R - 1) // R
    STRIPS: tl.constexpr = 512 // COLS
    pid = tl.program_id(0)
    cut = pid // STRIPS // BLOCKS
    rows = pid // STRIPS % BLOCKS * R + tl.arange(0, R)
    cols = pid % STRIPS * COLS + tl.arange(0, COLS)
    seq = tl.load(splits + cut * 3)
    slot = tl.load(splits + cut * 3 + 1)
    slots = tl.load(splits + cut * 3 + 2)
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )
    top = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, COLS), tl.float32)
    for begin in range(0, slots, C):
        index = begin + tl.arange(0, C)
        live = (index[:, None] < slots) & (rows[None, :] < ROWS)
        at = (slot + index[:, None]).to(tl.int64) * ROWS + rows[None, :]
        m = tl.load(stat + at + (slot + index[:, None]) * ROWS, mask=live, other=float("-inf"))
        x = tl.load(stat + at + (slot + index[:, None] + 1) * ROWS, mask=live, other=0.0)
        v = tl.load(part + at[:, :, None] * 512 + cols[None, None, :], mask=live[:, :, None], other=0.0)
        new = tl.maximum(top, tl.max(m, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - base)
        w = tl.exp2(m - base[None, :])
        total = total * alpha + tl.sum(w * x, 0)
        acc = acc * alpha[:, None] + tl.sum(w[:, :, None] * v, 0)
        top = new
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    into = (seq.to(tl.int64) * ROWS + rows[:, None]) * 512 + cols[None, :]
    tl.store(o + into, out.to(o.dtype.element_ty), mask=rows[:, None] < ROWS)
