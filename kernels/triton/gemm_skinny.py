"""``triton/gemm_skinny`` and ``triton/gemv``: C = A·Bᵀ with few rows of A (decoding), bound by reading B.

``gemm_skinny`` swaps the operands, so that rows of B fill the 64 rows of a wgmma and A's few rows its N
(16 to 128), and cuts all K steps of all tiles into equal shares (stream-K), so that every SM reads the same
number of bytes at once, or (``split`` off) gives each tile to a block, with nothing to add. ``gemv`` is for
one row: products and sums on CUDA cores, B read straight into registers, no shared memory on the way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import add_peers, post

SPACE = {
    "bn": (128, 64, 256),
    "bk": (128, 64, 256),
    "warps": (4, 8),
    "stages": (4, 3, 5, 6, 8),
    "blocks": (1, 2, 3, 4),
    "split": (True, False),
}
GEMV_SPACE = {
    "bn": (8, 4, 16, 32),
    "bk": (512, 1024, 256, 2048),
    "warps": (4, 8, 2),
    "ahead": (1, 2),
}
#: bytes that must be in flight on an SM to draw its share of the device memory's bandwidth (Little's law:
#: 4.3 TB/s · 0.8 µs / 132 = 26 KB; less than this and a pipeline starves at every hiccup)
IN_FLIGHT = 48 * 1024


@triton.jit
def gemm_skinny(
    a, b, c, partial, flag, m, n, k,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """a [m, k] and b [n, k] are descriptors, c [m, n] a pointer; partial fp32 [workers, BN, BT]; flag int32
    [workers], zero before and after. A tile holds BN rows of b, the columns of c, and BT rows of a."""
    # the one who waits must not be scheduled before the one it waits for
    worker = tl.num_programs(0) - 1 - tl.program_id(0)
    workers = tl.num_programs(0)
    tiles_n = tl.cdiv(n, BN)
    steps = tl.cdiv(k, BK)
    total = tl.cdiv(m, BT) * tiles_n * steps
    at = worker * total // workers
    end = (worker + 1) * total // workers
    while at < end:
        tile = at // steps
        first = at % steps
        last = min(steps, first + end - at)
        row = tile // tiles_n * BT
        col = tile % tiles_n * BN
        acc = tl.zeros((BN, BT), tl.float32)
        for step in range(first, last):
            x = b.load([col, step * BK])
            y = a.load([row, step * BK])
            acc = tl.dot(x, y.T, acc)
        if first > 0:
            post(partial, flag, worker, acc, BN, BT)
        else:
            acc = add_peers(partial, flag, acc, worker, workers, total, (tile + 1) * steps, BN, BT)
            rows = row + tl.arange(0, BT)[None, :]
            cols = col + tl.arange(0, BN)[:, None]
            tl.store(c + rows * n + cols, acc.to(c.dtype.element_ty), mask=(rows < m) & (cols < n))
        at += last - first


@triton.jit
def gemv(a, b, c, n, k, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr):
    """c [n] = b [n, k] · a [k], all by pointers. BN rows a block; fp32 sums a lane, then across lanes."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.arange(0, BK)
    rows = b + cols[:, None] * k
    inside = cols[:, None] < n
    acc = tl.zeros((BN, BK), tl.float32)
    for start in tl.range(0, k, BK, loop_unroll_factor=AHEAD):
        x = tl.load(a + start + at, mask=start + at < k, other=0.0).to(tl.float32)
        y = tl.load(
            rows + (start + at)[None, :],
            mask=inside & (start + at < k)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        acc += y.to(tl.float32) * x[None, :]
    tl.store(c + cols, tl.sum(acc, 1).to(c.dtype.element_ty), mask=cols < n)


def _bt(case: Case) -> int:
    """Rows of A in a tile: all of them, up to 128, as a power of two of at least 16."""
    return next(t for t in (16, 32, 64, 128) if t >= min(case["m"], 128))


def _tiles(case: Case, config: Mapping[str, Any]) -> int:
    return common.cdiv(case["m"], _bt(case)) * common.cdiv(case["n"], config["bn"])


def static(case: Case, config: Config) -> Static:
    """Tile and pipeline, and what divides a row of C; ``blocks`` and ``split`` are a matter of the grid."""
    baked = {x: config[x] for x in ("bn", "bk", "warps", "stages")}
    return {**baked, "bt": _bt(case), "dtype": case.dtype, "n_div": common.divisor(case["n"])}


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation."""
    bt, bn, bk = static["bt"], static["bn"], static["bk"]
    t = common.element(static["dtype"])
    return TritonSource(
        fn=gemm_skinny,
        signature={
            "a": f"tensordesc<{t}[{bt},{bk}]>",
            "b": f"tensordesc<{t}[{bn},{bk}]>",
            "c": f"*{t}",
            "partial": "*fp32",
            "flag": "*i32",
            **dict.fromkeys(("m", "n", "k"), "i32"),
        },
        constexprs={"BT": bt, "BN": bn, "BK": bk},
        attrs={"c": 16, "partial": 16, "flag": 16, "n": static["n_div"]},
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, and a workspace of one fp32 tile a worker."""
    import torch

    c = outputs["c"]
    bt, bn, bk = _bt(case), int(config["bn"]), int(config["bk"])
    tiles = _tiles(case, config)
    slots = module.sms * min(int(config["blocks"]), module.blocks_per_sm)
    # with a block a tile, no share begins inside one: nobody waits
    workers = min(slots, tiles * common.cdiv(case["k"], bk)) if config["split"] else tiles
    partial = torch.empty((workers, bn, bt), dtype=torch.float32, device=c.device)
    flag = torch.zeros(workers, dtype=torch.int32, device=c.device)
    run = module.launcher(
        (workers,),
        common.descriptor(inputs["a"], bt, bk),
        common.descriptor(inputs["b"], bn, bk),
        c,
        partial,
        flag,
        case["m"],
        case["n"],
        case["k"],
    )
    return Call(run, keep=(partial, flag))


def valid(case: Case, config: Config) -> str | None:
    """Tensor maps over A and B, registers, shared memory, and enough bytes in flight."""
    if case["m"] > 512:
        return "made for at most 512 rows of A"
    reason = common.tma_reason(K=case["k"])
    if reason:
        return reason
    bt, bn, bk = _bt(case), int(config["bn"]), int(config["bk"])
    warps, stages, blocks = int(config["warps"]), int(config["stages"]), int(config["blocks"])
    if bn < 16 * warps:
        return f"{warps} warps need {16 * warps} rows of B"
    if bn * bt > 16384:
        return f"{bn}x{bt} sums spill on their way to C by rows: gemm_streamk does such tiles unswapped"
    reason = common.share_reason(bn * bt, warps, blocks)
    if reason:
        return reason
    tiles = _tiles(case, config)
    if not config["split"] and tiles < 90 * blocks:
        return f"{tiles} whole tiles leave too much of the device idle"
    if config["split"] and tiles % (common.SMS * blocks) == 0:
        return "the tiles come out even: nothing to split"
    stage = (bn + bt) * bk * 2
    ring = blocks * (stages * stage + 1024)
    if ring > common.SMEM_LIMIT:
        return f"{ring} bytes of shared memory on an SM, over {common.SMEM_LIMIT}"
    if blocks * (stages - 1) * stage < IN_FLIGHT:
        return f"{blocks * (stages - 1) * stage} bytes in flight on an SM: under {IN_FLIGHT}"
    return None


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs: bytes at the bandwidth that those in flight draw, uneven shares, and the fix-up."""
    bt, bn, bk, blocks = _bt(case), config["bn"], config["bk"], config["blocks"]
    steps = _tiles(case, config) * common.cdiv(case["k"], bk)
    slots = common.SMS * blocks
    stage = (bn + bt) * bk * 2
    flight = blocks * (config["stages"] - 1) * stage
    if config["split"]:
        workers = min(slots, steps)
        uneven = common.cdiv(steps, workers) * workers / steps
        fixup = 2.0 + workers * bn * bt * 8 / 3e6
    else:
        # three quarters of the SMs draw nearly all of the bandwidth, if each has enough in flight
        tiles = _tiles(case, config)
        uneven = max(1.0, 0.8 * common.cdiv(tiles, slots) * slots / tiles)
        fixup = 0.5
    # every step reads its rows of A again, from L2
    memory = max(bn * bk * 2 / 4.3e6, stage / 5.5e6) * steps * (1 + 16384 / flight)
    compute = 2.0 * steps * bn * bt * bk / (7e8 * (0.9 if bt >= 64 else 0.5))
    return max(memory, compute) * uneven + fixup + 3.0


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile by the cost model, best first."""
    return common.ranked(
        (c for c in SKINNY.configs() if valid(case, c) is None),
        lambda c: _cost(case, c),
        lambda c: (c["bn"], c["bk"] * c["stages"] * c["blocks"] >= 512, c["blocks"], c["split"]),
        8,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the first point of the space where no config is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


def gemv_static(case: Case, config: Config) -> Static:
    """Tile, and what divides a row of B."""
    return {**{x: config[x] for x in GEMV_SPACE}, "dtype": case.dtype, "k_div": common.divisor(case["k"])}


def gemv_source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation."""
    t = common.element(static["dtype"])
    return TritonSource(
        fn=gemv,
        signature={"a": f"*{t}", "b": f"*{t}", "c": f"*{t}", "n": "i32", "k": "i32"},
        constexprs={"BN": static["bn"], "BK": static["bk"], "AHEAD": static["ahead"]},
        attrs={"a": 16, "b": 16, "c": 16, "k": static["k_div"]},
        options={"num_warps": static["warps"], "num_stages": 1},
    )


def gemv_bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """A block for every bn columns of C."""
    grid = (common.cdiv(case["n"], int(config["bn"])),)
    return Call(module.launcher(grid, inputs["a"], inputs["b"], outputs["c"], case["n"], case["k"]))


def gemv_valid(case: Case, config: Config) -> str | None:
    """One row of A, 32-bit offsets, and a tile that its threads can hold."""
    if case["m"] != 1:
        return f"one row of A only, not {case['m']}"
    if case["n"] * case["k"] > common.INT32_MAX:
        return "offsets into B exceed 32 bits"
    sums = int(config["bn"]) * int(config["bk"]) // (32 * int(config["warps"]))
    if sums * int(config["ahead"]) > 128:
        return f"{sums} sums a thread with {config['ahead']} loads of them ahead spill registers"
    if sums * int(config["ahead"]) < 32:
        return f"{sums} elements a thread are too few bytes in flight"
    if int(config["bk"]) >= 2 * case["k"]:
        return "a block of K longer than K"
    return None


def _gemv_cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs: how evenly the blocks fill the SMs, and how long each is."""
    blocks = common.cdiv(case["n"], config["bn"])
    uneven = common.cdiv(blocks, common.SMS) * common.SMS / blocks
    sums = config["bn"] * config["bk"] // (32 * config["warps"]) * config["ahead"]
    resident = min(common.cdiv(blocks, common.SMS), 65536 // (64 * 32 * config["warps"]))
    flight = sums * 64 * config["warps"] * resident
    return case["n"] * case["k"] * 2 / 4.3e6 * uneven * (1 + 16384 / flight) + 3.0


def gemv_seeds(case: Case) -> Sequence[Config]:
    """The best of each tile by the cost model, best first."""
    return common.ranked(
        (c for c in GEMV.configs() if gemv_valid(case, c) is None),
        lambda c: _gemv_cost(case, c),
        lambda c: (c["bn"], c["bk"]),
        6,
    )


def gemv_default(case: Case) -> Config:
    """The cost model's first choice, or the first point of the space where no config is valid."""
    return next(iter(gemv_seeds(case)), {name: values[0] for name, values in GEMV_SPACE.items()})


SKINNY = Kernel(
    id="triton/gemm_skinny",
    workload="gemm",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py",),
    summary="few rows of A: operands swapped, all K steps in equal shares, summed in a fixed order",
)
GEMV = Kernel(
    id="triton/gemv",
    workload="gemm",
    space=GEMV_SPACE,
    default=gemv_default,
    seeds=gemv_seeds,
    valid=gemv_valid,
    static=gemv_static,
    source=gemv_source,
    bind=gemv_bind,
    needs=Needs(packages=("triton>=3.6",)),
    files=("_common.py",),
    summary="one row of A: products and sums on CUDA cores",
)
KERNELS = (SKINNY, GEMV)
