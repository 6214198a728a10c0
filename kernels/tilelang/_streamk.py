"""The split form of the persistent GEMM: tiles of the last waves are cut along K so that all blocks end at
once. Used with C = X·Yᵀ as it is, and transposed for few tokens.

Every block walks K steps of the split tiles first (``quota`` consecutive steps of the sequence tile by tile),
then whole tiles; either part may be empty. A block that did part of a tile leaves fp32 sums in its own slot
of a workspace and adds its steps to the tile's counter; the one whose addition completes the tile adds all
slots up in the order of K, whoever came last, so that results repeat bit by bit. It also returns the counter
to zero for the next launch. No block ever waits for another.
"""

from collections.abc import Mapping
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan
from tilelang.layout import make_swizzled_layout

from dsl_bench.plugin import Call

#: longest C chunk staged at a time, in columns of the tile
WIDTH = 64


def build(bm: int, bn: int, bk: int, stages: int, swap: bool, dtype: str, resident: int = 1) -> Any:
    """The prim_func: x [m, k] against y [n, k], tiles of [bm, bn]; c is [m, n], with ``swap`` [n, m].

    ``work`` [2·blocks, bm, bn] fp32: slot 2i for the tile that block i found begun, 2i+1 for one it began.
    ``count`` [split tiles] int32 zeros. ``band``: rows of tiles in a band of the raster; ``whole``: tiles
    that are not split; ``quota``: K steps a block takes of the others. ``resident``: blocks an SM holds. With
    few sums in a tile the registers stay as the compiler gives them out: so two blocks find room."""
    m, n, k, slots, flags = (T.dynamic(name) for name in ("m", "n", "k", "slots", "flags"))
    groups = plan.consumers(bm)
    math = 128 * groups
    width = plan.chunk(bn)
    buffers = plan.buffers(bm, bn, bk, stages)
    moved = bm * bn // math > 64  # sums that need registers the producer gives up

    @T.prim_func
    def gemm(
        x: T.Tensor((m, k), dtype),
        y: T.Tensor((n, k), dtype),
        c: T.Tensor((n, m) if swap else (m, n), dtype),
        work: T.Tensor((slots, bm, bn), "float32"),
        count: T.Tensor((flags,), "int32"),
        blocks: T.int32,
        band: T.int32,
        whole: T.int32,
        quota: T.int32,
    ):
        with T.Kernel(blocks, threads=128 + math) as block:
            if resident > 1:
                T.annotate_min_blocks_per_sm(resident)
            x_ring = T.alloc_shared((stages, bm, bk), dtype)
            y_ring = T.alloc_shared((stages, bn, bk), dtype)
            staged = T.alloc_shared((buffers, width, bm) if swap else (buffers, bm, width), dtype)
            reached = T.alloc_shared((1,), "int32")
            acc = T.alloc_fragment((bm, bn), "float32")
            T.annotate_layout({t: make_swizzled_layout(t) for t in (x_ring, y_ring)})
            if not swap:
                T.annotate_layout({staged: make_swizzled_layout(staged)})
            full = T.alloc_barrier([128] * stages)
            empty = T.alloc_barrier([4 * groups] * stages)
            slot = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            held = T.alloc_var("int32", init=0)
            rows, cols, steps = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, col, index = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            inside, high = T.alloc_var("int32"), T.alloc_var("int32")
            tile, unit, stop = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            now, first, take = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            owner, source, complete = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            rows = T.ceildiv(m, bm)
            cols = T.ceildiv(n, bn)
            steps = T.ceildiv(k, bk)
            tile = block
            unit = block * quota
            stop = T.min(unit + quota, (rows * cols - whole) * steps)
            if thread < 128:
                if moved:
                    T.set_max_nreg(24, 0)
                while (unit < stop) | (tile < whole):
                    if unit < stop:
                        now = whole + T.truncdiv(unit, steps)
                        first = unit - (now - whole) * steps
                        take = T.min(steps - first, stop - unit)
                        unit = unit + take
                    else:
                        now = tile
                        first = 0
                        take = steps
                        tile = tile + blocks
                    index = T.truncdiv(now, band * cols)
                    inside = now - index * band * cols
                    high = T.min(rows - index * band, band)
                    col = T.truncdiv(inside, high)
                    row = index * band + inside - col * high
                    for step in T.serial(take):
                        T.barrier_wait(empty[slot], phase ^ 1)
                        T.tma_copy(
                            x[row * bm : row * bm + bm, (first + step) * bk : (first + step) * bk + bk],
                            x_ring[slot, :, :],
                            barrier=full[slot],
                        )
                        T.tma_copy(
                            y[col * bn : col * bn + bn, (first + step) * bk : (first + step) * bk + bk],
                            y_ring[slot, :, :],
                            barrier=full[slot],
                        )
                        T.barrier_arrive(full[slot])
                        slot = slot + 1
                        if slot == stages:
                            slot = 0
                            phase = phase ^ 1
            else:
                if moved:
                    T.set_max_nreg(240, 1)
                while (unit < stop) | (tile < whole):
                    if unit < stop:
                        now = whole + T.truncdiv(unit, steps)
                        first = unit - (now - whole) * steps
                        take = T.min(steps - first, stop - unit)
                        unit = unit + take
                    else:
                        now = tile
                        first = 0
                        take = steps
                        tile = tile + blocks
                    index = T.truncdiv(now, band * cols)
                    inside = now - index * band * cols
                    high = T.min(rows - index * band, band)
                    col = T.truncdiv(inside, high)
                    row = index * band + inside - col * high
                    for step in T.serial(take):
                        T.barrier_wait(full[slot], phase)
                        T.wgmma_gemm(
                            x_ring[slot, :, :],
                            y_ring[slot, :, :],
                            acc,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                            clear_accum=(step == 0),
                        )
                        T.wait_wgmma(1)
                        if step > 0:
                            if T.shuffle_elect(32):
                                T.barrier_arrive(empty[held])
                        held = slot
                        slot = slot + 1
                        if slot == stages:
                            slot = 0
                            phase = phase ^ 1
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=bm * bn // math)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(empty[held])
                    complete = 1
                    if take < steps:
                        source = T.if_then_else(first > 0, 2 * block, 2 * block + 1)
                        for i, j in T.Parallel(bm, bn):
                            work[source, i, j] = acc[i, j]
                        T.evaluate(T.call_extern("int32", "__threadfence"))
                        T.sync_threads(1, math)
                        if thread == 128:
                            reached[0] = T.atomic_add(count[now - whole], take, return_prev=True) + take
                        T.sync_threads(1, math)
                        complete = T.if_then_else(reached[0] == steps, 1, 0)
                        if complete == 1:
                            T.evaluate(T.call_extern("int32", "__threadfence"))
                            if thread == 128:
                                count[now - whole] = 0
                            T.clear(acc)
                            owner = T.truncdiv((now - whole) * steps, quota)
                            while owner * quota < (now - whole + 1) * steps:
                                source = T.if_then_else(
                                    owner * quota > (now - whole) * steps, 2 * owner, 2 * owner + 1
                                )
                                for i, j in T.Parallel(bm, bn):
                                    acc[i, j] = acc[i, j] + work[source, i, j]
                                owner = owner + 1
                    if complete == 1:
                        for part in T.unroll(bn // width):
                            left = col * bn + part * width
                            T.tma_store_wait(buffers - 1)  # the buffer's last store has read it
                            T.sync_threads(1, math)
                            if swap:
                                for i, j in T.Parallel(bm, width):
                                    staged[part % buffers, j, i] = acc[i, part * width + j]
                            else:
                                T.copy(
                                    acc[0:bm, part * width : part * width + width],
                                    staged[part % buffers, :, :],
                                )
                            T.fence_proxy_async()
                            T.sync_threads(1, math)
                            if swap:
                                T.tma_copy(
                                    staged[part % buffers, :, :],
                                    c[left : left + width, row * bm : row * bm + bm],
                                )
                            else:
                                T.tma_copy(
                                    staged[part % buffers, :, :],
                                    c[row * bm : row * bm + bm, left : left + width],
                                )
                T.tma_store_wait(0)

    return gemm


def blocks_of(tiles: int, steps: int, slots: int, split: int) -> tuple[int, int, int]:
    """(blocks, tiles done whole, K steps a block takes of the others); ``slots``: blocks the GPU holds.

    ``split`` = 1: every tile whole; 2 and more: every tile cut into so many parts, a block each; 0: the K
    steps of all tiles in equal shares; -1: those of the ragged last wave, -2: of one full wave as well."""
    if split == 1:
        return min(slots, tiles), tiles, 0
    if split > 1:
        quota = plan.cdiv(steps, split)
        return plan.cdiv(tiles * steps, quota), 0, quota
    blocks = min(slots, tiles * steps)
    if split == 0:
        return blocks, 0, plan.cdiv(tiles * steps, blocks)
    return blocks, *plan.split_plan(tiles, steps, blocks, -1 - split)


def bind(module: Any, config: Mapping[str, Any], x: Any, y: Any, c: Any, slots: int, band: int) -> Call:
    """Workspace, counters and the split (see ``blocks_of``) of x [m, k] · y [n, k] into c."""
    import torch

    bm, bn, bk = (int(config[name]) for name in ("bm", "bn", "bk"))
    tiles = plan.cdiv(x.shape[0], bm) * plan.cdiv(y.shape[0], bn)
    steps = plan.cdiv(x.shape[1], bk)
    blocks, whole, quota = blocks_of(tiles, steps, slots, int(config["split"]))
    split = tiles - whole
    work = torch.empty((2 * blocks if split else 1, bm, bn), dtype=torch.float32, device=x.device)
    count = torch.zeros(max(split, 1), dtype=torch.int32, device=x.device)
    return Call(module.launcher(x, y, c, work, count, blocks, band, whole, quota), keep=(work, count))
