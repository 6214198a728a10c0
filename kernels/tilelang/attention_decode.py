"""``tilelang/attention_decode``: one query token a sequence against paged K and V, bf16 or fp16, fp32 sums.

A producer warp walks the page table and feeds rings of K and of V tiles (64 tokens of one KV head) by TMA, a
copy a page; a consumer warpgroup holds the query heads of that KV head as rows of a wgmma tile, most of whose
64 rows are empty: the memory is the limit, not the tensor cores. All KV tiles are dealt out evenly to two
blocks an SM; who has part of a sequence leaves fp32 sums and their log-sum-exp, and whoever comes last adds
the parts up. No block ever waits for another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _attention as host
from dsl_bench.kernels.tilelang import _boxes as boxes
from tilelang.layout import make_swizzled_layout

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {"stages": (3, 2, 6, 4), "resident": (2, 1)}
D, TILE, ROWS = 128, 64, 64
ELEMENT = {"bf16": "bfloat16", "fp16": "float16"}
#: parts that are added up at a time, their loads in flight together
CHUNK = 8
#: what a piece costs beside its tiles, in tiles
EXTRA = 1


def build(group: int, page: int, stages: int, resident: int, dtype: str) -> Any:
    """The prim_func: q [b, hq, 128], k and v [pool, page, hkv, 128], table [b, widest], o [b, hq, 128];
    pieces [n, 8] and bounds [blocks + 1] of ``_attention.split``; sums [slots, group, 128] and lse [slots,
    group] fp32, count [slots] int32 zeros.

    ``group``: query heads a KV head. ``k_full`` and ``v_full`` count the producer's lanes and the bytes;
    ``k_empty`` and ``v_empty`` one arrival a consumer warp."""
    batch, hq, hkv, pool, widest = (T.dynamic(x) for x in ("batch", "hq", "hkv", "pool", "widest"))
    total_pieces, ends, slots = (T.dynamic(x) for x in ("total_pieces", "ends", "slots"))
    pages = TILE // page
    known = 32 // pages  # tiles whose pages the producer's lanes hold
    scale = host.log2_scale(D)
    passes = host.cdiv(group, 4)

    @T.prim_func
    def decode(
        q: T.Tensor((batch, hq, D), dtype),
        k: T.Tensor((pool, page, hkv, D), dtype),
        v: T.Tensor((pool, page, hkv, D), dtype),
        table: T.Tensor((batch, widest), "int32"),
        o: T.Tensor((batch, hq, D), dtype),
        pieces: T.Tensor((total_pieces, host.PIECE), "int32"),
        bounds: T.Tensor((ends,), "int32"),
        sums: T.Tensor((slots, group, D), "float32"),
        lse: T.Tensor((slots, group), "float32"),
        count: T.Tensor((slots,), "int32"),
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=160) as block:
            T.annotate_min_blocks_per_sm(resident)
            k_ring = T.alloc_shared((stages, TILE, D), dtype)
            v_ring = T.alloc_shared((stages, TILE, D), dtype)
            q_tile = T.alloc_shared((ROWS, D), dtype)
            before = T.alloc_shared((1,), "int32")
            T.annotate_layout({x: make_swizzled_layout(x) for x in (k_ring, v_ring, q_tile)})
            s = T.alloc_fragment((ROWS, TILE), "float32")
            p = T.alloc_fragment((ROWS, TILE), dtype)
            acc = T.alloc_fragment((ROWS, D), "float32")
            top = T.alloc_fragment((ROWS,), "float32")
            old = T.alloc_fragment((ROWS,), "float32")
            fade = T.alloc_fragment((ROWS,), "float32")
            part = T.alloc_fragment((ROWS,), "float32")
            total = T.alloc_fragment((ROWS,), "float32")
            k_full, v_full = T.alloc_barrier([1] * stages), T.alloc_barrier([1] * stages)
            k_empty, v_empty = T.alloc_barrier([4] * stages), T.alloc_barrier([4] * stages)
            slot, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            seq, head, first = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            tiles, length, last = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            mine, parts, base = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            held, lane, source = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, weight, peak = T.alloc_var("int32"), T.alloc_var("float32"), T.alloc_var("float32")
            norm, keep = T.alloc_var("float32"), T.alloc_var("float32")
            many = T.alloc_local((CHUNK, 4), "float32")
            marks = T.alloc_local((CHUNK,), "float32")
            joined = T.alloc_local((4,), "float32")
            found = T.alloc_local((pages,), "int32")
            thread = T.get_thread_binding()
            if thread < 128:
                for i, j in T.Parallel(ROWS, D):
                    q_tile[i, j] = T.cast(0, dtype)
                for piece in T.serial(bounds[block], bounds[block + 1]):
                    seq, head, first = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
                    tiles, length = pieces[piece, 3], pieces[piece, 4]
                    mine, parts, base = pieces[piece, 5], pieces[piece, 6], pieces[piece, 7]
                    T.sync_threads(1, 128)  # every warp is done with the last queries
                    for i, j in T.Parallel(group, D):
                        q_tile[i, j] = q[seq, head * group + i, j]
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)
                    T.clear(acc)
                    T.clear(total)
                    T.fill(top, -T.infinity("float32"))
                    for t in T.serial(tiles):
                        T.barrier_wait(k_full[slot], phase)
                        T.wgmma_gemm(q_tile, k_ring[slot, :, :], s, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(s, num_regs=ROWS * TILE // 128)
                        if T.shuffle_elect(32):
                            T.barrier_arrive(k_empty[slot])
                        if (first + t + 1) * TILE > length:
                            for i, j in T.Parallel(ROWS, TILE):
                                s[i, j] = T.if_then_else(
                                    (first + t) * TILE + j < length, s[i, j], -T.infinity("float32")
                                )
                        T.copy(top, old)
                        T.reduce_max(s, top, dim=1, clear=False)
                        for i in T.Parallel(ROWS):
                            fade[i] = T.exp2(old[i] * scale - top[i] * scale)
                        for i, j in T.Parallel(ROWS, TILE):
                            s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                        T.reduce_sum(s, part, dim=1)
                        for i in T.Parallel(ROWS):
                            total[i] = total[i] * fade[i] + part[i]
                        for i, j in T.Parallel(ROWS, D):
                            acc[i, j] = acc[i, j] * fade[i]
                        T.copy(s, p)
                        T.barrier_wait(v_full[slot], phase)
                        T.wgmma_gemm(p, v_ring[slot, :, :], acc)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(acc, num_regs=ROWS * D // 128)
                        if T.shuffle_elect(32):
                            T.barrier_arrive(v_empty[slot])
                        slot = slot + 1
                        if slot == stages:
                            slot = 0
                            phase = phase ^ 1
                    for i in T.Parallel(ROWS):
                        fade[i] = T.if_then_else(total[i] > 0, 1 / total[i], T.float32(0))
                    for i, j in T.Parallel(ROWS, D):
                        acc[i, j] = acc[i, j] * fade[i]
                    if parts == 1:
                        for i, j in T.Parallel(ROWS, D):
                            if i < group:
                                o[seq, head * group + i, j] = acc[i, j]
                    else:
                        for i, j in T.Parallel(ROWS, D):
                            if i < group:
                                sums[mine, i, j] = acc[i, j]
                        for i in T.Parallel(ROWS):
                            if i < group:
                                lse[mine, i] = top[i] * scale + T.log2(total[i])
                        T.evaluate(T.call_extern("int32", "__threadfence"))
                        T.sync_threads(1, 128)
                        if thread == 0:
                            before[0] = T.atomic_add(count[base], 1, return_prev=True)
                        T.sync_threads(1, 128)
                        if before[0] == parts - 1:
                            T.evaluate(T.call_extern("int32", "__threadfence"))
                            if thread == 0:
                                count[base] = 0
                            for turn in range(passes):
                                row = T.min(thread // 32 + turn * 4, group - 1)
                                peak = -T.infinity("float32")
                                norm = 0.0
                                for x in range(4):
                                    joined[x] = 0.0
                                source = 0
                                while source < parts:
                                    for n in range(CHUNK):
                                        held = base + T.min(source + n, parts - 1)
                                        marks[n] = lse[held, row]
                                        for x in T.vectorized(4):
                                            many[n, x] = sums[held, row, thread % 32 * 4 + x]
                                    keep = peak
                                    for n in range(CHUNK):
                                        peak = T.max(peak, marks[n])
                                    keep = T.exp2(keep - peak)
                                    norm = norm * keep
                                    for x in range(4):
                                        joined[x] = joined[x] * keep
                                    for n in range(CHUNK):
                                        weight = T.if_then_else(
                                            source + n < parts, T.exp2(marks[n] - peak), T.float32(0)
                                        )
                                        norm = norm + weight
                                        for x in range(4):
                                            joined[x] = joined[x] + many[n, x] * weight
                                    source = source + CHUNK
                                if thread // 32 + turn * 4 < group:
                                    for x in T.vectorized(4):
                                        o[seq, head * group + row, thread % 32 * 4 + x] = joined[x] / norm
            else:
                lane = thread - 128
                for piece in T.serial(bounds[block], bounds[block + 1]):
                    seq, head, first = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
                    tiles, length = pieces[piece, 3], pieces[piece, 4]
                    last = T.truncdiv(length + page - 1, page) - 1
                    for t in T.serial(tiles):
                        if t % known == 0:
                            held = table[seq, T.min((first + t) * pages + lane, last)]
                        for r in range(pages):
                            found[r] = T.shfl_sync(held, t % known * pages + r)
                        T.barrier_wait(k_empty[slot], phase ^ 1)
                        if T.shuffle_elect(32):
                            T.mbarrier_arrive_expect_tx(k_full[slot], TILE * D * 2)
                            for r in range(pages):
                                for half in range(D // boxes.ATOM):
                                    T.evaluate(
                                        boxes.load(
                                            k,
                                            (pool, page, hkv, D),
                                            (1, page, 1, boxes.ATOM),
                                            dtype,
                                            k_full[slot],
                                            T.access_ptr(
                                                k_ring[slot, r * page, half * boxes.ATOM],
                                                "w",
                                                page,
                                                boxes.ATOM,
                                            ),
                                            (found[r], 0, head, half * boxes.ATOM),
                                            boxes.FIRST,
                                        )
                                    )
                        T.barrier_wait(v_empty[slot], phase ^ 1)
                        if T.shuffle_elect(32):
                            T.mbarrier_arrive_expect_tx(v_full[slot], TILE * D * 2)
                            for r in range(pages):
                                for half in range(D // boxes.ATOM):
                                    T.evaluate(
                                        boxes.load(
                                            v,
                                            (pool, page, hkv, D),
                                            (1, page, 1, boxes.ATOM),
                                            dtype,
                                            v_full[slot],
                                            T.access_ptr(
                                                v_ring[slot, r * page, half * boxes.ATOM],
                                                "w",
                                                page,
                                                boxes.ATOM,
                                            ),
                                            (found[r], 0, head, half * boxes.ATOM),
                                            boxes.FIRST,
                                        )
                                    )
                        slot = slot + 1
                        if slot == stages:
                            slot = 0
                            phase = phase ^ 1

    return decode


def static(case: Case, config: Config) -> Static:
    """Query heads a KV head, page, ring and element type; sequences and heads stay runtime values."""
    return {
        "group": case["hq"] // case["hkv"],
        "page": case["page"],
        "stages": config["stages"],
        "resident": config["resident"],
        "dtype": ELEMENT[case.dtype],
    }


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build, dict(static), host.BY_HAND)


def plan(case: Case, blocks: int) -> tuple[host.Split, list[tuple[int, int, int]]]:
    """The split of all KV tiles over ``blocks``, and the units: (sequence, KV head, tokens)."""
    units = [(seq, head, n) for seq, n in enumerate(host.lengths(case)) for head in range(case["hkv"])]
    return host.split([host.cdiv(n, TILE) for _, _, n in units], blocks, EXTRA), units


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The split over the blocks that the GPU holds, workspace and counters."""
    import torch

    q = inputs["q"]
    cut, units = plan(case, module.sms * int(config["resident"]))
    pieces = host.device_table(host.piece_rows(cut, units), q)
    bounds = host.device_table(cut.bounds, q)
    group, slots = case["hq"] // case["hkv"], max(1, cut.slots)
    sums = torch.empty((slots, group, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((slots, group), dtype=torch.float32, device=q.device)
    count = torch.zeros(slots, dtype=torch.int32, device=q.device)
    tensors = (q, inputs["k_cache"], inputs["v_cache"], inputs["page_table"], outputs["o"])
    own = (pieces, bounds, sums, lse, count)
    return Call(module.launcher(*tensors, *own, len(cut.bounds) - 1), keep=own)


def smem(stages: int) -> int:
    """Bytes of shared memory of a block, barriers apart."""
    return (2 * stages * TILE + ROWS) * D * 2


def valid(case: Case, config: Config) -> str | None:
    """Rules of the tile, of shared memory, and rings that keep the memory busy."""
    stages, resident = int(config["stages"]), int(config["resident"])
    if case["d"] != D:
        return f"d={case['d']}: made for heads of {D}"
    if case["page"] not in (16, 32, 64):
        return f"page={case['page']}: a tile of {TILE} tokens holds whole pages of 16, 32 or 64"
    if case["hq"] // case["hkv"] > ROWS:
        return f"{case['hq'] // case['hkv']} query heads a KV head, over {ROWS}"
    if resident * (smem(stages) + host.RESERVED + 256) > host.SM_SMEM:
        return f"{resident} blocks an SM of {smem(stages)} bytes of shared memory do not fit"
    if resident * stages < 4:
        return "less than 128 KiB under way an SM"
    return None


def default(case: Case) -> Config:
    """Two blocks an SM: one's products and sums lie under the other's loads."""
    return {"stages": 3, "resident": 2}


def seeds(case: Case) -> Sequence[Config]:
    """A block an SM with all of the ring: fewer parts to add up; then shallower rings."""
    return ({"stages": 6, "resident": 1}, {"stages": 2, "resident": 2}, {"stages": 4, "resident": 1})


KERNELS = (
    Kernel(
        id="tilelang/attention_decode",
        workload="attention_decode",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_attention.py", "_boxes.py"),
        summary="pages by TMA, evenly dealt pieces, the last one adds up",
    ),
)
