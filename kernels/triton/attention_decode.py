"""``triton/attention_decode``: paged decode by shares of the cache, the query heads of a KV head as one tile.

Every block reads the same number of tokens (a plan made when binding cuts the batch's tokens into as many
shares as blocks fit on the device), so that all SMs draw on the memory until the end; the last block of a cut
sequence adds up the parts. Bound by reading the cache: what counts is bytes in flight.
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
from ._attention import combine, merge, softmax_step

SPACE = {
    "form": ("pointer", "page"),
    "bn": (64, 128, 32),
    "warps": (4, 2),
    "stages": (3, 4, 2, 5, 7),
    "blocks": (3, 2, 1, 4),
    "fused": (True, False),
}
#: tiles' worth of time that starting and ending a run costs
OVERHEAD = 1


@triton.jit
def line_of(pages, tok, tokens, PAGE: tl.constexpr):
    """The line of the cache that holds each token, 64 bits; of page 0 for tokens beyond the end."""
    page = tl.load(pages + tok // PAGE, mask=tok < tokens, other=0)
    return page.to(tl.int64) * PAGE + tok % PAGE


@triton.jit
def decode_pointer(
    q, k, v, table, o, part, stat, count, first, items, width,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """q and o [seqs, HKV·G, D]; k and v [pool, PAGE, HKV, D]; table [seqs, width]; SCALE is for base 2. Each
    token's page is looked up by its own lane: a tile of BN tokens is any number of pages."""
    head = tl.program_id(0) % HKV
    share = tl.program_id(0) // HKV
    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    toks = tl.arange(0, BN)
    k += head * D + cols[None, :]
    v += head * D + cols[None, :]
    for item in range(tl.load(first + share), tl.load(first + share + 1)):
        seq = tl.load(items + item * 8)
        begin = tl.load(items + item * 8 + 1)
        end = tl.load(items + item * 8 + 2)
        tokens = tl.load(items + item * 8 + 3)
        at = (seq * HKV + head).to(tl.int64) * (G * D)
        x = tl.load(q + at + rows[:, None] * D + cols[None, :], mask=rows[:, None] < G, other=0.0)
        pages = table + seq.to(tl.int64) * width
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)
        line = line_of(pages, begin * BN + toks, tokens, PAGE) * (HKV * D)
        for tile in tl.range(begin, end):
            tok = tile * BN + toks
            keys = tl.load(k + line[:, None])
            values = tl.load(v + line[:, None])
            line = line_of(pages, tok + BN, tokens, PAGE) * (HKV * D)
            s = tl.where(tok[None, :] < tokens, tl.dot(x, keys.T) * SCALE, float("-inf"))
            p, top, total, alpha = softmax_step(s, top, total)
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None])
        leave(
            o, part, stat, count, items + item * 8, acc, top, total, seq, head,
            HKV, G, D, BM, R, C, FUSED,
        )  # fmt: skip


@triton.jit
def decode_page(
    q, k, v, table, o, part, stat, count, first, items, width,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """decode_pointer where k and v are descriptors of [pool·PAGE, HKV·D] with blocks of BN tokens of a head:
    a tile is a page, or a whole part of one."""
    head = tl.program_id(0) % HKV
    share = tl.program_id(0) // HKV
    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    toks = tl.arange(0, BN)
    for item in range(tl.load(first + share), tl.load(first + share + 1)):
        seq = tl.load(items + item * 8)
        begin = tl.load(items + item * 8 + 1)
        end = tl.load(items + item * 8 + 2)
        tokens = tl.load(items + item * 8 + 3)
        at = (seq * HKV + head).to(tl.int64) * (G * D)
        x = tl.load(q + at + rows[:, None] * D + cols[None, :], mask=rows[:, None] < G, other=0.0)
        pages = table + seq.to(tl.int64) * width
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)
        page = tl.load(pages + begin * BN // PAGE, mask=begin < end, other=0)
        for tile in tl.range(begin, end):
            line = page * PAGE + tile * BN % PAGE
            keys = k.load([line, head * D])
            values = v.load([line, head * D])
            page = tl.load(pages + (tile + 1) * BN // PAGE, mask=tile + 1 < end, other=0)
            tok = tile * BN + toks
            s = tl.where(tok[None, :] < tokens, tl.dot(x, keys.T) * SCALE, float("-inf"))
            p, top, total, alpha = softmax_step(s, top, total)
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None])
        leave(
            o, part, stat, count, items + item * 8, acc, top, total, seq, head,
            HKV, G, D, BM, R, C, FUSED,
        )  # fmt: skip


@triton.jit
def leave(
    o, part, stat, count, item, acc, top, total, seq, head,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The end of a run: the rows of o where it is a whole sequence, else a part; with FUSED the last part to
    come adds them all up and lowers the count for the next launch."""
    ROWS: tl.constexpr = HKV * G
    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    mine = rows < G
    slot = tl.load(item + 4)
    if slot < 0:
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        at = (seq.to(tl.int64) * ROWS + head * G + rows[:, None]) * D + cols[None, :]
        tl.store(o + at, out.to(o.dtype.element_ty), mask=mine[:, None])
    else:
        line = slot.to(tl.int64) * ROWS + head * G + rows
        tl.store(part + line[:, None] * D + cols[None, :], acc, mask=mine[:, None], cache_modifier=".cg")
        tl.store(stat + line + slot * ROWS, top, mask=mine, cache_modifier=".cg")
        tl.store(stat + line + (slot + 1) * ROWS, total, mask=mine, cache_modifier=".cg")
        if FUSED:
            # every thread's stores come before the one thread's release
            tl.debug_barrier()
            ticket = count + tl.load(item + 5) * HKV + head
            slots = tl.load(item + 7)
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == slots - 1:
                tl.store(ticket, 0)
                merge(o, part, stat, seq, tl.load(item + 6), slots, head * G, head * G + G, ROWS, R, D, C)


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def static(case: Case, config: Config) -> Static:
    """Heads, page and the config without ``blocks``, which is a matter of the grid; lengths stay runtime."""
    baked = {x: config[x] for x in SPACE if x != "blocks"}
    return {**baked, **{x: case[x] for x in ("hq", "hkv", "page", "d")}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The form's function for one specialisation, and what adds up the parts where that is a launch."""
    t = common.element(static["dtype"])
    hkv, d, bn, fused = static["hkv"], static["d"], static["bn"], static["fused"]
    group = static["hq"] // hkv
    r = attention.power(group)
    cache = f"*{t}" if static["form"] == "pointer" else f"tensordesc<{t}[{bn},{d}]>"
    pointers = {"o": f"*{t}", "part": "*fp32", "stat": "*fp32"}
    baked = {
        "HKV": hkv, "G": group, "D": d, "PAGE": static["page"], "SCALE": math.log2(math.e) / math.sqrt(d),
        "BM": attention.power(group, 16), "BN": bn, "R": r, "C": max(1, 16 // r), "FUSED": fused,
    }  # fmt: skip
    return TritonSource(
        fn=decode_pointer if static["form"] == "pointer" else decode_page,
        signature={
            "q": f"*{t}",
            "k": cache,
            "v": cache,
            "table": "*i32",
            **pointers,
            **dict.fromkeys(("count", "first", "items"), "*i32"),
            "width": "i32",
        },
        constexprs=baked,
        attrs={
            **dict.fromkeys(("q", "table", "o", "part", "stat", "count", "first", "items"), 16),
            **(dict.fromkeys(("k", "v"), 16) if static["form"] == "pointer" else {}),
        },
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
        extra=() if fused else (combine_source(static["hq"], d, t, 4, 8),),
    )


def combine_source(rows: int, d: int, kind: str, r: int, c: int) -> TritonSource:
    """The launch that adds up parts of ``rows`` rows of ``d`` columns, r rows a block and c parts at once."""
    return TritonSource(
        fn=combine,
        signature={"o": f"*{kind}", "part": "*fp32", "stat": "*fp32", "splits": "*i32"},
        constexprs={"ROWS": rows, "R": r, "D": d, "C": c},
        attrs=dict.fromkeys(("o", "part", "stat", "splits"), 16),
        options={"num_warps": 4, "num_stages": 1},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The plan, its workspace, and one launch or two."""
    q, table, o = inputs["q"], inputs["page_table"], outputs["o"]
    hq, hkv, d, bn = case["hq"], case["hkv"], case["d"], int(config["bn"])
    slots = module.sms * min(int(config["blocks"]), module.blocks_per_sm)
    plan = attention.plan(_lengths(case), bn, max(1, slots // hkv), OVERHEAD)
    work = attention.tensors(plan, hq, d, hkv, q.device)
    caches = [inputs["k_cache"], inputs["v_cache"]]
    if config["form"] == "page":
        caches = [common.descriptor(x.view(-1, hkv * d), bn, d) for x in caches]
    run = module.launcher(
        (plan.shares * hkv,), q, *caches, table, o,
        *(work[x] for x in ("part", "stat", "count", "first", "items")), table.shape[1],
    )  # fmt: skip
    keep = (*work.values(), *caches)
    if config["fused"] or not plan.cuts:
        return Call(run, keep=keep)
    blocks = len(plan.cuts) * common.cdiv(hq, 4)
    add = module.extra[0].launcher((blocks,), o, work["part"], work["stat"], work["splits"])

    def both() -> None:
        run()
        add()

    return Call(both, keep=keep)


def _smem(case: Case, config: Mapping[str, Any]) -> int:
    """Shared memory of a block in bytes: the ring of K and V tiles (of ``stages`` one is in registers), the
    queries, and room to exchange weights."""
    return int((config["stages"] - 1) * config["bn"] * case["d"] * 4 + config["bn"] * 32 + 4224)


def valid(case: Case, config: Config) -> str | None:
    """What fits on an SM, and enough bytes in flight."""
    bn, warps, stages, blocks = (int(config[x]) for x in ("bn", "warps", "stages", "blocks"))
    if config["form"] == "page" and case["page"] % bn:
        return f"a tile of {bn} tokens is no part of a page of {case['page']}"
    smem, stage = _smem(case, config) + 1024, bn * case["d"] * 4
    if smem * blocks > common.SMEM_LIMIT + 1024:
        return f"{blocks} blocks take {smem * blocks} bytes of shared memory on an SM"
    deeper = min((x for x in SPACE["stages"] if x > stages), default=99)
    if blocks * (smem + (deeper - stages) * stage) <= common.SMEM_LIMIT + 1024:
        return f"{deeper} stages fit"
    flight = blocks * (stages - 1) * stage
    if flight < 96 * 1024:
        return f"{flight} bytes in flight on an SM are too few"
    if blocks * warps > (8 if bn == 128 and config["fused"] else 12):
        return f"{blocks} blocks of {warps} warps take more registers than an SM has"
    if bn == 128 and warps < 4:
        return f"{warps} warps for {bn} tokens"
    if bn == 32 and not config["fused"]:
        return "tiles of 32 tokens spill without the combine"
    return None


def seeds(case: Case) -> Sequence[Config]:
    """Hand-picked points: where pages are tiles by tensor map first, then by pointers, and for short work
    small tiles and a combine of its own."""
    picks = (
        ("page", 64, 4, 3, 3, True),
        ("page", 64, 4, 4, 2, True),
        ("pointer", 64, 4, 3, 3, True),
        ("pointer", 64, 4, 4, 2, True),
        ("pointer", 32, 4, 4, 3, True),
        ("pointer", 64, 2, 3, 3, True),
        ("pointer", 128, 4, 4, 1, True),
        ("pointer", 64, 4, 7, 1, True),
        ("pointer", 64, 4, 4, 2, False),
    )
    found = [dict(zip(SPACE, pick, strict=True)) for pick in picks]
    return [config for config in found if valid(case, config) is None]


def default(case: Case) -> Config:
    """The first seed, or the first point of the space where none is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/attention_decode",
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
    summary="equal shares of the paged cache, heads of a group as one tile, parts added by the last block",
)
KERNELS = (KERNEL,)
