"""``triton/gemm_streamk``: C = A·Bᵀ where output tiles do not fill the last wave, or not even one.

The tiles of the ragged end are cut along K, all at the same places, into one part a block; a second launch
adds the parts, always in the same order. Cuts at the same K step everywhere are to keep the blocks in step,
so that those which read the same rows do so at the same time: shares that begin anywhere, as in stream-K
proper, were no faster than idle SMs on an H200. Both operands by tensor map, bf16 or fp16 in and out; parts
are fp32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import leave_slices, store_tile, tile_at
from .gemm import descriptors, maps

SPACE = {
    "bm": (128, 256, 64),
    "bn": (256, 192, 128),
    "bk": (64, 128),
    "warps": (8, 4),
    "stages": (3, 4, 5, 6),
    "group": (8, 16),
    "blocks": (1, 2),
}
#: most parts of a tile, and fewest K steps of one
PARTS, STEPS = 16, 4
#: elements of C that a block of the second launch adds, and its warps
ADDED, ADD_WARPS = 2048, 4


@triton.jit
def gemm_cut(
    a, b, c, partial, m, n, k, whole, cut, mains, share, tails,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SUB: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """a [m, k], b [n, k] and c [m, n] are descriptors; partial fp32 [parts · cut, BM, BN].

    The first ``whole`` tiles go whole, a wave at a time. Of the last ``cut`` tiles the first ``mains`` blocks
    take ``share`` K steps of one each, part after part; every other block takes what is left of ``tails``
    tiles. One loop over the K steps of all units of a block: loads run on beneath stores."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    steps = tl.cdiv(k, BK)
    waves = tl.cdiv(max(whole - worker, 0), workers)
    main = worker < mains
    part = min(worker, mains) // cut
    odd = tl.where(main, worker % cut, (worker - mains) * tails)
    begin = part * share
    stop = tl.where(main, min(begin + share, steps), steps)
    units = tl.where(main, 1, max(min(tails, cut - odd), 0))
    unit = -1
    step = 0
    last = 0
    row = 0
    col = 0
    shared = False
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, waves * steps + units * (stop - begin)):
        step += 1
        if step >= last:
            unit += 1
            shared = unit >= waves
            tile = tl.where(shared, whole + odd + unit - waves, unit * workers + worker)
            step = tl.where(shared, begin, 0)
            last = tl.where(shared, stop, steps)
            i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
            row = i * BM
            col = j * BN
        x = a.load([row, step * BK])
        y = b.load([col, step * BK])
        acc = tl.dot(x, y.T, acc)
        if step == last - 1:
            if shared:
                slot = (part * cut + odd + unit - waves) * (BM * BN)
                leave_slices(partial + slot, acc, BM, BN, BN, SLICES)
            else:
                store_tile(c, acc, row, col, BM, BN, SUB)
            acc = tl.zeros((BM, BN), tl.float32)


@triton.jit
def gemm_cut_wide(
    a, b, b2, c, c2, partial, m, n, k, whole, cut, mains, share, tails,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SUB: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """gemm_cut with tiles of BN + BX columns (see gemm_wide), a part's first columns before the others, and
    for the same reason as there with two loops."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN + BX)
    steps = tl.cdiv(k, BK)
    waves = tl.cdiv(max(whole - worker, 0), workers)
    main = worker < mains
    part = min(worker, mains) // cut
    odd = tl.where(main, worker % cut, (worker - mains) * tails)
    begin = part * share
    stop = tl.where(main, min(begin + share, steps), steps)
    units = tl.where(main, 1, max(min(tails, cut - odd), 0))
    for unit in tl.range(0, waves + units):
        shared = unit >= waves
        tile = tl.where(shared, whole + odd + unit - waves, unit * workers + worker)
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        row = i * BM
        col = j * (BN + BX)
        acc = tl.zeros((BM, BN), tl.float32)
        acc2 = tl.zeros((BM, BX), tl.float32)
        for step in range(tl.where(shared, begin, 0), tl.where(shared, stop, steps)):
            x = a.load([row, step * BK])
            y = b.load([col, step * BK])
            y2 = b2.load([col + BN, step * BK])
            acc = tl.dot(x, y.T, acc)
            acc2 = tl.dot(x, y2.T, acc2)
        if shared:
            slot = partial + (part * cut + odd + unit - waves) * (BM * (BN + BX))
            leave_slices(slot, acc, BM, BN, BN, SLICES)
            leave_slices(slot + BM * BN, acc2, BM, BX, BX, SLICES // 2)
        else:
            store_tile(c, acc, row, col, BM, BN, SUB)
            store_tile(c2, acc2, row, col + BN, BM, BX, SUB)


@triton.jit
def add_block(
    partial, c, block, row, col, m, n, pitch, parts,
    BN: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """ADDED elements of a tile at (row, col) of c: sums of its parts, which lie ``pitch`` apart."""
    ROWS: tl.constexpr = ADDED // BN
    inner = block * ROWS + tl.arange(0, ROWS)[:, None]
    outer = tl.arange(0, BN)[None, :]
    at = partial + inner * BN + outer
    acc = tl.zeros((ROWS, BN), tl.float32)
    for part in tl.range(0, parts, loop_unroll_factor=4):
        acc += tl.load(at + part * pitch, cache_modifier=".cg")
    inside = (row + inner < m) & (col + outer < n)
    tl.store(c + (row + inner) * n + col + outer, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def add_parts(
    partial, c, m, n, whole, cut, parts,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, GROUP: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The cut tiles of c [m, n] from partial [parts, cut, BM, BN + BX]; a block adds ADDED elements."""
    BLOCKS: tl.constexpr = BM * (BN + BX) // ADDED
    odd = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    i, j = tile_at(whole + odd, tl.cdiv(m, BM), tl.cdiv(n, BN + BX), GROUP)
    tile = partial + odd * (BM * (BN + BX))
    pitch = cut * (BM * (BN + BX))
    row = i * BM
    col = j * (BN + BX)
    if BX == 0:
        add_block(tile, c, block, row, col, m, n, pitch, parts, BN, ADDED)
    else:
        FIRST: tl.constexpr = BM * BN // ADDED
        if block < FIRST:
            add_block(tile, c, block, row, col, m, n, pitch, parts, BN, ADDED)
        else:
            more = tile + BM * BN
            add_block(more, c, block - FIRST, row, col + BN, m, n, pitch, parts, BX, ADDED)


@dataclass(frozen=True)
class Plan:
    """How tiles are dealt: the arguments of gemm_cut, and the parts of a cut tile (0: nothing is cut)."""

    whole: int
    cut: int
    mains: int
    share: int
    tails: int
    parts: int


def plan(tiles: int, steps: int, workers: int) -> Plan:
    """Whole waves, and the rest cut where that shortens it by a tenth of a tile at least.

    Every block gets a main part of ``share`` steps; blocks that are over after whole rounds of those take the
    ends of ``tails`` tiles each, and the share is such that both take as long."""
    nothing = Plan(tiles, 1, 0, 0, 0, 0)
    cut = tiles % workers
    rounds = min(workers // cut, steps // STEPS, PARTS - 1) if cut else 0
    if not rounds:
        return nothing
    share, tails = common.cdiv(steps, rounds), 0
    over = workers - rounds * cut
    if over:
        ends = common.cdiv(cut, over)
        shorter = common.cdiv(ends * steps, 1 + ends * rounds)
        # a part of a step or two is not worth its fp32 tile
        if shorter < 0.93 * share and steps - rounds * shorter >= STEPS // 2:
            share, tails = shorter, ends
    rounds = min(rounds, common.cdiv(steps, share))
    if share > 0.9 * steps:
        return nothing
    return Plan(tiles - cut, cut, rounds * cut, share, tails, rounds + (tails > 0))


def _steps(case: Case, config: Mapping[str, Any]) -> int:
    return common.cdiv(case["k"], int(config["bk"]))


def static(case: Case, config: Config) -> Static:
    """Tile and pipeline, and what divides a row of C; shapes and the dealing stay runtime values."""
    sub, _ = _slices(config)
    return {
        **{x: config[x] for x in SPACE if x != "blocks"},
        "sub": sub,
        "dtype": case.dtype,
        "n_div": common.divisor(case["n"]),
    }


def _slices(config: Mapping[str, Any]) -> tuple[int, int]:
    """Column slices of a tile on its way to C, and to its part."""
    area = int(config["bm"]) * int(config["bn"])
    return (4, 8) if area >= 32768 else (2, 4)


def source(static: Static, arch: str) -> TritonSource:
    """The product and the sum for one specialisation."""
    bm, group = static["bm"], static["group"]
    bn, bx = common.split_columns(static["bn"])
    ints = dict.fromkeys(("m", "n", "k", "whole", "cut", "mains", "share", "tails"), "i32")
    sizes = {"BM": bm, "BN": bn, "GROUP": group}
    add = TritonSource(
        fn=add_parts,
        signature={
            "partial": "*fp32",
            "c": f"*{common.element(static['dtype'])}",
            **dict.fromkeys(("m", "n", "whole", "cut", "parts"), "i32"),
        },
        constexprs={**sizes, "BX": bx, "ADDED": ADDED},
        attrs={"partial": 16, "c": 16, "n": static["n_div"]},
        options={"num_warps": ADD_WARPS, "num_stages": 1},
    )
    slices = {"SUB": static["sub"], "SLICES": _slices(static)[1], "BK": static["bk"]}
    return TritonSource(
        fn=gemm_cut_wide if bx else gemm_cut,
        signature={**maps(static), "partial": "*fp32", **ints},
        constexprs={**sizes, **slices, **({"BX": bx} if bx else {})},
        attrs={"partial": 16},
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
        extra=(add,),
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, a workspace of the parts, and both launches (one where tiles come out even)."""
    import torch

    c = outputs["c"]
    m, n, k, area = case["m"], case["n"], case["k"], int(config["bm"]) * int(config["bn"])
    workers = module.sms * min(int(config["blocks"]), module.blocks_per_sm)
    p = plan(common.tiles(case, config), _steps(case, config), workers)
    partial = torch.empty((max(p.parts * p.cut, 1), area), dtype=torch.float32, device=c.device)
    maps = descriptors(config, _slices(config)[0], inputs, outputs)
    dealt = (p.whole, p.cut, p.mains, p.share, p.tails)
    product = module.launcher((workers,), *maps, partial, m, n, k, *dealt)
    if not p.parts:
        return Call(product, keep=(partial,))
    grid = (p.cut * (area // ADDED),)
    add = module.extra[0].launcher(grid, partial, c, m, n, p.whole, p.cut, p.parts)

    def run() -> None:
        product()
        add()

    return Call(run, keep=(partial,))


def _smem(config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: the ring, and a slice of C and of a part on their way out."""
    bm, bn = config["bm"], config["bn"]
    sub, slices = _slices(config)
    parts = 0 if bn == 192 else bm * bn * 4 // slices
    return config["stages"] * (bm + bn) * config["bk"] * 2 + bm * bn * 2 // sub + parts + 256


def valid(case: Case, config: Config) -> str | None:
    """Rules of tensor maps, shared memory and registers, and something to cut."""
    reason = common.tma_reason(K=case["k"], N=case["n"]) or common.tile_reason(config)
    reason = reason or common.size_reason(case, config)
    if reason:
        return reason
    if common.wide(case):
        return "offsets exceed 32 bits"
    workers = common.SMS * int(config["blocks"])
    if not plan(common.tiles(case, config), _steps(case, config), workers).parts:
        return "nothing worth cutting: triton/gemm does the same in one launch"
    smem = _smem(config) * int(config["blocks"])
    if smem > common.SMEM_LIMIT:
        return f"about {smem} bytes of shared memory on an SM, over {common.SMEM_LIMIT}"
    sums, warps, blocks = int(config["bm"]) * int(config["bn"]), int(config["warps"]), int(config["blocks"])
    reason = common.share_reason(sums, warps, blocks)
    if reason:
        return reason
    return common.pipeline_reason(config, smem)


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs: whole waves, the longest part, and the parts' way through L2."""
    blocks = int(config["blocks"])
    workers = common.SMS * blocks
    steps = _steps(case, config)
    p = plan(common.tiles(case, config), steps, workers)
    rest = max(p.share, p.tails * (steps - p.mains // p.cut * p.share)) / steps
    load = p.whole // workers + rest
    tile = common.tile_time(case, config, common.pitched(case)) * blocks
    time = load * max(tile, common.ring_time(case, config))
    moved = p.parts * p.cut * config["bm"] * config["bn"] * 8 / 5.5e6
    exposed = (1.5 if config["bn"] == 192 else 0.3) * (p.whole // workers + 1) + 0.5 / (config["stages"] - 1)
    return max(time, common.read_time(case)) + moved + exposed + 6.0


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile by the cost model, best first."""
    return common.ranked(
        (c for c in KERNEL.configs() if valid(case, c) is None),
        lambda c: _cost(case, c),
        lambda c: (c["bm"], c["bn"], c["blocks"]),
        6,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the first point of the space where no config is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/gemm_streamk",
    workload="gemm",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py", "gemm.py"),
    summary="the ragged last wave cut along K, the parts added in a fixed order by a second launch",
)
KERNELS = (KERNEL,)
