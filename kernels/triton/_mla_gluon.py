"""Parts of ``triton/mla_decode_gluon``: its producer, and the logits and weights of a tile.

``shared``: queries [4, 64, 128] and [1, 64, 64], two tiles of the latent cache [8, 64, 128] and [2, 64, 64],
weights [1, 64, 64], stats fp32 [2, 64]. A tile comes in three pieces, each with a barrier for its arrival and
one for its return: the left 256 columns with the rotary ones, and twice 128 of the right. ``bars``: queries
full and free, pieces full and free, weights told and heard, logits computed.
"""

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
def produce(
    q, q_rope, kv, kv_rope, table, first, items, width, row, share, shared, bars, ROWS: gl.constexpr
):  # fmt: skip
    """Loads each item's queries, then its tiles, in the order in which places in the ring are given back."""
    queries, queries_rope, latent, rope, _weights, _stats = shared
    q_full, q_free, full, free, _told, _heard, _scored = bars
    begin = gl.load(first + share)
    it = 0
    for item in range(begin, gl.load(first + share + 1)):
        seq = gl.load(items + item * 8)
        start = gl.load(items + item * 8 + 1)
        end = gl.load(items + item * 8 + 2)
        pages = table + seq.to(gl.int64) * width
        page = gl.load(pages + start, mask=start < end, other=0)
        line = seq * ROWS + row
        mbarrier.wait(q_free, ((item - begin) & 1) ^ 1)
        mbarrier.expect(q_full, 64 * 576 * 2)
        for part in gl.static_range(4):
            load_box(q, [line, part * 128], q_full, queries.index(part))
        load_box(q_rope, [line, 512], q_full, queries_rope.index(0))
        for tile in range(start, end):
            at = page * 64
            page = gl.load(pages + tile + 1, mask=tile + 1 < end, other=0)
            stage = it & 1
            phase = (it >> 1 & 1) ^ 1
            mbarrier.wait(free.index(stage * 3), phase)
            mbarrier.expect(full.index(stage * 3), 64 * 320 * 2)
            load_box(kv, [at, 0], full.index(stage * 3), latent.index(stage * 4))
            load_box(kv, [at, 128], full.index(stage * 3), latent.index(stage * 4 + 1))
            load_box(kv_rope, [at, 512], full.index(stage * 3), rope.index(stage))
            for part in gl.static_range(1, 3):
                mbarrier.wait(free.index(stage * 3 + part), phase)
                mbarrier.expect(full.index(stage * 3 + part), 64 * 128 * 2)
                load_box(
                    kv, [at, 128 + part * 128], full.index(stage * 3 + part), latent.index(stage * 4 + 1 + part)
                )
            it += 1


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
