"""``triton/attention_prefill``: attention of a ragged batch by tiles of queries, K and V by tensor map.

A block takes a tile of queries of a head and walks over its keys; blocks start in the order of falling work.
Bound by the tensor cores and, beneath them, by the exponentials: the forms differ in what runs at once.
``ahead`` issues the product of the next keys before the softmax of these; ``plain`` does not, and is for
tiles of which two blocks fit on an SM, one multiplying while the other weighs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static, int_list

from . import _common as common

SPACE = {
    "form": ("ahead", "plain"),
    "bm": (128, 64),
    "bn": (128, 64, 32),
    "warps": (8, 4),
    "stages": (2, 3, 4, 5),
}
#: by head size and form, tiles (bm, bn, warps) that neither spill nor let a wgmma wait for the one before,
#: with the blocks that fit on an SM by registers
TILES = {
    (128, "ahead"): {(128, 128, 8): 1, (128, 64, 8): 1},
    (128, "plain"): {(128, 64, 4): 2, (128, 128, 8): 1, (128, 32, 4): 2},
    (64, "ahead"): {(128, 64, 8): 2, (128, 128, 8): 1, (128, 64, 4): 2},
    (64, "plain"): {(128, 64, 4): 2, (128, 64, 8): 2, (128, 128, 8): 1},
    (256, "ahead"): {(128, 64, 8): 1, (64, 32, 4): 2, (128, 32, 8): 1},
    (256, "plain"): {(128, 64, 8): 1, (64, 32, 4): 2},
}


@triton.jit
def hide(s, row, col, tokens, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Logits s [BM, BN] of queries from ``row`` and keys from ``col``, -inf where a key is beyond the end or,
    if CAUSAL, after the query."""
    keys = col + tl.arange(0, BN)[None, :]
    seen = keys < tokens
    if CAUSAL:
        seen = seen & (keys <= row + tl.arange(0, BM)[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def weigh(s, top, total, SCALE: tl.constexpr):
    """Weights of one block of raw logits (each row has at least one finite, ever), in base 2 with SCALE, the
    new largest scaled logit and sum, and the factor of what was summed before."""
    new = tl.maximum(top, tl.max(s, 1) * SCALE)
    p = tl.exp2(s * SCALE - new[:, None])
    alpha = tl.exp2(top - new)
    return p, new, total * alpha + tl.sum(p, 1), alpha


@triton.jit
def prefill_plain(
    q, k, v, o, work,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q [tokens, HQ·D], k and v [tokens, HKV·D] are descriptors with blocks of BM or BN tokens of a head (v
    of at most 128 of its columns), o [tokens, HQ·D] a pointer; work int32 [tiles, 3]: first token of the
    sequence, its tokens, first query. Heads of 256 have two sums: every wgmma of 256 columns would wait for
    the one before."""
    DV: tl.constexpr = min(D, 128)
    head = tl.program_id(0) % HQ
    entry = work + tl.program_id(0) // HQ * 3
    start = tl.load(entry)
    tokens = tl.load(entry + 1)
    row = tl.load(entry + 2)
    column = head // (HQ // HKV) * D
    x = q.load([start + row, head * D])
    end = min(tokens, row + BM) if CAUSAL else tokens
    clear = (row if CAUSAL else tokens) // BN * BN
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)
    acc2 = tl.zeros((BM, DV), tl.float32)
    for at in tl.range(0, end, BN):
        keys = k.load([start + at, column])
        values = v.load([start + at, column])
        s = tl.dot(x, keys.T)
        if at >= clear:
            s = hide(s, row, at, tokens, BM, BN, CAUSAL)
        p, top, total, alpha = weigh(s, top, total, SCALE)
        p = p.to(values.dtype)
        acc = tl.dot(p, values, acc * alpha[:, None])
        if D > DV:
            acc2 = tl.dot(p, v.load([start + at, column + DV]), acc2 * alpha[:, None])
    save(o, acc / total[:, None], start, row, tokens, head * D, HQ * D, DV, BM)
    if D > DV:
        save(o, acc2 / total[:, None], start, row, tokens, head * D + DV, HQ * D, DV, BM)


@triton.jit
def prefill_ahead(
    q, k, v, o, work,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """prefill_plain with the logits one block ahead: the product of the next keys is issued before the
    softmax of these."""
    DV: tl.constexpr = min(D, 128)
    head = tl.program_id(0) % HQ
    entry = work + tl.program_id(0) // HQ * 3
    start = tl.load(entry)
    tokens = tl.load(entry + 1)
    row = tl.load(entry + 2)
    column = head // (HQ // HKV) * D
    x = q.load([start + row, head * D])
    end = min(tokens, row + BM) if CAUSAL else tokens
    clear = (row if CAUSAL else tokens) // BN * BN
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)
    acc2 = tl.zeros((BM, DV), tl.float32)
    # a loop of one round, so that the first keys' shared memory is given back
    s = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, min(end, 1), num_stages=1):
        s = tl.dot(x, k.load([start, column]).T, s)
    for at in tl.range(0, end, BN):
        keys = k.load([start + at + BN, column])
        values = v.load([start + at, column])
        coming = tl.dot(x, keys.T)
        if at >= clear:
            s = hide(s, row, at, tokens, BM, BN, CAUSAL)
        p, top, total, alpha = weigh(s, top, total, SCALE)
        p = p.to(values.dtype)
        acc = tl.dot(p, values, acc * alpha[:, None])
        if D > DV:
            acc2 = tl.dot(p, v.load([start + at, column + DV]), acc2 * alpha[:, None])
        s = coming
    save(o, acc / total[:, None], start, row, tokens, head * D, HQ * D, DV, BM)
    if D > DV:
        save(o, acc2 / total[:, None], start, row, tokens, head * D + DV, HQ * D, DV, BM)


@triton.jit
def save(
    o, out, start, row, tokens, column, PITCH: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """DV columns of o [tokens, PITCH] from ``column`` on, the sequence's rows only."""
    rows = row + tl.arange(0, BM)
    at = (start + rows).to(tl.int64)[:, None] * PITCH + column + tl.arange(0, DV)[None, :]
    tl.store(o + at, out.to(o.dtype.element_ty), mask=rows[:, None] < tokens)


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def static(case: Case, config: Config) -> Static:
    """The whole config, heads and mask; lengths stay runtime values."""
    return {**config, **{x: case[x] for x in ("hq", "hkv", "d", "causal")}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The form's function for one specialisation."""
    t = common.element(static["dtype"])
    d, bm, bn = static["d"], static["bm"], static["bn"]
    return TritonSource(
        fn=prefill_ahead if static["form"] == "ahead" else prefill_plain,
        signature={
            "q": f"tensordesc<{t}[{bm},{d}]>",
            "k": f"tensordesc<{t}[{bn},{d}]>",
            "v": f"tensordesc<{t}[{bn},{min(d, 128)}]>",
            "o": f"*{t}",
            "work": "*i32",
        },
        constexprs={
            "HQ": static["hq"], "HKV": static["hkv"], "D": d,
            "SCALE": math.log2(math.e) / math.sqrt(d), "CAUSAL": bool(static["causal"]),
            "BM": bm, "BN": bn,
        },
        attrs={"o": 16, "work": 16},
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
    )  # fmt: skip


def worklist(lengths: Sequence[int], bm: int, causal: bool) -> list[tuple[int, int, int]]:
    """Tiles of queries as (first token of the sequence, its tokens, first query), the most keys first."""
    tiles, start = [], 0
    for tokens in lengths:
        tiles += [(start, tokens, row) for row in range(0, tokens, bm)]
        start += tokens
    return sorted(tiles, key=lambda t: -min(t[1], t[2] + bm) if causal else -t[1])


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors and the list of tiles, a block for each tile and head."""
    import torch

    d, bm, bn, o = case["d"], int(config["bm"]), int(config["bn"]), outputs["o"]
    tiles = worklist(_lengths(case), bm, bool(case["causal"]))
    work = torch.tensor(tiles, dtype=torch.int32, device=o.device)
    boxes = (("q", bm, d), ("k", bn, d), ("v", bn, min(d, 128)))
    maps = [common.descriptor(inputs[name].flatten(1), rows, cols) for name, rows, cols in boxes]
    return Call(module.launcher((len(tiles) * case["hq"],), *maps, o, work), keep=(work, *maps))


def _smem(case: Case, config: Mapping[str, Any]) -> int:
    """Shared memory of a block in bytes: queries, and the rings of K and V."""
    return int((config["bm"] + config["stages"] * 2 * config["bn"]) * case["d"] * 2 + 1024)


def valid(case: Case, config: Config) -> str | None:
    """A tile from the table, and as many stages as fit (beyond four, loads are early enough)."""
    bm, bn, warps = int(config["bm"]), int(config["bn"]), int(config["warps"])
    blocks = TILES[case["d"], str(config["form"])].get((bm, bn, warps))
    if blocks is None:
        return f"{config['form']} tiles of {bm}x{bn} for {warps} warps spill, or multiply too little"
    smem, room = _smem(case, config), common.SMEM_LIMIT // blocks
    if smem > room:
        return f"about {smem} bytes of shared memory, over the {room} of {blocks} blocks on an SM"
    if config["stages"] < 4 and smem + 4 * bn * case["d"] <= room:
        return "one more stage fits"
    return None


def seeds(case: Case) -> Sequence[Config]:
    """Every tile with its deepest ring, in the table's order; those of two blocks first where sequences are
    so short that starting and ending a tile is what takes time."""
    lengths = [n for n in _lengths(case) if n]
    short = sum(n * n for n in lengths) < 1024 * sum(lengths)
    found = [config for config in KERNEL.configs() if valid(case, config) is None]

    def rank(config: Config) -> tuple[bool, int, int]:
        tiles = TILES[case["d"], str(config["form"])]
        tile = (int(config["bm"]), int(config["bn"]), int(config["warps"]))
        return short and tiles[tile] == 1, list(tiles).index(tile), -int(config["stages"])

    best: dict[Any, Config] = {}
    for config in sorted(found, key=rank):
        best.setdefault((config["form"], config["bm"], config["bn"], config["warps"]), config)
    return list(best.values())


def default(case: Case) -> Config:
    """The first seed."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/attention_prefill",
    workload="attention_prefill",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py",),
    summary="tiles of queries, longest first; K and V by tensor map; the next product beneath the softmax",
)
KERNELS = (KERNEL,)
