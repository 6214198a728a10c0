"""``tilelang/mla_decode``: all heads of a sequence against one paged latent cache, as keys and as values.

A block holds 64 query rows (heads times query tokens) and reads every page of 64 tokens once, by TMA, in two
parts: the columns of the left half of the values with the rotary ones, and those of the right half. One
warpgroup computes the scores, the softmax in powers of two and the left 256 columns of the output, with P in
registers; it hands P and the rescaling over in shared memory to a second one, which computes the right 256.
The next scores are issued behind the left product. Pages are dealt out evenly over the SMs, those of all rows
of a sequence to neighbours, which share them in L2; a second kernel adds the parts of a sequence up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _attention as host
from dsl_bench.kernels.tilelang import _boxes as boxes
from dsl_bench.kernels.tilelang import _join as joining
from tilelang.layout import make_swizzled_layout

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {"lazy": (True, False), "after": (True, False), "passing": (False, True), "extra": (4, 1, 8)}
D, DV, TILE, ROWS = 576, 512, 64, 64
HALF = DV // 2
ELEMENT = {"bf16": "bfloat16", "fp16": "float16"}
#: the first product of scores: keys as they lie, into an empty accumulator
SCORES = {"transpose_B": True, "clear_accum": True}
#: first columns of the boxes of the two parts of a tile
LEFT, RIGHT = (0, 64, 128, 192, 512), (256, 320, 384, 448)


def build(after: bool, lazy: bool, passing: bool, dtype: str) -> Any:
    """The prim_func: q [batch · rows, 576], kv [pool, 64, 576], table [batch, widest], o [batch, rows, 512];
    pieces [n, 8] and bounds [blocks + 1] of ``_attention.split``; sums [slots, rows, 512] and lse [slots,
    rows] fp32, written by pieces that are parts. ``h`` rows share a query token, of ``sq``.

    ``after``: row sums and the handing over of P come behind the left product, which then starts sooner.
    ``lazy``: what a row is scaled by follows its maximum only where that has grown by ``host.SLACK``, so that
    nearly all tiles leave the sums as they are. The greatest P of a tile is then no power of two, and may
    have nearly all the weight of its row: it counts in the row's sum as it was rounded, so that its rounding
    cancels. Otherwise every new maximum is followed, and that P is 1.
    ``passing``: pages are the first to leave L2."""
    queries, batch, rows, pool, widest = map(T.dynamic, ("queries", "batch", "rows", "pool", "widest"))
    total_pieces, ends, slots = (T.dynamic(x) for x in ("total_pieces", "ends", "slots"))
    scale = host.log2_scale(D)
    slack = host.SLACK if lazy else 0.0
    hint = boxes.FIRST if passing else boxes.NORMAL

    @T.prim_func
    def mla(
        q: T.Tensor((queries, D), dtype),
        kv: T.Tensor((pool, TILE, D), dtype),
        table: T.Tensor((batch, widest), "int32"),
        o: T.Tensor((batch, rows, DV), dtype),
        pieces: T.Tensor((total_pieces, host.PIECE), "int32"),
        bounds: T.Tensor((ends,), "int32"),
        sums: T.Tensor((slots, rows, DV), "float32"),
        lse: T.Tensor((slots, rows), "float32"),
        blocks: T.int32,
        h: T.int32,
        sq: T.int32,
    ):
        with T.Kernel(blocks, threads=384) as block:
            q_tile = T.alloc_shared((ROWS, D), dtype)
            ring = T.alloc_shared((2, TILE, D), dtype)
            p_tile = T.alloc_shared((ROWS, TILE), dtype)
            faded = T.alloc_shared((ROWS,), "float32")
            inverse = T.alloc_shared((ROWS,), "float32")
            T.annotate_layout({x: make_swizzled_layout(x) for x in (q_tile, ring, p_tile)})
            s = T.alloc_fragment((ROWS, TILE), "float32")
            p = T.alloc_fragment((ROWS, TILE), dtype)
            left = T.alloc_fragment((ROWS, HALF), "float32")
            right = T.alloc_fragment((ROWS, HALF), "float32")
            top = T.alloc_fragment((ROWS,), "float32")
            old = T.alloc_fragment((ROWS,), "float32")
            peak = T.alloc_fragment((ROWS,), "float32")
            fade = T.alloc_fragment((ROWS,), "float32")
            part = T.alloc_fragment((ROWS,), "float32")
            total = T.alloc_fragment((ROWS,), "float32")
            seen = T.alloc_fragment((ROWS,), "int32")
            scaled = T.alloc_fragment((ROWS,), "float32")
            closing = T.alloc_fragment((ROWS,), "float32")
            q_full, q_empty = T.alloc_barrier([1]), T.alloc_barrier([4])
            left_full, right_full = T.alloc_barrier([1] * 2), T.alloc_barrier([1] * 2)
            left_empty, right_empty = T.alloc_barrier([4] * 2), T.alloc_barrier([4] * 2)
            p_full, p_empty = T.alloc_barrier([128]), T.alloc_barrier([4])
            slot, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            turn, given = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            seq, band, first = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            tiles, length = T.alloc_var("int32"), T.alloc_var("int32")
            mine, parts, page = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            held, moved = T.alloc_var("int32"), T.alloc_var("int32", init=1)
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(240, 1)
                for piece in T.serial(bounds[block], bounds[block + 1]):
                    seq, band, first = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
                    tiles, length = pieces[piece, 3], pieces[piece, 4]
                    mine, parts = pieces[piece, 5], pieces[piece, 6]
                    T.clear(left)
                    T.clear(total)
                    T.fill(top, host.LOWEST)
                    for i in T.Parallel(ROWS):
                        seen[i] = T.min(length, length - sq + 1 + T.truncdiv(band * ROWS + i, h))
                    if tiles > 0:
                        T.barrier_wait(q_full[0], turn)
                        turn = turn ^ 1
                        T.barrier_wait(left_full[slot], phase)
                        T.wgmma_gemm(q_tile[:, 0:HALF], ring[slot, :, 0:HALF], s, **SCORES)
                        T.wgmma_gemm(q_tile[:, DV:D], ring[slot, :, DV:D], s, transpose_B=True)
                        T.barrier_wait(right_full[slot], phase)
                        T.wgmma_gemm(q_tile[:, HALF:DV], ring[slot, :, HALF:DV], s, transpose_B=True)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(s, num_regs=ROWS * TILE // 128)
                    for more, count in ((True, tiles - 1), (False, T.min(tiles, 1))):
                        for t in T.serial(count):
                            held = first + t if more else first + tiles - 1
                            if (held + 1) * TILE > length - sq + 1:
                                for i, j in T.Parallel(ROWS, TILE):
                                    s[i, j] = T.if_then_else(
                                        held * TILE + j < seen[i], s[i, j], -T.infinity("float32")
                                    )
                            T.copy(top, old)
                            T.reduce_max(s, top, dim=1, clear=False)
                            moved = 0
                            T.copy(top, peak)
                            for i in T.Parallel(ROWS):
                                if (top[i] - old[i]) * scale > slack:
                                    moved = 1
                                else:
                                    top[i] = old[i]
                            for i in T.Parallel(ROWS):
                                # a difference of products, fused, is no zero where both are LOWEST
                                fade[i] = T.exp2((old[i] - top[i]) * scale)
                            for i, j in T.Parallel(ROWS, TILE):
                                s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                            T.copy(s, p)
                            for product in (True, False) if after else (False, True):
                                if product:
                                    if T.any_sync(moved != 0):
                                        for i, j in T.Parallel(ROWS, HALF):
                                            left[i, j] = left[i, j] * fade[i]
                                    T.wgmma_gemm(p, ring[slot, :, 0:HALF], left)
                                else:
                                    T.reduce_sum(s, part, dim=1)
                                    for i in T.Parallel(ROWS):
                                        total[i] = total[i] * fade[i] + part[i]
                                    if lazy:
                                        for i in T.Parallel(ROWS):
                                            # where both are LOWEST the difference is no number to use
                                            peak[i] = T.if_then_else(
                                                peak[i] > top[i],
                                                T.exp2(peak[i] * scale - top[i] * scale),
                                                T.float32(1),
                                            )
                                            total[i] += T.cast(T.cast(peak[i], dtype), "float32") - peak[i]
                                    T.barrier_wait(p_empty[0], given ^ 1)
                                    given = given ^ 1
                                    T.copy(p, p_tile)
                                    T.copy(fade, faded)
                                    if not more:
                                        T.copy(total, inverse)
                                    T.fence_proxy_async()
                                    T.barrier_arrive(p_full[0])
                            held = slot
                            slot = slot ^ 1
                            if slot == 0:
                                phase = phase ^ 1
                            if more:
                                T.barrier_wait(left_full[slot], phase)
                                T.wgmma_gemm(q_tile[:, 0:HALF], ring[slot, :, 0:HALF], s, **SCORES)
                                T.wgmma_gemm(q_tile[:, DV:D], ring[slot, :, DV:D], s, transpose_B=True)
                                T.barrier_wait(right_full[slot], phase)
                                T.wgmma_gemm(q_tile[:, HALF:DV], ring[slot, :, HALF:DV], s, transpose_B=True)
                                T.wait_wgmma(3)
                                T.warpgroup_fence_operand(left, num_regs=ROWS * HALF // 128)
                                if T.shuffle_elect(32):
                                    T.barrier_arrive(left_empty[held])
                                T.wait_wgmma(0)
                                T.warpgroup_fence_operand(s, num_regs=ROWS * TILE // 128)
                            else:
                                if T.shuffle_elect(32):
                                    T.barrier_arrive(q_empty[0])
                                T.wait_wgmma(0)
                                T.warpgroup_fence_operand(left, num_regs=ROWS * HALF // 128)
                                if T.shuffle_elect(32):
                                    T.barrier_arrive(left_empty[held])
                    for i in T.Parallel(ROWS):
                        fade[i] = T.if_then_else(total[i] > 0, 1 / total[i], T.float32(0))
                    for i, j in T.Parallel(ROWS, HALF):
                        left[i, j] = left[i, j] * fade[i]
                    if parts == 1:
                        for i, j in T.Parallel(ROWS, HALF):
                            if band * ROWS + i < rows:
                                o[seq, band * ROWS + i, j] = left[i, j]
                    else:
                        for i, j in T.Parallel(ROWS, HALF):
                            if band * ROWS + i < rows:
                                sums[mine, band * ROWS + i, j] = left[i, j]
                        for i in T.Parallel(ROWS):
                            if band * ROWS + i < rows:
                                lse[mine, band * ROWS + i] = top[i] * scale + T.log2(total[i])
            elif thread < 256:
                T.set_max_nreg(240, 1)
                for piece in T.serial(bounds[block], bounds[block + 1]):
                    seq, band = pieces[piece, 0], pieces[piece, 1]
                    tiles, mine, parts = pieces[piece, 3], pieces[piece, 5], pieces[piece, 6]
                    T.clear(right)
                    T.clear(closing)
                    for t in T.serial(tiles):
                        T.barrier_wait(p_full[0], given)
                        given = given ^ 1
                        T.barrier_wait(right_full[slot], phase)
                        moved = 0
                        for i in T.Parallel(ROWS):
                            scaled[i] = faded[i]
                            if scaled[i] < 1:
                                moved = 1
                        if T.any_sync(moved != 0):
                            for i, j in T.Parallel(ROWS, HALF):
                                right[i, j] = right[i, j] * scaled[i]
                        T.wgmma_gemm(p_tile, ring[slot, :, HALF:DV], right)
                        if t == tiles - 1:
                            for i in T.Parallel(ROWS):
                                closing[i] = inverse[i]
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(right, num_regs=ROWS * HALF // 128)
                        if T.shuffle_elect(32):
                            T.barrier_arrive(right_empty[slot])
                            T.barrier_arrive(p_empty[0])
                        slot = slot ^ 1
                        if slot == 0:
                            phase = phase ^ 1
                    for i in T.Parallel(ROWS):
                        closing[i] = T.if_then_else(closing[i] > 0, 1 / closing[i], T.float32(0))
                    for i, j in T.Parallel(ROWS, HALF):
                        right[i, j] = right[i, j] * closing[i]
                    if parts == 1:
                        for i, j in T.Parallel(ROWS, HALF):
                            if band * ROWS + i < rows:
                                o[seq, band * ROWS + i, HALF + j] = right[i, j]
                    else:
                        for i, j in T.Parallel(ROWS, HALF):
                            if band * ROWS + i < rows:
                                sums[mine, band * ROWS + i, HALF + j] = right[i, j]
            else:
                T.set_max_nreg(24, 0)
                if thread < 288:
                    for piece in T.serial(bounds[block], bounds[block + 1]):
                        seq, band, first = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
                        tiles, length = pieces[piece, 3], pieces[piece, 4]
                        if tiles > 0:
                            T.barrier_wait(q_empty[0], turn ^ 1)
                            turn = turn ^ 1
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive_expect_tx(q_full[0], ROWS * D * 2)
                                for c in range(D // boxes.ATOM):
                                    T.evaluate(
                                        boxes.load(
                                            q,
                                            (queries, D),
                                            (ROWS, boxes.ATOM),
                                            dtype,
                                            q_full[0],
                                            T.access_ptr(q_tile[0, c * boxes.ATOM], "w", ROWS, boxes.ATOM),
                                            (seq * rows + band * ROWS, c * boxes.ATOM),
                                        )
                                    )
                        for t in T.serial(tiles):
                            if t % 32 == 0:
                                held = table[
                                    seq, T.min(first + t + thread - 256, T.truncdiv(length - 1, TILE))
                                ]
                            page = T.shfl_sync(held, t % 32)
                            for full, empty, columns in (
                                (left_full, left_empty, LEFT),
                                (right_full, right_empty, RIGHT),
                            ):
                                T.barrier_wait(empty[slot], phase ^ 1)
                                if T.shuffle_elect(32):
                                    T.mbarrier_arrive_expect_tx(
                                        full[slot], len(columns) * TILE * boxes.ATOM * 2
                                    )
                                    for c in columns:
                                        T.evaluate(
                                            boxes.load(
                                                kv,
                                                (pool, TILE, D),
                                                (1, TILE, boxes.ATOM),
                                                dtype,
                                                full[slot],
                                                T.access_ptr(ring[slot, 0, c], "w", TILE, boxes.ATOM),
                                                (page, 0, c),
                                                hint,
                                            )
                                        )
                            slot = slot ^ 1
                            if slot == 0:
                                phase = phase ^ 1

    return mla


def static(case: Case, config: Config) -> Static:
    """The order of work, the hint for L2 and the element type; all sizes stay runtime values."""
    return {**{x: config[x] for x in ("after", "lazy", "passing")}, "dtype": ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func, and that which adds parts up."""
    join = TilelangSource(joining.build, {"dv": DV, "dtype": static["dtype"]}, host.BY_HAND)
    return TilelangSource(build, dict(static), host.BY_HAND, extra=(join,))


def plan(case: Case, extra: int, sms: int) -> tuple[list[list[int]], list[int], list[list[int]], int]:
    """The table of pieces, the bounds of the blocks in it, the sequences in parts (sequence, first slot,
    parts, 0), and slots in all.

    Sequences are split over groups of blocks; a group has a block for every 64 rows, which do the same pieces
    at the same time and find the pages in L2."""
    lens, rows = host.lengths(case), case["h"] * case["sq"]
    bands = host.cdiv(rows, ROWS)
    cut = host.split([host.cdiv(n, TILE) for n in lens], max(1, sms // bands), extra)
    table: list[list[int]] = []
    bounds = [0]
    for low, high in zip(cut.bounds, cut.bounds[1:], strict=False):
        for band in range(bands):
            for piece in cut.pieces[low:high]:
                where = [piece.unit, band, piece.first, piece.tiles, lens[piece.unit]]
                table.append([*where, piece.slot, piece.parts, piece.base])
            bounds.append(len(table))
    cuts = sorted({(p.unit, p.base, p.parts, 0) for p in cut.pieces if p.parts > 1})
    return table, bounds, [list(row) for row in cuts], cut.slots


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The split over the SMs, the workspace, and a second launch where a sequence is in parts."""
    import torch

    q, o = inputs["q"], outputs["o"]
    rows = case["h"] * case["sq"]
    table, bounds, cuts, slots = plan(case, int(config["extra"]), module.sms)
    pieces, ends = host.device_table(table, q), host.device_table(bounds, q)
    sums = torch.empty((max(1, slots), rows, DV), dtype=torch.float32, device=q.device)
    lse = torch.empty((max(1, slots), rows), dtype=torch.float32, device=q.device)
    flat = o.view(-1, rows, DV)
    tensors = (q.view(-1, D), inputs["kv_cache"], inputs["page_table"], flat, pieces, ends, sums, lse)
    attend = module.launcher(*tensors, len(bounds) - 1, case["h"], case["sq"])
    if not cuts:
        return Call(attend, keep=tensors)
    parts = host.device_table(cuts, q)
    join = module.extra[0].launcher(parts, sums, lse, flat)

    def run() -> None:
        attend()
        join()

    return Call(run, keep=(*tensors, parts))


def valid(case: Case, config: Config) -> str | None:
    """Every case fits; what costs a piece little is not worth a dear guess."""
    rows = case["h"] * case["sq"]
    if rows <= 32 and int(config["extra"]) > 4:
        return f"{rows} rows are cheap to add up"
    return None


def default(case: Case) -> Config:
    """A part of 64 rows costs about four pages: 128 KiB to write, and to read again. Pages that one block
    reads need no place in L2."""
    rows = case["h"] * case["sq"]
    return {"lazy": True, "after": True, "passing": rows <= ROWS, "extra": 4 if rows > 32 else 1}


def seeds(case: Case) -> Sequence[Config]:
    """The other hint, exact maxima, the other order, and splits that count parts for less or more."""
    first = default(case)
    other = 1 if first["extra"] == 4 else 4
    found: list[dict[str, Any]] = [
        {**first, "passing": not first["passing"]},
        {**first, "lazy": False},
        {**first, "after": False},
        {**first, "extra": other},
        {**first, "extra": 8},
    ]
    return [config for config in found if valid(case, config) is None]


KERNELS = (
    Kernel(
        id="tilelang/mla_decode",
        workload="mla_decode",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_attention.py", "_boxes.py", "_join.py"),
        summary="each page read once as keys and values, output split over two warpgroups",
    ),
)
