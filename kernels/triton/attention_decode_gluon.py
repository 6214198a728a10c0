"""``triton/attention_decode_gluon``: paged decode in Gluon, cut fine, for when latency is what counts.

A block has one piece of a sequence. It asks for the page numbers of all tiles that fit its ring at once, then
for their keys and values; each warp multiplies 16 tokens of a tile and keeps its own softmax, so warps meet
only at the end of the piece. The last block of a cut sequence adds up the parts, all loads of a round on
their way together. A part is left divided by its sum, with the logarithm of that and of the largest weight.
Bound by the chain of dependent accesses (piece, pages, cache, parts), then by the cache's bytes.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static, int_list

from . import _attention as attention
from . import _common as common

SPACE = {
    "warps": (4, 8),
    "stages": (2, 3, 4, 6),
    "blocks": (2, 1, 3),
}
#: tokens a warp takes of a tile, and the head size
SLICE, D = 16, 128
# Triton renamed both between 3.6 and 3.9
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def pages_of(pages, tile, tokens, PAGE: gl.constexpr, W: gl.constexpr, COPY: gl.constexpr):
    """The page of each warp's 16 tokens of a tile; page 0 for those beyond the end."""
    tok = (tile * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))) * 16
    return gl.load(pages + tok // PAGE, mask=tok < tokens, other=0)


@gluon.jit
def fetch(
    k, v, page, tile, stage, ring_k, ring_v,
    HKV: gl.constexpr, PAGE: gl.constexpr, W: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Keys and values of a tile on their way; k and v point to a head's columns of the first line."""
    tok = (tile * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))) * 16
    line = page.to(gl.int64) * PAGE + tok % PAGE
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    col = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    at = line[:, None, None] * (HKV * 128) + (row[None, :, None] * (HKV * 128) + col[None, None, :])
    load_async(ring_k.index(stage), k + at)
    load_async(ring_v.index(stage), v + at)


@gluon.jit
def add_tile(
    x, keys, values, tile, tokens, top, total, acc,
    SCALE: gl.constexpr, W: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """One tile of W·16 tokens, 16 of a warp, into its sums: keys and values [W, 16, 128] in shared memory."""
    c = keys.permute([0, 2, 1]).load(gl.DotOperandLayout(1, MMA, 2))
    s = mma_v2(x, c, gl.zeros([W, 16, 16], gl.float32, MMA))
    tok = (tile * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA))))[:, None, None] * 16
    tok += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    s = gl.where(tok < tokens, s * SCALE, float("-inf"))
    new = gl.maximum(top, gl.max(s, 2))
    base = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s - base[:, :, None])
    alpha = gl.exp2(top - base)
    total = total * alpha + gl.sum(p, 2)
    w = gl.convert_layout(p.to(x.dtype), gl.DotOperandLayout(0, MMA, 2))
    acc = mma_v2(w, values.load(gl.DotOperandLayout(1, MMA, 2)), acc * alpha[:, :, None])
    return new, total, acc


@gluon.jit
def merge(
    part, stat, slot, slots, head,
    ROWS: gl.constexpr, G: gl.constexpr, C: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The G rows of ``head`` from their parts, C at a time in their order: a part counts 2**stat times."""
    lanes: gl.constexpr = gl.SliceLayout(2, WIDE)
    across: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, WIDE))
    piece = gl.arange(0, C, gl.SliceLayout(1, lanes))
    rows = head * G + gl.arange(0, G, gl.SliceLayout(0, lanes))
    col = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    top = gl.full([G], float("-inf"), gl.float32, gl.SliceLayout(0, lanes))
    total = gl.zeros([G], gl.float32, gl.SliceLayout(0, lanes))
    acc = gl.zeros([G, 128], gl.float32, gl.SliceLayout(0, WIDE))
    for begin in range(0, slots, C):
        index = begin + piece
        line = (slot + index)[:, None] * ROWS + rows[None, :]
        live = (index < slots)[:, None] & (rows >= 0)[None, :]
        at = line.to(gl.int64)[:, :, None] * 128 + col[None, None, :]
        m = gl.load(stat + line, mask=live, other=float("-inf"), cache_modifier=".cg")
        v = gl.load(part + at, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
        new = gl.maximum(top, gl.max(m, 0))
        w = gl.exp2(m - new[None, :])
        old = gl.exp2(top - new)
        total = total * old + gl.sum(w, 0)
        acc = acc * gl.convert_layout(old, across)[:, None] + gl.sum(w[:, :, None] * v, 0)
        top = new
    return acc / gl.convert_layout(total, across)[:, None]


@gluon.jit
def save(where, out, line, G: gl.constexpr, R: gl.constexpr, WIDE: gl.constexpr):
    """The first G rows of out [R, 128] to rows from ``line`` on of 128 columns, past L1."""
    row = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(0, WIDE)))
    col = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(0, WIDE)))
    at = (line.to(gl.int64) + row)[:, None] * 128 + col[None, :]
    gl.store(where + at, out.to(where.dtype.element_ty), mask=(row < G)[:, None], cache_modifier=".cg")


@gluon.jit
def decode_gluon(
    q, k, v, table, o, part, stat, count, items, width,
    HKV: gl.constexpr, G: gl.constexpr, PAGE: gl.constexpr, SCALE: gl.constexpr,
    W: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """q and o [seqs, HKV·G, 128]; k and v [pool, PAGE, HKV, 128]; table [seqs, width]; items int32 [blocks /
    HKV, 8] as of a plan; SCALE is for base 2. A tile is W·16 tokens, 16 of each of W warps."""
    ROWS: gl.constexpr = HKV * G
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [W, 1, 1], [2, 1, 0])
    QUERY: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    head = gl.program_id(0) % HKV
    items += gl.program_id(0) // HKV * 8
    seq = gl.load(items)
    begin = gl.load(items + 1)
    end = gl.load(items + 2)
    tokens = gl.load(items + 3)
    slot = gl.load(items + 4)
    cut = gl.load(items + 5)
    first_slot = gl.load(items + 6)
    slots = gl.load(items + 7)
    ring_k = gl.allocate_shared_memory(k.dtype.element_ty, [STAGES, W, 16, 128], SHARED)
    ring_v = gl.allocate_shared_memory(k.dtype.element_ty, [STAGES, W, 16, 128], SHARED)
    k += head * 128
    v += head * 128
    pages = table + seq.to(gl.int64) * width
    numbers = (pages_of(pages, begin, tokens, PAGE, W, COPY),)
    for i in gl.static_range(1, STAGES + 1):
        numbers = numbers + (pages_of(pages, begin + i, tokens, PAGE, W, COPY),)
    for i in gl.static_range(STAGES):
        if begin + i < end:
            fetch(k, v, numbers[i], begin + i, i, ring_k, ring_v, HKV, PAGE, W, COPY)
        async_copy.commit_group()
    page = numbers[STAGES]
    group = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))[None, :, None]
    component = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))[None, None, :]
    none = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))[:, None, None] * 0
    mine = q + (seq * HKV + head).to(gl.int64) * (G * 128)
    at = none + group * 128 + component
    x = gl.load(mine + at, mask=(group < G) & (at >= 0), other=0.0)
    line: gl.constexpr = gl.SliceLayout(2, MMA)
    top = gl.full([W, 16], float("-inf"), gl.float32, line)
    total = gl.zeros([W, 16], gl.float32, line)
    acc = gl.zeros([W, 16, 128], gl.float32, MMA)
    for tile in range(begin, end):
        stage = (tile - begin) % STAGES
        async_copy.wait_group(STAGES - 1)
        top, total, acc = add_tile(
            x, ring_k.index(stage), ring_v.index(stage), tile, tokens, top, total, acc, SCALE, W, MMA
        )
        following = pages_of(pages, tile + STAGES + 1, tokens, PAGE, W, COPY)
        if tile + STAGES < end:
            fetch(k, v, page, tile + STAGES, stage, ring_k, ring_v, HKV, PAGE, W, COPY)
        async_copy.commit_group()
        page = following
    # the warps' sums, in what was the ring: the compiler lets them share its memory
    sums = gl.allocate_shared_memory(gl.float32, [W, 16, 128], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    stats = gl.allocate_shared_memory(gl.float32, [2, W, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(acc)
    stats.index(0).store(top)
    stats.index(1).store(total)
    # as many rows as the swizzle lets be cut off, of which G count
    R: gl.constexpr = max(G, 8)
    WIDE: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])
    PARTS: gl.constexpr = gl.BlockedLayout([C, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])
    lanes: gl.constexpr = gl.SliceLayout(2, WIDE)
    across: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, WIDE))
    each = stats.index(0).slice(0, R, dim=1).load(lanes)
    largest = gl.max(each, 0)
    share = gl.exp2(each - gl.where(largest == float("-inf"), 0.0, largest)[None, :])
    whole = gl.sum(share * stats.index(1).slice(0, R, dim=1).load(lanes), 0)
    out = gl.sum(share[:, :, None] * sums.slice(0, R, dim=1).load(WIDE), 0)
    below = gl.where(whole > 0.0, 1.0 / whole, 0.0)
    out = out * gl.convert_layout(below, across)[:, None]
    if slot < 0:
        save(o, out, seq * ROWS + head * G, G, R, WIDE)
    else:
        save(part, out, slot * ROWS + head * G, G, R, WIDE)
        row = gl.arange(0, R, gl.SliceLayout(0, lanes))
        value = largest + gl.log2(whole)
        gl.store(stat + slot * ROWS + head * G + row, value, mask=row < G, cache_modifier=".cg")
        # every thread's stores come before the one thread's release
        barrier()
        ticket = count + cut * HKV + head
        if gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == slots - 1:
            gl.store(ticket, 0)
            found = merge(part, stat, first_slot, slots, head, ROWS, G, C, PARTS)
            save(o, found, seq * ROWS + head * G, G, G, PARTS)


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def _ends(tiles: int, size: int) -> list[int]:
    """Where the even pieces of a sequence end that have ``size`` tiles at most; one that is empty has one."""
    parts = max(1, -(-tiles // size))
    return [tiles * (i + 1) // parts for i in range(parts)]


def _time(tiles: Sequence[int], size: int, blocks: int) -> int:
    """Tiles' worth of time until the last of ``blocks`` slots is done, the longest pieces first and each one
    tile dearer than it is."""
    costs = [end - at + 1 for n in tiles for at, end in itertools.pairwise([0, *_ends(n, size)])]
    slots = [0] * min(blocks, len(costs))
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(slots, slots[0] + cost)
    return max(slots)


def pieces(lengths: Sequence[int], tile: int, blocks: int) -> attention.Plan:
    """Sequences of ``lengths`` tokens in tiles of ``tile``, cut into even pieces, a share each, of the size
    that lets ``blocks`` slots end first. The longest come first."""
    tiles = [-(-n // tile) for n in lengths]
    sizes = {max(1, -(-sum(tiles) // (blocks * finer))) for finer in (1, 2, 3, 4, 6)}
    size = min(sorted(sizes, reverse=True), key=lambda n: _time(tiles, n, blocks))
    items, cuts, slot = [], [], 0
    for seq, n in enumerate(tiles):
        ends = _ends(n, size)
        cut = len(ends) > 1
        for i, (at, end) in enumerate(itertools.pairwise([0, *ends])):
            place = (slot + i, len(cuts), slot, len(ends)) if cut else (-1, -1, 0, 1)
            items.append((seq, at, end, lengths[seq], *place))
        if cut:
            cuts.append((seq, slot, len(ends)))
            slot += len(ends)
    items.sort(key=lambda item: item[1] - item[2])
    return attention.Plan(tuple(range(len(items) + 1)), tuple(items), tuple(cuts))


def static(case: Case, config: Config) -> Static:
    """Heads, page and the config; lengths stay runtime. ``blocks`` limits a merge's registers."""
    return {**config, **{x: case[x] for x in ("hq", "hkv", "page")}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The kernel for one specialisation."""
    t = common.element(static["dtype"])
    hkv, warps = static["hkv"], static["warps"]
    group = static["hq"] // hkv
    many = static["blocks"] * warps > 8
    return TritonSource(
        fn=decode_gluon,
        signature={
            **dict.fromkeys(("q", "k", "v"), f"*{t}"),
            "table": "*i32",
            "o": f"*{t}",
            **dict.fromkeys(("part", "stat"), "*fp32"),
            **dict.fromkeys(("count", "items"), "*i32"),
            "width": "i32",
        },
        constexprs={
            "HKV": hkv, "G": group, "PAGE": static["page"], "SCALE": math.log2(math.e) / math.sqrt(D),
            "W": warps, "STAGES": static["stages"],
            "C": max(4, (16 if many else 32) // max(1, group // warps)),
        },
        attrs=dict.fromkeys(("q", "k", "v", "table", "o", "part", "stat", "count", "items"), 16),
        options={"num_warps": warps},
        gluon=True,
    )  # fmt: skip


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The pieces, their workspace, and one launch."""
    table, o, hkv = inputs["page_table"], outputs["o"], case["hkv"]
    slots = module.sms * min(int(config["blocks"]), module.blocks_per_sm)
    plan = pieces(_lengths(case), SLICE * int(config["warps"]), max(1, slots // hkv))
    work = attention.tensors(plan, case["hq"], D, hkv, o.device)
    run = module.launcher(
        (len(plan.items) * hkv,), *(inputs[x] for x in ("q", "k_cache", "v_cache")), table, o,
        *(work[x] for x in ("part", "stat", "count", "items")), table.shape[1],
    )  # fmt: skip
    return Call(run, keep=tuple(work.values()))


def valid(case: Case, config: Config) -> str | None:
    """What fits on an SM, with enough bytes in flight."""
    warps, stages, blocks = (int(config[x]) for x in SPACE)
    group = case["hq"] // case["hkv"]
    if group > 16 or group != attention.power(group):
        return f"{group} query heads a KV head: 1, 2, 4, 8 or 16 can be done"
    stage = warps * SLICE * D * 4
    smem = stages * stage + 2048
    if smem * blocks > common.SMEM_LIMIT + 1024:
        return f"{blocks} blocks take {smem * blocks} bytes of shared memory on an SM"
    if blocks * stages * stage < 96 * 1024:
        return f"{blocks * stages * stage} bytes in flight on an SM are too few"
    if blocks * warps > 12:
        return f"{blocks} blocks of {warps} warps take more registers than an SM has"
    return None


def seeds(case: Case) -> Sequence[Config]:
    """One block an SM and few parts, or two and three blocks and finer parts."""
    picks = ((4, 3, 2), (8, 3, 1), (4, 6, 1), (4, 2, 3), (4, 2, 2), (8, 2, 1))
    found = [dict(zip(SPACE, pick, strict=True)) for pick in picks]
    return [config for config in found if valid(case, config) is None]


def default(case: Case) -> Config:
    """The first seed, or the first point of the space where none is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/attention_decode_gluon",
    workload="attention_decode",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py", "_attention.py"),
    summary="Gluon: a piece a block, its pages asked for at once, 16 tokens a warp, parts added by the last",
)
KERNELS = (KERNEL,)
