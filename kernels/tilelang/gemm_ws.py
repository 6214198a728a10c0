"""``tilelang/gemm_ws``: C = A·Bᵀ by persistent blocks with roles written by hand, bf16 or fp16, fp32 sum.

A producer warpgroup feeds a ring of A and B tiles by TMA and runs ahead into the next output tile while one
to three consumer warpgroups drain the last. Consumers keep one wgmma batch in flight: a ring slot is released
one step late, when the batch that read it is known to be done. C leaves in 64-column chunks through two
buffers (one where the ring needs the room); its TMA stores run beneath the next tile's products. In a cluster
of two, blocks take tiles one above the other and share B (``2x1``), or side by side and share A (``1x2``), by
TMA multicast, which the first issues or (``halves``) each block its half of. Shapes are symbolic: one binary
serves every size.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan
from tilelang import tvm
from tilelang.layout import make_swizzled_layout

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bm": (128, 256, 192, 64),
    "bn": (256, 128, 64, 160, 176, 192, 208, 224),
    "stages": (4, 3, 5, 6, 8),
    "cluster": ("1x1", "2x1", "1x2"),
    "halves": (False, True),
    "group": (8, 16, 4),
}
BK = 64
#: registers of a consumer thread after ``setmaxnreg``, by consumer warpgroups: 128 threads keep 24
REGISTERS = {1: 240, 2: 240, 3: 160}


def shape_of(cluster: str) -> tuple[int, int]:
    """(rows, columns) of tiles a cluster."""
    rows, cols = cluster.split("x")
    return int(rows), int(cols)


def _multicast_half(
    tensor: Any, rows: Any, k: Any, dtype: str, box: int, barrier: Any, at: Any, xy: tuple[Any, Any]
) -> Any:
    """The call that loads ``box`` rows of 64 elements at ``xy`` (column, row) of ``tensor`` [rows, k] to
    ``at`` in both blocks of a cluster. ``T.tma_copy`` has only the first block issue a multicast, so this
    spells out what it lowers to: a tensor map (driver's number of the type, dimensions, sizes, strides in
    bytes, box, element strides, no interleave, 128-byte swizzle, L2 promotion to 128 bytes, zeros beyond the
    edges)."""
    wide, two = T.cast(k, "int64"), T.int64(2)
    sizes = (wide, T.cast(rows, "int64"), two, wide * two)
    kind = {"float16": 6, "bfloat16": 9}[dtype]
    desc = T.create_tma_descriptor(kind, 2, tensor.data, *sizes, BK, box, 1, 1, 0, 3, 2, 0)
    op = tvm.tirx.op.Op.get("tl.tma_load_multicast")
    return T.call_intrin("handle", op, desc, barrier, at, 3, *xy, 0)


def build(
    bm: int, bn: int, stages: int, cluster: str, dtype: str, halves: bool = False, direct: bool = False
) -> Any:
    """The prim_func (a [m, k], b [n, k], c [m, n], blocks, rows of tiles a band of the raster).

    Roles stand in the two arms of one ``if``: between two separate regions TileLang would put a barrier for
    the whole block. ``full`` counts the producer's threads and the bytes of both tiles; ``empty`` one arrival
    a consumer warp, of both blocks in a cluster, since one block's multicast writes the other's ring.
    ``direct`` stores C by plain predicated stores, for rows that TMA cannot take."""
    m, n, k = T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    groups = plan.consumers(bm)
    math, registers = 128 * groups, REGISTERS[groups]
    width, starts = plan.chunk(bn), plan.chunks(bn)
    buffers = plan.buffers(bm, bn, BK, stages)
    tall, wide = shape_of(cluster)
    size = tall * wide
    pair = size == 2
    half_m, half_n = bm // 2, bn // 2

    @T.prim_func
    def gemm(
        a: T.Tensor((m, k), dtype),
        b: T.Tensor((n, k), dtype),
        c: T.Tensor((m, n), dtype),
        blocks: T.int32,
        band: T.int32,
    ):
        with T.Kernel(blocks, threads=128 + math, cluster_dims=(size, 1, 1)) as block:
            a_ring = T.alloc_shared((stages, bm, BK), dtype)
            b_ring = T.alloc_shared((stages, bn, BK), dtype)
            staged = T.alloc_shared((buffers, bm, width), dtype)
            acc = T.alloc_fragment((bm, bn), "float32")
            T.annotate_layout({x: make_swizzled_layout(x) for x in (a_ring, b_ring, staged)})
            full = T.alloc_barrier([128] * stages)
            if pair:
                empty = T.alloc_cluster_barrier([4 * groups * size] * stages)
            else:
                empty = T.alloc_barrier([4 * groups] * stages)
            slot = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            held = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32")
            rows, cols, steps = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, col, rank = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            index, inside, high = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            rows = T.ceildiv(T.ceildiv(m, bm), tall)
            cols = T.ceildiv(T.ceildiv(n, bn), wide)
            steps = T.ceildiv(k, BK)
            rank = block % size
            tile = block // size
            if T.get_thread_binding() < 128:
                T.set_max_nreg(24, 0)
                while tile < rows * cols:
                    index = T.truncdiv(tile, band * cols)
                    inside = tile - index * band * cols
                    high = T.min(rows - index * band, band)
                    col = T.truncdiv(inside, high)
                    row = (index * band + inside - col * high) * tall + rank * (tall - 1)
                    col = col * wide + rank * (wide - 1)
                    for step in T.serial(steps):
                        T.barrier_wait(empty[slot], phase ^ 1)
                        if wide == 2 and halves:
                            if T.shuffle_elect(128):
                                T.mbarrier_expect_tx(full[slot], bm * BK * 2)
                                T.evaluate(
                                    _multicast_half(
                                        a,
                                        m,
                                        k,
                                        dtype,
                                        half_m,
                                        full[slot],
                                        T.access_ptr(a_ring[slot, rank * half_m, 0], "w", half_m, BK),
                                        (step * BK, row * bm + rank * half_m),
                                    )
                                )
                        elif wide == 2:
                            T.tma_copy(
                                a[row * bm : row * bm + bm, step * BK : step * BK + BK],
                                a_ring[slot, :, :],
                                barrier=full[slot],
                                cluster_mask=3,
                            )
                        else:
                            T.tma_copy(
                                a[row * bm : row * bm + bm, step * BK : step * BK + BK],
                                a_ring[slot, :, :],
                                barrier=full[slot],
                            )
                        if tall == 2 and halves:
                            if T.shuffle_elect(128):
                                T.mbarrier_expect_tx(full[slot], bn * BK * 2)
                                T.evaluate(
                                    _multicast_half(
                                        b,
                                        n,
                                        k,
                                        dtype,
                                        half_n,
                                        full[slot],
                                        T.access_ptr(b_ring[slot, rank * half_n, 0], "w", half_n, BK),
                                        (step * BK, col * bn + rank * half_n),
                                    )
                                )
                        elif tall == 2:
                            T.tma_copy(
                                b[col * bn : col * bn + bn, step * BK : step * BK + BK],
                                b_ring[slot, :, :],
                                barrier=full[slot],
                                cluster_mask=3,
                            )
                        else:
                            T.tma_copy(
                                b[col * bn : col * bn + bn, step * BK : step * BK + BK],
                                b_ring[slot, :, :],
                                barrier=full[slot],
                            )
                        T.barrier_arrive(full[slot])
                        slot = slot + 1
                        if slot == stages:
                            slot = 0
                            phase = phase ^ 1
                    tile = tile + T.truncdiv(blocks, size)
            else:
                T.set_max_nreg(registers, 1)
                while tile < rows * cols:
                    index = T.truncdiv(tile, band * cols)
                    inside = tile - index * band * cols
                    high = T.min(rows - index * band, band)
                    col = T.truncdiv(inside, high)
                    row = (index * band + inside - col * high) * tall + rank * (tall - 1)
                    col = col * wide + rank * (wide - 1)
                    for step in T.serial(steps):
                        T.barrier_wait(full[slot], phase)
                        T.wgmma_gemm(
                            a_ring[slot, :, :],
                            b_ring[slot, :, :],
                            acc,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                            clear_accum=(step == 0),
                        )
                        T.wait_wgmma(1)
                        if step > 0:
                            if T.shuffle_elect(32):
                                T.barrier_arrive(empty[held])
                                if pair:
                                    T.mbarrier_arrive(empty[held], rank ^ 1)
                        held = slot
                        slot = slot + 1
                        if slot == stages:
                            slot = 0
                            phase = phase ^ 1
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=bm * bn // math)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(empty[held])
                        if pair:
                            T.mbarrier_arrive(empty[held], rank ^ 1)
                    for part, start in enumerate(starts):
                        left = col * bn + start
                        T.tma_store_wait(buffers - 1)  # the buffer's last store has read it
                        T.sync_threads(1, math)
                        T.copy(acc[0:bm, start : start + width], staged[part % buffers, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(1, math)
                        if direct:
                            for i, j in T.Parallel(bm, width, coalesced_width=T.int32(1)):
                                c[row * bm + i, left + j] = staged[part % buffers, i, j]
                        else:
                            T.tma_copy(
                                staged[part % buffers, :, :],
                                c[row * bm : row * bm + bm, left : left + width],
                            )
                    tile = tile + T.truncdiv(blocks, size)
                T.tma_store_wait(0)
            if pair:
                T.cluster_sync()  # a block that leaves takes its barriers along

    return gemm


def static(case: Case, config: Config) -> Static:
    """Tile, ring, cluster and element type; sizes, grid and raster stay runtime values."""
    baked = {name: config[name] for name in ("bm", "bn", "stages", "cluster", "halves")}
    return {**baked, "dtype": plan.ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build, dict(static), plan.BY_HAND)


def grid(case: Case, bm: int, bn: int, cluster: str, group: int, sms: int) -> tuple[int, int]:
    """Blocks (whole clusters), and rows of clusters in a band of the raster."""
    tall, wide = shape_of(cluster)
    clusters = plan.cdiv(plan.cdiv(case["m"], bm), tall) * plan.cdiv(plan.cdiv(case["n"], bn), wide)
    return min(sms // (tall * wide), clusters) * tall * wide, max(1, group // tall)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """As many blocks as there are SMs, or tiles."""
    bm, bn = int(config["bm"]), int(config["bn"])
    blocks, band = grid(case, bm, bn, str(config["cluster"]), int(config["group"]), module.sms)
    run = module.launcher(inputs["a"], inputs["b"], outputs["c"], blocks, band)
    return Call(run)


def valid(case: Case, config: Config) -> str | None:
    """Rules of TMA, shared memory and registers; then what is never worth a trial."""
    bm, bn, stages = (int(config[x]) for x in ("bm", "bn", "stages"))
    m, n, k = case["m"], case["n"], case["k"]
    if m <= 16:
        return f"M={m}: three quarters of wgmma's rows would be empty; gemm_skinny swaps the operands"
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if config["halves"] and config["cluster"] == "1x1":
        return "there is nothing shared to halve"
    return shape_reason(case, bm, bn, stages, str(config["cluster"]), int(config["group"]))


def shape_reason(case: Case, bm: int, bn: int, stages: int, cluster: str, group: int) -> str | None:
    """Why a tile, ring, cluster and raster cannot be had, or are never worth a trial, or None."""
    m, n = case["m"], case["n"]
    if reason := plan.register_reason(bm, bn):
        return reason
    if reason := plan.smem_reason(plan.persistent_bytes(bm, bn, BK, stages)):
        return reason
    if stages < 6 and bm + bn <= 256 and fits(bm, bn, stages + 1):
        return f"a ring of {stages} short steps hides too little: there is room for more"
    tall, wide = shape_of(cluster)
    if m <= bm * (tall - 1) or n <= bn * (wide - 1):
        return "a cluster shares between two tiles, and there is one"
    if bm // 2 >= max(m, 64) or bn // 2 >= max(n, 64):
        return "half of the tile and more would be empty"
    best = min(plan.waste(m, n, bm2, bn2) for bm2, bn2 in ((128, 256), (128, 128), (128, 192), (128, 64)))
    if plan.waste(m, n, bm, bn) > 1.5 * best:
        return "the tiles waste half as much again as plain ones"
    if group != 8 and plan.cdiv(m, bm) <= 8:
        return "the raster's bands are no shorter than the matrix: all heights are the same"
    return None


def fits(bm: int, bn: int, stages: int) -> bool:
    """Whether the ring fits shared memory."""
    return plan.smem_reason(plan.persistent_bytes(bm, bn, BK, stages)) is None


def cost(case: Case, config: Config) -> float:
    """Estimated clocks. Multicast saves about 2 % (measured at 4096x2112x7168 and 4096x4096x4096), nothing
    where the pitch is odd and the first block of a cluster issues the whole shared tile; halves load fewer
    rows. A ring that could be deeper counts against a config."""
    bm, bn, stages = (int(config[x]) for x in ("bm", "bn", "stages"))
    cluster, halves = shape_of(str(config["cluster"])), bool(config.get("halves", False))
    saved = 0.98 if cluster != (1, 1) and not plan.odd_pitch(case["k"]) else 1.0
    deepest = max(SPACE["stages"]) if bm + bn <= 256 else 6
    shallow = 1.01 if stages < deepest and fits(bm, bn, min(x for x in (4, 5, 6, 8) if x > stages)) else 1.0
    rows = bm + bn - (0 if not halves else bn // 2 if cluster == (2, 1) else bm // 2)
    return plan.clocks(case, bm, bn, BK, cluster=cluster, rows=rows) * saved * shallow


def _ranked(case: Case, halves: bool) -> list[dict[str, Any]]:
    names = ("bm", "bn", "stages", "cluster")
    shapes = itertools.product(*(SPACE[x] for x in names))
    configs = ({**dict(zip(names, v, strict=True)), "halves": halves, "group": 8} for v in shapes)
    return plan.best_tiles(case, configs, valid, cost)


def default(case: Case) -> Config:
    """The tile with the fewest estimated clocks."""
    return _ranked(case, False)[0]


def seeds(case: Case) -> Sequence[Config]:
    """The best tile in halves and with the other clusters, between the next best tiles."""
    best, *others = _ranked(case, False)[:4]
    halved = _ranked(case, True)[:3]
    clusters = [{**best, "cluster": c} for c in SPACE["cluster"] if c != best["cluster"]]
    plain = {"bm": 128, "bn": 256, "stages": 4, "cluster": "2x1", "halves": False, "group": 8}
    found = [
        *halved[:1],
        *others[:1],
        *halved[1:2],
        clusters[0],
        plain,
        *others[1:2],
        *halved[2:],
        clusters[1],
    ]
    found += [*others[2:], {**best, "group": 16}]
    unique = [config for i, config in enumerate(found) if config not in (best, *found[:i])]
    return [config for config in unique if valid(case, config) is None]


KERNELS = (
    Kernel(
        id="tilelang/gemm_ws",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_plan.py",),
        summary="persistent, producer and consumers by hand, TMA stores beneath the next tile",
    ),
)
