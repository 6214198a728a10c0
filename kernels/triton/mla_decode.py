"""``triton/mla_decode``: latent attention by shares of the cache, each tile loaded once as keys and values.

A block takes up to 64 query rows (heads × queries) and walks its share of the tokens: 512 + 64 columns of a
tile arrive by tensor map, the product with the queries reads them transposed, that with the weights as they
are. Shares are equal (a plan made when binding); a second launch adds up the parts of cut sequences.
Bound by the cache's bytes with few heads, by the tensor cores with many.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static, int_list

from . import _attention as attention
from . import _common as common
from ._attention import combine, softmax_step

SPACE = {
    "bm": (64, 16, 32),
    "bn": (64, 32),
    "warps": (8, 4),
    "stages": (2, 3, 4, 6),
    "overhead": (3, 1),
}
PAGE, ROPE, HALF = 64, 64, 256
#: rows a block of the second launch adds up, and parts it takes at once
ROWS_ADDED, PARTS_ADDED = 1, 8


@triton.jit
def mla_split(
    q, q_rope, kv, kv_rope, table, o, part, stat, first, items, width,
    H: tl.constexpr, SQ: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q [seqs·SQ·H, 576] and kv [pool·64, 576] are descriptors of 256 columns, q_rope and kv_rope the same of
    64; table [seqs, width]; o [seqs, SQ·H, 512]; SCALE is for base 2. Two sums of 256 columns: of 512, every
    wgmma would wait for the one before."""
    ROWS: tl.constexpr = H * SQ
    BLOCKS: tl.constexpr = (ROWS + BM - 1) // BM
    row = tl.program_id(0) % BLOCKS * BM
    share = tl.program_id(0) // BLOCKS
    rows = row + tl.arange(0, BM)
    for item in range(tl.load(first + share), tl.load(first + share + 1)):
        seq = tl.load(items + item * 8)
        begin = tl.load(items + item * 8 + 1)
        end = tl.load(items + item * 8 + 2)
        tokens = tl.load(items + item * 8 + 3)
        slot = tl.load(items + item * 8 + 4)
        line = seq * ROWS + row
        x0 = q.load([line, 0])
        x1 = q.load([line, 256])
        x2 = q_rope.load([line, 512])
        last = tokens - SQ + rows // H
        pages = table + seq.to(tl.int64) * width
        page = tl.load(pages + begin * BN // 64, mask=begin < end, other=0)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc0 = tl.zeros((BM, 256), tl.float32)
        acc1 = tl.zeros((BM, 256), tl.float32)
        for tile in tl.range(begin, end):
            at = page * 64 + tile * BN % 64
            c0 = kv.load([at, 0])
            c1 = kv.load([at, 256])
            c2 = kv_rope.load([at, 512])
            page = tl.load(pages + (tile + 1) * BN // 64, mask=tile + 1 < end, other=0)
            s = tl.dot(x0, c0.T)
            s = tl.dot(x1, c1.T, s)
            s = tl.dot(x2, c2.T, s)
            keys = tile * BN + tl.arange(0, BN)
            s = tl.where(keys[None, :] <= last[:, None], s * SCALE, float("-inf"))
            p, top, total, alpha = softmax_step(s, top, total)
            p = p.to(c0.dtype)
            acc0 = tl.dot(p, c0, acc0 * alpha[:, None])
            acc1 = tl.dot(p, c1, acc1 * alpha[:, None])
        if slot < 0:
            below = tl.where(total > 0.0, 1.0 / total, 0.0)
            put(o + seq.to(tl.int64) * (ROWS * 512), acc0 * below[:, None], rows, ROWS)
            put(o + seq.to(tl.int64) * (ROWS * 512) + 256, acc1 * below[:, None], rows, ROWS)
        else:
            put(part + slot.to(tl.int64) * (ROWS * 512), acc0, rows, ROWS)
            put(part + slot.to(tl.int64) * (ROWS * 512) + 256, acc1, rows, ROWS)
            tl.store(stat + slot * (2 * ROWS) + rows, top, mask=rows < ROWS)
            tl.store(stat + slot * (2 * ROWS) + ROWS + rows, total, mask=rows < ROWS)


@triton.jit
def put(where, x, rows, ROWS: tl.constexpr):
    """x [BM, 256] to rows of 512 at ``where``, those below ROWS."""
    at = rows[:, None] * 512 + tl.arange(0, 256)[None, :]
    tl.store(where + at, x.to(where.dtype.element_ty), mask=rows[:, None] < ROWS)


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def static(case: Case, config: Config) -> Static:
    """Heads, queries and the config without ``overhead``, which is the plan's; lengths stay runtime."""
    baked = {x: config[x] for x in SPACE if x != "overhead"}
    return {**baked, "h": case["h"], "sq": case["sq"], "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation, and the launch that adds up parts."""
    t = common.element(static["dtype"])
    rows, bm, bn = static["h"] * static["sq"], static["bm"], static["bn"]
    add = TritonSource(
        fn=combine,
        signature={"o": f"*{t}", "part": "*fp32", "stat": "*fp32", "splits": "*i32"},
        constexprs={"ROWS": rows, "R": ROWS_ADDED, "D": 2 * HALF, "C": PARTS_ADDED},
        attrs=dict.fromkeys(("o", "part", "stat", "splits"), 16),
        options={"num_warps": 4, "num_stages": 1},
    )
    return TritonSource(
        fn=mla_split,
        signature={
            "q": f"tensordesc<{t}[{bm},{HALF}]>",
            "q_rope": f"tensordesc<{t}[{bm},{ROPE}]>",
            "kv": f"tensordesc<{t}[{bn},{HALF}]>",
            "kv_rope": f"tensordesc<{t}[{bn},{ROPE}]>",
            "table": "*i32",
            "o": f"*{t}",
            **dict.fromkeys(("part", "stat"), "*fp32"),
            **dict.fromkeys(("first", "items"), "*i32"),
            "width": "i32",
        },
        constexprs={
            "H": static["h"], "SQ": static["sq"], "SCALE": math.log2(math.e) / math.sqrt(2 * HALF + ROPE),
            "BM": bm, "BN": bn,
        },
        attrs=dict.fromkeys(("table", "o", "part", "stat", "first", "items"), 16),
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
        extra=(add,),
    )  # fmt: skip


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, the plan, its workspace, and a launch or two."""
    table, o = inputs["page_table"], outputs["o"]
    rows, bm, bn = case["h"] * case["sq"], int(config["bm"]), int(config["bn"])
    blocks = common.cdiv(rows, bm)
    slots = module.sms * module.blocks_per_sm
    overhead = int(config["overhead"]) * 64 // bn
    plan = attention.plan(_lengths(case), bn, max(1, slots // blocks), overhead)
    work = attention.tensors(plan, rows, 2 * HALF, blocks, o.device)
    q, kv = inputs["q"].flatten(0, 2), inputs["kv_cache"].flatten(0, 1)
    maps = [common.descriptor(x, n, cols) for x, n in ((q, bm), (kv, bn)) for cols in (HALF, ROPE)]
    run = module.launcher(
        (plan.shares * blocks,), *maps, table, o,
        *(work[x] for x in ("part", "stat", "first", "items")), table.shape[1],
    )  # fmt: skip
    keep = (*work.values(), *maps)
    if not plan.cuts:
        return Call(run, keep=keep)
    grid = (len(plan.cuts) * common.cdiv(rows, ROWS_ADDED),)
    add = module.extra[0].launcher(grid, o, work["part"], work["stat"], work["splits"])

    def both() -> None:
        run()
        add()

    return Call(both, keep=keep)


def _smem(config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: queries, the ring, and room to exchange weights. Products of fewer than 64 rows
    (mma.sync) need one buffer less."""
    bm, bn = config["bm"], config["bn"]
    buffers = config["stages"] - (0 if bm == 64 else 1)
    return int((bm + buffers * bn) * 1152 + bm * bn * 2 + 1024)


def valid(case: Case, config: Config) -> str | None:
    """What fits into shared memory and registers, with enough bytes in flight."""
    bm, bn, warps = (int(config[x]) for x in ("bm", "bn", "warps"))
    rows = case["h"] * case["sq"]
    if bm > attention.power(rows, 16) or bm < min(64, attention.power(rows, 16)):
        return f"tiles of {bm} rows for {rows} of a sequence"
    smem = _smem(config)
    if smem > common.SMEM_LIMIT:
        return f"about {smem} bytes of shared memory, over {common.SMEM_LIMIT}"
    if smem + bn * 1152 <= common.SMEM_LIMIT:
        return "one more stage fits"
    if warps != (4 if bm == 16 and bn == 32 else 8):
        return f"{warps} warps spill, or share out {bm} rows and {bn} tokens badly"
    return None


def seeds(case: Case) -> Sequence[Config]:
    """One of each tile."""
    picks = (
        (64, 64, 8, 2, 3),
        (64, 32, 8, 4, 3),
        (16, 64, 8, 3, 1),
        (16, 32, 4, 6, 1),
        (32, 32, 8, 6, 1),
        (32, 64, 8, 3, 1),
    )
    found = [dict(zip(SPACE, pick, strict=True)) for pick in picks]
    return [config for config in found if valid(case, config) is None]


def default(case: Case) -> Config:
    """The first seed, or the first point of the space where none is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/mla_decode",
    workload="mla_decode",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py", "_attention.py"),
    summary="equal shares of the latent cache, tiles loaded once as keys and values; a second launch adds",
)
KERNELS = (KERNEL,)
