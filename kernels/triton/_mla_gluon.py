"""Parts of ``triton/mla_decode_gluon``: its producer, and the logits and weights of a tile.

``shared``: queries [4, 64, 128] and [1, 64, 64], two tiles of the latent cache [8, 64, 128] and [2, 64, 64],
weights [1, 64, 64], stats fp32 [3, 64]. ``bars``: queries full and free, halves of tiles full and free, told.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ._attention_gluon import computed, load_box


@gluon.jit
def load_half(kv, kv_rope, at, it, shared, bars, HALF: gl.constexpr):
    """256 columns of tile ``it``, whose first line is ``at``, and with the second half the rotary ones."""
    _queries, _queries_rope, latent, rope, _weights, _stats = shared
    _q_full, _q_free, full, free, _told = bars
    stage = it & 1
    bar = full.index(stage * 2 + HALF)
    mbarrier.wait(free.index(stage * 2 + HALF), (it >> 1 & 1) ^ 1)
    mbarrier.expect(bar, 64 * (256 + HALF * 64) * 2)
    load_box(kv, [at, HALF * 256], bar, latent.index(stage * 4 + HALF * 2))
    load_box(kv, [at, HALF * 256 + 128], bar, latent.index(stage * 4 + HALF * 2 + 1))
    if HALF == 1:
        load_box(kv_rope, [at, 512], bar, rope.index(stage))


@gluon.jit
def produce(
    q, q_rope, kv, kv_rope, table, first, items, width, row, share, shared, bars,
    ROWS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Loads each item's queries, then its tiles: 256 columns for one consumer, the others for the other. With
    EARLY a tile's owner gets its own first, for these are given back first."""
    queries, queries_rope, _latent, _rope, _weights, _stats = shared
    q_full, q_free, _full, _free, _told = bars
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
            if EARLY and (it & 1) == 1:
                load_half(kv, kv_rope, at, it, shared, bars, 1)
                load_half(kv, kv_rope, at, it, shared, bars, 0)
            else:
                load_half(kv, kv_rope, at, it, shared, bars, 0)
                load_half(kv, kv_rope, at, it, shared, bars, 1)
            it += 1


@gluon.jit
def multiply_half(shared, s, it, none, HALF: gl.constexpr, FIRST: gl.constexpr):
    """The product over 256 columns of tile ``it``, in half 1 over the rotary ones too, on its way."""
    queries, queries_rope, latent, rope, _weights, _stats = shared
    stage = it & 1
    for part in gl.static_range(HALF * 2, HALF * 2 + 2):
        keys = latent.index(stage * 4 + part).permute([1, 0])
        if FIRST and part == HALF * 2:
            s = warpgroup_mma(queries.index(none + part), keys, s, use_acc=False, is_async=True)
        else:
            s = warpgroup_mma(queries.index(none + part), keys, s, is_async=True)
    if HALF == 1:
        s = warpgroup_mma(queries_rope.index(none), rope.index(stage).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def multiply(shared, bars, it, FIRST: gl.constexpr, EARLY: gl.constexpr, LAYOUT: gl.constexpr):
    """The logits of tile ``it`` of the ring, on their way: half FIRST of the columns first, with EARLY before
    the other half has come."""
    _q_full, _q_free, full, _free, _told = bars
    stage = it & 1
    phase = it >> 1 & 1
    s = gl.zeros([64, 64], gl.float32, LAYOUT)
    # nought, but not to the compiler: descriptors that no loop changes are kept in registers, which are full
    none = it >> 24
    mbarrier.wait(full.index(stage * 2 + FIRST), phase)
    if not EARLY:
        mbarrier.wait(full.index(stage * 2 + 1 - FIRST), phase)
    s = multiply_half(shared, s, it, none, FIRST, True)
    if EARLY:
        mbarrier.wait(full.index(stage * 2 + 1 - FIRST), phase)
    return multiply_half(shared, s, it, none, 1 - FIRST, False)


@gluon.jit
def weigh(s, top, tile, last, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of one tile of raw logits in base 2, new largest, factor of the sums, and its own sum."""
    keys = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    s = gl.where(keys[None, :] <= last[:, None], s * SCALE, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    p = gl.exp2(s - new[:, None])
    return p, new, gl.exp2(top - new), computed(gl.sum(p, 1))
