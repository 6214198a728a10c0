"""``tilelang/gemm_turns``: C = A·Bᵀ in whole tiles of 128 rows by 112 to 192 columns, two warpgroups in turn.

The trick: each of two consumer warpgroups has a tile of its own, so that the epilogue of one runs beneath the
main loop of the other, and tiles may be narrow: of all widths the one is taken by which the busiest block
multiplies the fewest columns. A third warpgroup fills a ring of k-blocks by TMA. bf16 or fp16, fp32 sums, no
cut of K; shapes are symbolic: one binary serves every size. ``T.wgmma_gemm`` cuts a tile of 8 modulo 16
columns into products of eight; here ``wgmma`` and ``stmatrix`` are issued one by one on plain registers, so
that any multiple of 8 is one product, and a warp stores its 16 rows without waiting for another.
What limits it: the tensor cores under load; at the highest clocks the way from L2: narrow tiles read more.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan
from tilelang import tvm

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

BM, BK = 128, 64
#: rows of C that a warp stores at a time, and the most columns: 128-byte rows in the 128-byte swizzle
ROWS, WIDTH = 16, 64
SPACE: dict[str, Sequence[Any]] = {
    "columns": tuple(range(112, 200, 8)),
    # blocks one above the other, which share rows of B
    "cluster": ("1x1", "2x1"),
    # rows of tiles that are walked together
    "group": (16, 8, 32, 12),
}
#: columns' worth of work that a turn costs
TURN = 4
#: valid refuses widths by which the busiest block has this many times the columns of the best
JUNK = 1.15
#: barriers are placed by hand, and TMA still reads a staging buffer when the other is written
PASSES = {
    **plan.BY_HAND,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_thread_storage_sync": True,
}
#: the driver's numbers of the element types, and wgmma's names
KIND = {"float16": 6, "bfloat16": 9}
WGMMA = {"float16": "fp16", "bfloat16": "bf16"}


def ring(columns: int) -> tuple[int, int, int]:
    """Stages, staging buffers of 64 rows a warpgroup, bytes of both: the deepest ring that leaves each one.
    A KiB goes to the barriers, as what follows them begins on a swizzle atom."""
    stage, pair = (BM + columns) * BK * 2, 2 * 64 * WIDTH * 2
    limit = plan.SMEM_LIMIT - 1024
    stages = (limit - pair) // stage
    buffers = min(2, (limit - stages * stage) // pair)
    return stages, buffers, stages * stage + buffers * pair


def call(name: str, *args: Any, kind: str = "handle") -> Any:
    """A call of one of TileLang's internal operations, which its language has no function for."""
    return T.call_intrin(kind, tvm.tirx.op.Op.get(name), *args)


def matrix_map(tensor: Any, rows: Any, length: Any, dtype: str, box: tuple[int, int]) -> Any:
    """The tensor map of a row-major matrix for boxes of (rows, columns): 128-byte swizzle, L2 promotion to
    128 bytes, zeros beyond the edges."""
    wide, two = T.cast(length, "int64"), T.int64(2)
    sizes = (wide, T.cast(rows, "int64"), two, wide * two)
    return T.create_tma_descriptor(KIND[dtype], 2, tensor.data, *sizes, box[1], box[0], 1, 1, 0, 3, 2, 0)


def load(desc: Any, barrier: Any, at: Any, shared: bool, x: Any, y: Any) -> Any:
    """The load of a box at column x and row y, into both blocks of a cluster if ``shared``."""
    if shared:
        return call("tl.tma_load_multicast", desc, barrier, at, 3, x, y, 0)
    return call("tl.tma_load", desc, barrier, at, x, y, 0)


def product(acc: Any, half: int, bases: tuple[Any, Any], at: tuple[Any, Any], keep: Any, dtype: str) -> Any:
    """64 rows by all columns by 16 of K: ``wgmma`` on sums ``half``. ``at``: bytes from the descriptors."""
    columns, kind = int(acc.shape[0]), WGMMA[dtype]
    name = f"m64n{columns}k16"
    operands = (bases[0].data, at[0] >> 4, bases[1].data, at[1] >> 4)
    sums = (acc.data, half * (columns // 2))
    return T.ptx_wgmma_ss("float32", name, True, True, kind, kind, "fp32", *operands, *sums, keep, 1, 1)


def stmatrix(at: Any, part: Any, count: int) -> Any:
    """Stores ``count`` 8x8 matrices: a lane's pairs of ``part``, rows where the lanes' ``at`` say."""
    pairs = [call("tl.pack_b16", part[2 * i], part[2 * i + 1], kind="uint32") for i in range(count)]
    return call("tl.ptx_stmatrix", 0, count, at, *pairs)


def squares(width: int) -> list[tuple[int, int]]:
    """(first column, 8x8 matrices) of each ``stmatrix`` of 16 rows by ``width`` columns."""
    return [(y, min(16, width - y) // 4) for y in range(0, width, 16)]


def build(columns: int, cluster: int, dtype: str) -> Any:
    """The prim_func (a [m, k], b [n, k], c [m, n], blocks, rows of cluster tiles a band of the raster).

    Roles stand in the two arms of one ``if``: between two separate regions TileLang would put a barrier for
    the whole block. One warp produces: its elected lane announces the bytes of both tiles at ``full`` and
    issues. ``empty`` counts one arrival a warp of the warpgroup that reads, of both blocks in a cluster,
    since each block's multicast writes the other's ring. A block's tiles go to the warpgroups by turns.
    ``turn``: the other has seen its last k-block full, so the ring may be looked at from there on; a parity
    only tells odd from even."""
    m, n, k = T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    stages, buffers, _ = ring(columns)
    share, pair = columns // cluster, cluster == 2
    a_bytes, b_bytes = BM * BK * 2, columns * BK * 2
    chunks = [(half, x) for half in range(2) for x in range(0, columns, WIDTH)]
    products = [(i, half) for i in range(4) for half in range(2)]

    @T.prim_func
    def gemm(
        a: T.Tensor((m, k), dtype),
        b: T.Tensor((n, k), dtype),
        c: T.Tensor((m, n), dtype),
        blocks: T.int32,
        band: T.int32,
    ):
        with T.Kernel(blocks, threads=384, cluster_dims=(cluster, 1, 1)) as block:
            a_ring = T.alloc_shared((stages, BM, BK), dtype)
            b_ring = T.alloc_shared((stages, columns, BK), dtype)
            staged = T.alloc_shared((2, buffers, 4, ROWS, WIDTH), dtype)
            acc = T.alloc_local((columns,), "float32")
            part = T.alloc_local((8,), dtype)
            a_base, b_base = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
            full = T.alloc_barrier([1] * stages)
            if pair:
                empty = T.alloc_cluster_barrier([4 * cluster] * stages)
            else:
                empty = T.alloc_barrier([4] * stages)
            turn = T.alloc_barrier([4, 4])
            slot, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
            held, flip = T.alloc_var("int32", init=0), T.alloc_var("int32")
            tile, owner = T.alloc_var("int32"), T.alloc_var("int32")
            rows, cols, steps = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, col, rank = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            index, inside, high = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            warp, lane, at = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            rows = T.ceildiv(T.ceildiv(m, BM), cluster)
            cols = T.ceildiv(n, columns)
            steps = T.ceildiv(k, BK)
            rank = block % cluster
            tile = block // cluster
            if thread < 128:
                T.set_max_nreg(24, 0)
                if thread < 32:
                    while tile < rows * cols:
                        index = T.truncdiv(tile, band * cols)
                        inside = tile - index * band * cols
                        high = T.min(rows - index * band, band)
                        col = T.truncdiv(inside, high)
                        row = ((index * band + inside - col * high) * cluster + rank) * BM
                        col = col * columns + rank * share
                        for step in T.serial(steps):
                            T.barrier_wait(empty[slot], phase ^ 1)
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive_expect_tx(full[slot], a_bytes + b_bytes)
                                T.evaluate(
                                    load(
                                        matrix_map(a, m, k, dtype, (BM, BK)),
                                        full[slot],
                                        T.access_ptr(a_ring[slot, 0, 0], "w", BM, BK),
                                        False,
                                        step * BK,
                                        row,
                                    )
                                )
                                T.evaluate(
                                    load(
                                        matrix_map(b, n, k, dtype, (share, BK)),
                                        full[slot],
                                        T.access_ptr(b_ring[slot, rank * share, 0], "w", share, BK),
                                        pair,
                                        step * BK,
                                        col,
                                    )
                                )
                            slot = slot + 1
                            if slot == stages:
                                slot = 0
                                phase = phase ^ 1
                        tile = tile + T.truncdiv(blocks, cluster)
            else:
                T.set_max_nreg(240, 1)
                owner = T.shfl_sync(thread // 128 - 1, 0)
                warp = thread // 32 % 4
                lane = thread % 32
                T.initialize_wgmma_descriptor(a_base, T.access_ptr(a_ring[0, 0, 0], "r", BM, BK), 1, 1, 64)
                T.initialize_wgmma_descriptor(
                    b_base, T.access_ptr(b_ring[0, 0, 0], "r", columns, BK), 1, 1, 64
                )
                flip = owner ^ 1  # the first turn has not to be waited for
                if owner == 1:
                    tile = tile + T.truncdiv(blocks, cluster)
                    phase = T.truncdiv(steps, stages) & 1
                    slot = T.truncmod(steps, stages)
                while tile < rows * cols:
                    index = T.truncdiv(tile, band * cols)
                    inside = tile - index * band * cols
                    high = T.min(rows - index * band, band)
                    col = T.truncdiv(inside, high)
                    row = ((index * band + inside - col * high) * cluster + rank) * BM + warp * ROWS
                    col = col * columns
                    T.barrier_wait(turn[owner], flip)
                    flip = flip ^ 1
                    for step in T.serial(steps):
                        T.barrier_wait(full[slot], phase)
                        T.warpgroup_fence_operand(acc, num_regs=columns)
                        T.warpgroup_arrive()
                        for i, half in products:
                            T.evaluate(
                                product(
                                    acc,
                                    half,
                                    (a_base, b_base),
                                    (slot * a_bytes + half * 8192 + i * 32, slot * b_bytes + i * 32),
                                    step + i > 0,
                                    dtype,
                                )
                            )
                        T.warpgroup_commit_batch()
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
                    if T.shuffle_elect(32):
                        T.barrier_arrive(turn[owner ^ 1])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=columns)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(empty[held])
                        if pair:
                            T.mbarrier_arrive(empty[held], rank ^ 1)
                    for number, (half, x) in enumerate(chunks):
                        buffer = number % buffers
                        width = min(WIDTH, columns - x)
                        T.tma_store_wait(buffers - 1)  # the buffer's last store has read it
                        T.sync_warp()
                        for y, count in squares(width):
                            for i in T.unroll(count):
                                for j in T.vectorized(2):
                                    part[2 * i + j] = T.cast(
                                        acc[half * (columns // 2) + (x + y) // 2 + 2 * i + j], dtype
                                    )
                            at = (y + lane // 16 * 8) ^ (lane % 8 * 8)
                            T.evaluate(
                                stmatrix(
                                    T.access_ptr(staged[owner, buffer, warp, lane % 16, at], "w", 8),
                                    part,
                                    count,
                                )
                            )
                        T.fence_proxy_async()
                        T.sync_warp()
                        if T.shuffle_elect(32):
                            T.evaluate(
                                call(
                                    "tl.tma_store",
                                    matrix_map(c, m, n, dtype, (ROWS, width)),
                                    T.access_ptr(staged[owner, buffer, warp, 0, 0], "r", ROWS, WIDTH),
                                    col + x,
                                    row + half * 64,
                                    0,
                                    0,
                                )
                            )
                            T.tma_store_arrive()
                    tile = tile + 2 * T.truncdiv(blocks, cluster)
                    at = slot + steps  # the other's k-blocks
                    phase = phase ^ (T.truncdiv(at, stages) & 1)
                    slot = T.truncmod(at, stages)
                T.tma_store_wait(0)
            if pair:
                T.cluster_sync()  # a block that leaves takes its barriers along

    return gemm


def blocks_of(cluster: str) -> int:
    """Blocks of a cluster, one above the other."""
    return int(cluster.partition("x")[0])


def tiles_of(case: Case, columns: int, cluster: int = 1) -> int:
    """Cluster tiles of a product."""
    return plan.cdiv(case["m"], BM * cluster) * plan.cdiv(case["n"], columns)


def load_of(sizes: tuple[int, int], columns: int) -> int:
    """Columns that the busiest of 132 blocks multiplies for ``sizes`` (m, n), and what its turns cost."""
    m, n = sizes
    return plan.cdiv(plan.cdiv(m, BM) * plan.cdiv(n, columns), plan.SMS) * (columns + TURN)


@lru_cache(maxsize=1024)
def widths(sizes: tuple[int, int]) -> tuple[int, ...]:
    """Widths, the best first."""
    return tuple(sorted(SPACE["columns"], key=lambda n: load_of(sizes, n)))


def static(case: Case, config: Config) -> Static:
    """Width, cluster and element type; sizes, grid and raster stay runtime values."""
    return {
        "columns": int(config["columns"]),
        "cluster": blocks_of(config["cluster"]),
        "dtype": plan.ELEMENT[case.dtype],
    }


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build, dict(static), PASSES)


def arguments(case: Case, config: Config, sms: int) -> tuple[int, int]:
    """Blocks (whole clusters, as many as SMs or tiles), and rows of clusters in a band of the raster."""
    cluster = blocks_of(config["cluster"])
    blocks = min(sms // cluster, tiles_of(case, int(config["columns"]), cluster)) * cluster
    return blocks, max(1, int(config["group"]) // cluster)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The launch; TileLang's host code makes the tensor maps from its integers."""
    numbers = arguments(case, config, module.sms)
    return Call(module.launcher(inputs["a"], inputs["b"], outputs["c"], *numbers))


def valid(case: Case, config: Config) -> str | None:
    """Rules of TMA and of turns; then what is never worth a trial."""
    m, n, k = case["m"], case["n"], case["k"]
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if m <= BM:
        return f"M={m} is one row of tiles: gemm_skinny and gemm_ws are for that"
    columns, cluster, group = int(config["columns"]), blocks_of(config["cluster"]), int(config["group"])
    if tiles_of(case, columns, cluster) <= plan.SMS // cluster:
        return "no block has two tiles: there are no turns to take"
    if group != 16 and min(group, 16) >= plan.cdiv(m, BM):
        return "the raster's bands are no shorter than the matrix: all heights are the same"
    load, least = (load_of((m, n), x) for x in (columns, widths((m, n))[0]))
    if load > JUNK * least:
        return f"{load / least:.2f} times the columns of the best width"
    return None


def default(case: Case) -> Config:
    """The width that leaves the busiest block the fewest columns."""
    return {"columns": widths((case["m"], case["n"]))[0], "cluster": "1x1", "group": 16}


def seeds(case: Case) -> Sequence[Config]:
    """The default in clusters and with other rasters, and the next widths."""
    first = dict(default(case))
    changes: tuple[dict[str, Any], ...] = (
        *({"columns": n} for n in widths((case["m"], case["n"]))[1:3]),
        {"group": 32},
        {"cluster": "2x1"},
        {"group": 8},
    )
    return [c for c in ({**first, **change} for change in changes) if valid(case, c) is None]


KERNELS = (
    Kernel(
        id="tilelang/gemm_turns",
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
        summary="whole tiles of 128 rows, ping-pong: two warpgroups take turns on the tensor cores",
    ),
)
