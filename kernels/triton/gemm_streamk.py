"""``triton/gemm_streamk``: C = A·Bᵀ where output tiles do not fill the last wave, or not even one.

The tiles of the ragged end are cut along K into equal shares, one a worker, so that every SM works to the
end (stream-K; the other tiles go whole, a wave at a time). A worker that starts inside a tile leaves its
fp32 sum in a workspace; the worker that starts the tile adds it, always in the same order, so the result
does not depend on timing. Both operands by tensor map, bf16 or fp16 in and out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import add_peers, collect, post, store_tile, tile_at

SPACE = {
    "bm": (128, 256, 64),
    "bn": (256, 128),
    "bk": (64, 128),
    "warps": (8, 4),
    "stages": (3, 4, 5, 6),
    "group": (8, 16),
    "blocks": (1, 2),
}


@triton.jit
def gemm_streamk(
    a, b, c, partial, flag, m, n, k, streamed,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SUB: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """a [m, k], b [n, k] and c [m, n] are descriptors; partial fp32 [workers, BM, BN]; flag int32 [workers],
    zero before and after. The first ``streamed`` tiles are shared out along K.

    FEW: shares are shorter than a tile, several may make one. Otherwise a tile has at most two shares, and
    the later one was computed first by its worker: the earlier one starts its sum from there, for free.
    """
    # the one who waits must not be scheduled before the one it waits for
    worker = tl.num_programs(0) - 1 - tl.program_id(0)
    workers = tl.num_programs(0)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    steps = tl.cdiv(k, BK)
    total = streamed * steps
    at = worker * total // workers
    end = (worker + 1) * total // workers
    whole = streamed + worker
    while (at < end) | (whole < tiles_m * tiles_n):
        shared = at < end
        tile = tl.where(shared, at // steps, whole)
        first = tl.where(shared, at % steps, 0)
        last = tl.where(shared, min(steps, first + end - at), steps)
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        if not FEW:
            if (first == 0) & (last < steps):
                acc = collect(partial, flag, worker + 1, BM, BN)
        for step in range(first, last):
            x = a.load([i * BM, step * BK])
            y = b.load([j * BN, step * BK])
            acc = tl.dot(x, y.T, acc)
        if first > 0:
            post(partial, flag, worker, acc, BM, BN)
        else:
            if FEW:
                acc = add_peers(partial, flag, acc, worker, workers, total, (tile + 1) * steps, BM, BN)
            store_tile(c, acc, i * BM, j * BN, BM, BN, SUB)
        at += tl.where(shared, last - first, 0)
        whole += tl.where(shared, 0, workers)


def _workers(case: Case, config: Mapping[str, Any], slots: int) -> int:
    """Blocks of the grid: every slot, unless there are fewer K steps than that."""
    return min(slots, common.tiles(case, config) * common.cdiv(case["k"], config["bk"]))


def _streamed(tiles: int, workers: int) -> int:
    """Tiles to share out: none if they come out even, all if they fill no wave, else the ragged end and one
    wave with it, so that a share is never shorter than a tile."""
    if tiles % workers == 0:
        return 0
    return tiles if tiles < workers else workers + tiles % workers


def static(case: Case, config: Config) -> Static:
    """Tile, pipeline and whether a share may be shorter than a tile; shapes stay runtime values."""
    few = common.tiles(case, config) < common.SMS * int(config["blocks"])
    return {**{x: config[x] for x in SPACE}, "few": few, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation."""
    bm, bn, bk = static["bm"], static["bn"], static["bk"]
    t = common.element(static["dtype"])
    return TritonSource(
        fn=gemm_streamk,
        signature={
            "a": f"tensordesc<{t}[{bm},{bk}]>",
            "b": f"tensordesc<{t}[{bn},{bk}]>",
            "c": f"tensordesc<{t}[{bm},{bn}]>",
            "partial": "*fp32",
            "flag": "*i32",
            **dict.fromkeys(("m", "n", "k", "streamed"), "i32"),
        },
        constexprs={"BM": bm, "BN": bn, "BK": bk, "GROUP": static["group"], "SUB": 1, "FEW": static["few"]},
        attrs={"partial": 16, "flag": 16},
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors, and a workspace of one fp32 tile a worker."""
    import torch

    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    bm, bn, bk = (int(config[x]) for x in ("bm", "bn", "bk"))
    slots = module.sms * min(int(config["blocks"]), module.blocks_per_sm)
    workers = _workers(case, config, slots)
    tiles = common.tiles(case, config)
    few = bool(static(case, config)["few"])
    # the binary knows one of the two ways to add; a device with other numbers than an H200 shares out all
    streamed = tiles if few else _streamed(tiles, workers)
    if not few and 0 < streamed < workers:
        raise common.unfit(f"{tiles} tiles for {workers} workers: compiled for more tiles than workers")
    partial = torch.empty((workers, bm, bn), dtype=torch.float32, device=c.device)
    flag = torch.zeros(workers, dtype=torch.int32, device=c.device)
    run = module.launcher(
        (workers,),
        common.descriptor(a, bm, bk),
        common.descriptor(b, bn, bk),
        common.descriptor(c, bm, bn),
        partial,
        flag,
        case["m"],
        case["n"],
        case["k"],
        streamed,
    )
    return Call(run, keep=(partial, flag))


def _smem(config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: the ring, which the epilogue uses again."""
    bm, bn = config["bm"], config["bn"]
    return max(config["stages"] * (bm + bn) * config["bk"] * 2, bm * bn * 2) + 256


def valid(case: Case, config: Config) -> str | None:
    """Rules of tensor maps, shared memory and registers; uneven tiles are what this kernel is for."""
    reason = common.tma_reason(K=case["k"], N=case["n"]) or common.tile_reason(config)
    reason = reason or common.size_reason(case, config)
    if reason:
        return reason
    smem = _smem(config) * int(config["blocks"])
    if smem > common.SMEM_LIMIT:
        return f"about {smem} bytes of shared memory on an SM, over {common.SMEM_LIMIT}"
    sums, warps, blocks = int(config["bm"]) * int(config["bn"]), int(config["warps"]), int(config["blocks"])
    reason = common.share_reason(sums, warps, blocks)
    if reason:
        return reason
    return common.pipeline_reason(config, smem, blocks)


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs: equal shares of the shared tiles, whole waves of the others, and the fix-up."""
    blocks, tiles = config["blocks"], common.tiles(case, config)
    workers = _workers(case, config, common.SMS * blocks)
    streamed = _streamed(tiles, workers)
    load = (streamed + tiles % workers * (streamed == 0)) / workers + (tiles - streamed) // workers
    # a slot's partial tile is written to L2 and read back
    moved = workers * config["bm"] * config["bn"] * 8 * (streamed > 0) / 5.5e6
    time = load * max(common.tile_time(case, config) * blocks, common.ring_time(case, config))
    exposed = tiles / workers / blocks + 0.5 / (config["stages"] - 1)
    return max(time, common.read_time(case)) + moved + exposed + 5.0


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
    files=("_common.py",),
    summary="the ragged last wave cut along K into equal shares, summed in a fixed order",
)
KERNELS = (KERNEL,)
