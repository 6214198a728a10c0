"""``tilelang/attention_prefill``: softmax(q·kᵀ/√d)·v over a ragged batch, causal or full, bf16 or fp16.

Persistent blocks with roles by hand. A producer warp feeds queries and rings of K and V by TMA and runs
ahead into the next tile of queries; two or three consumer warpgroups hold 64 queries each. Of a KV tile,
S = Q·Kᵀ is issued before the last tile's P·V, so that the softmax, in powers of two, runs beneath P·V with P
in registers; the sums are rescaled beneath S. Named barriers let one warpgroup's softmax run under another's
products. The host deals the tiles out, longest first. Only tiles at the diagonal and at a sequence's end are
masked. Sizes, sequences and the mask are runtime values: one binary for every case of a head size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _attention as host
from tilelang.layout import make_swizzled_layout

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bn": (128, 176, 160, 192, 80, 64),
    "groups": (2, 3),
    "stages": (2, 3, 4),
    "turns": (True, False),
    "lazy": (True, False),
}
ELEMENT = {"bf16": "bfloat16", "fp16": "float16"}
#: queries of a consumer warpgroup
ROWS = 64
#: registers of a producer and of a consumer thread after ``setmaxnreg``, by consumer warpgroups
REGISTERS = {2: (24, 240), 3: (32, 160)}
#: bytes of K and V that may be in work at a time and stay in L2
L2_BYTES = 32 << 20
#: beyond any length: what lets a query see every key
ALL = 1 << 30


def build(d: int, bn: int, groups: int, stages: int, ahead: int, turns: bool, lazy: bool, dtype: str) -> Any:
    """The prim_func: q and o [tokens, hq, d], k and v [tokens, hkv, d]; tiles [n, 4] int32 (first token of
    the sequence, its length, the tile's first query in it, query head) block by block and bounds
    [blocks + 1]; ``reach``: keys behind its own position that a query sees: 0 causal, ``ALL`` full.

    Queries lie in ``ahead`` buffers, and the output goes out through the same. ``turns``: warpgroups issue
    their products in turn. ``lazy``: what a row is scaled by follows its maximum only where that has grown by
    ``host.SLACK``, so that nearly all steps leave the sums as they are. The greatest P of a step is then no
    power of two, and may have nearly all the weight of its row: it counts in the row's sum as it was rounded,
    so that its rounding cancels."""
    tokens, hq, hkv, count, ends = (T.dynamic(x) for x in ("tokens", "hq", "hkv", "count", "ends"))
    bm, math = ROWS * groups, 128 * groups
    few, many = REGISTERS[groups]
    scale = host.log2_scale(d)
    wide = T.GemmWarpPolicy.FullRow
    vector = d // 8  # threads that store a row, 16 bytes each

    @T.prim_func
    def prefill(
        q: T.Tensor((tokens, hq, d), dtype),
        k: T.Tensor((tokens, hkv, d), dtype),
        v: T.Tensor((tokens, hkv, d), dtype),
        o: T.Tensor((tokens, hq, d), dtype),
        tiles: T.Tensor((count, host.UNIT), "int32"),
        bounds: T.Tensor((ends,), "int32"),
        blocks: T.int32,
        reach: T.int32,
    ):
        with T.Kernel(blocks, threads=math + 128) as block:
            q_ring = T.alloc_shared((ahead, bm, d), dtype)
            k_ring = T.alloc_shared((stages, bn, d), dtype)
            v_ring = T.alloc_shared((stages, bn, d), dtype)
            T.annotate_layout({x: make_swizzled_layout(x) for x in (q_ring, k_ring, v_ring)})
            s = T.alloc_fragment((bm, bn), "float32")
            p = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, d), "float32")
            top = T.alloc_fragment((bm,), "float32")
            old = T.alloc_fragment((bm,), "float32")
            peak = T.alloc_fragment((bm,), "float32")
            fade = T.alloc_fragment((bm,), "float32")
            part = T.alloc_fragment((bm,), "float32")
            total = T.alloc_fragment((bm,), "float32")
            q_full, q_empty = T.alloc_barrier([32] * ahead), T.alloc_barrier([math] * ahead)
            k_full, v_full = T.alloc_barrier([32] * stages), T.alloc_barrier([32] * stages)
            k_empty = T.alloc_barrier([4 * groups] * stages)
            v_empty = T.alloc_barrier([4 * groups] * stages)
            slot, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            held, turn = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            at, flip = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            start, length = T.alloc_var("int32"), T.alloc_var("int32")
            query, head, kv = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            steps, clear, middle = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            limit, moved = T.alloc_var("int32"), T.alloc_var("int32", init=0)
            mine, following, row = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            if thread < math:
                T.set_max_nreg(many, 1)
                mine = 1 + thread // 128
                following = 1 + (thread // 128 + 1) % groups
                if turns and groups > 1:
                    if mine == groups:
                        T.named_barrier_arrive(1, 256)  # the first turn is the first warpgroup's
                for tile in T.serial(bounds[block], bounds[block + 1]):
                    start, length = tiles[tile, 0], tiles[tile, 1]
                    query, head = tiles[tile, 2], tiles[tile, 3]
                    steps = T.ceildiv(T.min(length, query + bm + reach), bn)
                    # tiles of which every query of this warpgroup sees every key
                    clear = T.truncdiv(T.min(length, query + (mine - 1) * ROWS + 1 + reach), bn)
                    T.clear(acc)
                    T.fill(fade, 1)
                    moved = 0
                    middle = T.min(T.max(clear, 1), steps)
                    T.barrier_wait(q_full[at], flip)
                    # the first tile has no products of the last one to overlap with
                    if turns and groups > 1:
                        T.sync_threads(mine, 256)
                    T.barrier_wait(k_full[slot], phase)
                    T.wgmma_gemm(
                        q_ring[at, :, :],
                        k_ring[slot, :, :],
                        s,
                        transpose_B=True,
                        policy=wide,
                        clear_accum=True,
                    )
                    if turns and groups > 1:
                        T.named_barrier_arrive(following, 256)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(s, num_regs=bm * bn // math)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(k_empty[slot])
                    if clear == 0:
                        for i, j in T.Parallel(bm, bn):
                            s[i, j] = T.if_then_else(
                                (j <= query + reach + i) & (j < length), s[i, j], -T.infinity("float32")
                            )
                    T.reduce_max(s, top, dim=1)
                    for i, j in T.Parallel(bm, bn):
                        s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                    T.reduce_sum(s, total, dim=1)
                    T.copy(s, p)
                    held = slot
                    turn = phase
                    slot = slot + 1
                    if slot == stages:
                        slot = 0
                        phase = phase ^ 1
                    for masked, low, high in ((False, 1, middle), (True, middle, steps)):
                        for step in T.serial(low, high):
                            if turns and groups > 1:
                                T.sync_threads(mine, 256)
                            T.barrier_wait(k_full[slot], phase)
                            T.wgmma_gemm(
                                q_ring[at, :, :],
                                k_ring[slot, :, :],
                                s,
                                transpose_B=True,
                                policy=wide,
                                clear_accum=True,
                            )
                            if not lazy or T.any_sync(moved != 0):
                                for i, j in T.Parallel(bm, d):
                                    acc[i, j] = acc[i, j] * fade[i]
                            T.barrier_wait(v_full[held], turn)
                            T.wgmma_gemm(p, v_ring[held, :, :], acc, policy=wide)
                            if turns and groups > 1:
                                T.named_barrier_arrive(following, 256)
                            T.wait_wgmma(1)
                            T.warpgroup_fence_operand(s, num_regs=bm * bn // math)
                            if T.shuffle_elect(32):
                                T.barrier_arrive(k_empty[slot])
                            if masked:
                                limit = query + reach - step * bn
                                for i, j in T.Parallel(bm, bn):
                                    s[i, j] = T.if_then_else(
                                        (j <= limit + i) & (step * bn + j < length),
                                        s[i, j],
                                        -T.infinity("float32"),
                                    )
                            T.copy(top, old)
                            T.reduce_max(s, top, dim=1, clear=False)
                            if lazy:
                                T.copy(top, peak)
                                moved = 0
                                for i in T.Parallel(bm):
                                    if (top[i] - old[i]) * scale > host.SLACK:
                                        moved = 1
                                    else:
                                        top[i] = old[i]
                            for i in T.Parallel(bm):
                                fade[i] = T.exp2((old[i] - top[i]) * scale)
                            for i, j in T.Parallel(bm, bn):
                                s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                            T.reduce_sum(s, part, dim=1)
                            for i in T.Parallel(bm):
                                total[i] = total[i] * fade[i] + part[i]
                            if lazy:
                                for i in T.Parallel(bm):
                                    peak[i] = T.exp2(peak[i] * scale - top[i] * scale)
                                    total[i] += T.cast(T.cast(peak[i], dtype), "float32") - peak[i]
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(acc, num_regs=bm * d // math)
                            if T.shuffle_elect(32):
                                T.barrier_arrive(v_empty[held])
                            T.copy(s, p)
                            held = slot
                            turn = phase
                            slot = slot + 1
                            if slot == stages:
                                slot = 0
                                phase = phase ^ 1
                    for i, j in T.Parallel(bm, d):
                        acc[i, j] = acc[i, j] * fade[i]
                    T.barrier_wait(v_full[held], turn)
                    T.wgmma_gemm(p, v_ring[held, :, :], acc, policy=wide)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=bm * d // math)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(v_empty[held])
                    for i in T.Parallel(bm):
                        fade[i] = 1 / total[i]
                    for i, j in T.Parallel(bm, d):
                        acc[i, j] = acc[i, j] * fade[i]
                    T.sync_threads(mine + 3, 128)  # every warp has done with these queries
                    T.copy(acc, q_ring[at, :, :])
                    T.sync_threads(mine + 3, 128)
                    for r in T.unroll(ROWS * vector // 128):
                        row = (mine - 1) * ROWS + r * (128 // vector) + thread % 128 // vector
                        if query + row < length:
                            for x in T.vectorized(8):
                                o[start + query + row, head, thread % vector * 8 + x] = q_ring[
                                    at, row, thread % vector * 8 + x
                                ]
                    T.fence_proxy_async()
                    T.barrier_arrive(q_empty[at])
                    at = at + 1
                    if at == ahead:
                        at = 0
                        flip = flip ^ 1
            else:
                T.set_max_nreg(few, 0)
                if thread < math + 32:
                    for tile in T.serial(bounds[block], bounds[block + 1]):
                        start, length = tiles[tile, 0], tiles[tile, 1]
                        query, head = tiles[tile, 2], tiles[tile, 3]
                        kv = T.truncdiv(head, T.truncdiv(hq, hkv))
                        steps = T.ceildiv(T.min(length, query + bm + reach), bn)
                        T.barrier_wait(q_empty[at], flip ^ 1)
                        T.tma_copy(
                            q[start + query : start + query + bm, head, 0:d],
                            q_ring[at, :, :],
                            barrier=q_full[at],
                        )
                        T.barrier_arrive(q_full[at])
                        at = at + 1
                        if at == ahead:
                            at = 0
                            flip = flip ^ 1
                        for step in T.serial(steps):
                            row = start + step * bn
                            T.barrier_wait(k_empty[slot], phase ^ 1)
                            T.tma_copy(k[row : row + bn, kv, 0:d], k_ring[slot, :, :], barrier=k_full[slot])
                            T.barrier_arrive(k_full[slot])
                            T.barrier_wait(v_empty[slot], phase ^ 1)
                            T.tma_copy(v[row : row + bn, kv, 0:d], v_ring[slot, :, :], barrier=v_full[slot])
                            T.barrier_arrive(v_full[slot])
                            slot = slot + 1
                            if slot == stages:
                                slot = 0
                                phase = phase ^ 1

    return prefill


def smem(d: int, bn: int, groups: int, stages: int, ahead: int) -> int:
    """Bytes of shared memory of a block, barriers apart."""
    return (ahead * ROWS * groups + 2 * stages * bn) * d * 2


def ahead_of(d: int, bn: int, groups: int, stages: int) -> int:
    """Buffers of queries: two where they fit."""
    return 2 if smem(d, bn, groups, stages, 2) + host.RESERVED <= host.BLOCK_SMEM else 1


def static(case: Case, config: Config) -> Static:
    """Head size, tile, roles, rings and element type; sequences, heads and the mask stay runtime values."""
    shape = {"d": case["d"], "bn": config["bn"], "groups": config["groups"], "stages": config["stages"]}
    return {
        **shape,
        "ahead": ahead_of(**{name: int(value) for name, value in shape.items()}),
        "turns": config["turns"],
        "lazy": config["lazy"],
        "dtype": ELEMENT[case.dtype],
    }


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build, dict(static), host.BY_HAND)


def section(case: Case) -> int:
    """Query heads whose keys and values, of all sequences, fit what may stay in L2."""
    each = sum(host.lengths(case)) * case["d"] * 4
    return max(1, L2_BYTES // each) * (case["hq"] // case["hkv"])


def plan(case: Case, config: Config, sms: int) -> list[list[host.Tile]]:
    """The tiles of queries, block by block."""
    bm, bn = ROWS * int(config["groups"]), int(config["bn"])
    tiles = host.query_tiles(host.lengths(case), case["hq"], bm, bn, bool(case["causal"]))
    return host.schedule(tiles, min(sms, len(tiles)), section(case))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The list of each block's tiles."""
    lists = plan(case, config, module.sms)
    rows = [[t.start, t.length, t.query, t.head] for block in lists for t in block]
    ends = [0]
    for block in lists:
        ends.append(ends[-1] + len(block))
    q = inputs["q"]
    tiles, bounds = host.device_table(rows, q), host.device_table(ends, q)
    reach = 0 if case["causal"] else ALL
    run = module.launcher(q, inputs["k"], inputs["v"], outputs["o"], tiles, bounds, len(lists), reach)
    return Call(run, keep=(tiles, bounds))


def valid(case: Case, config: Config) -> str | None:
    """Registers and shared memory; then what is never worth a trial."""
    bn, groups, stages = (int(config[x]) for x in ("bn", "groups", "stages"))
    d = case["d"]
    if d not in (64, 128, 256):
        return f"d={d}: made for heads of 64, 128 and 256"
    if groups == 3 and d > 64:
        return "three warpgroups pay where the softmax takes as long as the products: heads of 64"
    if not config["turns"] and d > 64:
        return "products in turn were 7 % faster wherever tried"
    if groups == 3 and config["turns"] and config["lazy"]:
        return "spills in its loops: lazy or in turn, not both"
    if d == 128 and bn > 160:
        return f"{bn} keys: 7 % behind 160 at 176, and spills at 192"
    if d == 256 and bn > 64:
        return f"{bn} keys: spills in its loops"
    need, room = bn // 2 + bn // 4 + d // 2, {2: 204, 3: 128}[groups]
    if need > room:
        return f"{need} registers a thread for scores, probabilities and sums, over {room}"
    if smem(d, bn, groups, stages, 1) + host.RESERVED > host.BLOCK_SMEM:
        return f"{smem(d, bn, groups, stages, 1)} bytes of shared memory, over {host.BLOCK_SMEM}"
    if stages * bn * d < (1 << 15):
        return "the rings hold too little"
    if need < room * 5 // 8:
        return "a longer tile of keys has room in the registers"
    if stages > 2 and stages * bn * d > 3 << 14:
        return "the rings hold two long tiles already"
    return None


def _guess(
    bn: int, groups: int = 2, stages: int = 2, turns: bool = True, lazy: bool = True
) -> dict[str, Any]:
    return {"bn": bn, "groups": groups, "stages": stages, "turns": turns, "lazy": lazy}


def _guesses(case: Case) -> list[dict[str, Any]]:
    """By head size, best first: long tiles of keys where nothing is masked."""
    if case["d"] == 64:
        third = [_guess(128, 3, 4, lazy=False), _guess(128, 3, 4, False)]
        return [third[0], _guess(176, stages=4), _guess(128, stages=4), *third[1:], _guess(192, stages=4)]
    if case["d"] == 256:
        return [_guess(64), _guess(64, lazy=False)]
    first, second = (128, 160) if case["causal"] else (160, 128)
    return [
        _guess(first),
        _guess(second),
        _guess(first, lazy=False),
        _guess(second, lazy=False),
        _guess(128, stages=3),
    ]


def default(case: Case) -> Config:
    """The best guess for the head size."""
    return _guesses(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """The next guesses that are valid."""
    return [config for config in _guesses(case)[1:] if valid(case, config) is None]


KERNELS = (
    Kernel(
        id="tilelang/attention_prefill",
        workload="attention_prefill",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_attention.py",),
        summary="persistent, softmax beneath the products, warpgroups in turn, longest tiles first",
    ),
)
