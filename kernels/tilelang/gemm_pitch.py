"""``tilelang/gemm_pitch``: C = A·Bᵀ for rows an odd multiple of 16 bytes apart, bf16 or fp16, fp32 sum.

There, nearly every 128-byte row of a TMA box lies in two lines of L2, and lines are what limits. This is
``gemm_ws`` with what makes them fewer. ``stride``: a tile takes every eighth (or fourth) row of A, so that
all (or half) of its rows lie the same way in their lines, and begins so far before K = 0 that they begin with
one; TMA reads zeros there, in both operands. ``swapped``: rows of C are wgmma's N, so a tile has any multiple
of 16 of them, and few waves are filled. An operand shared in a cluster of two is always loaded in halves, one
by each block. C leaves through ``stmatrix``, transposed where operands are swapped, and TMA.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan
from dsl_bench.kernels.tilelang._pitch import BK, Classes, Shape, clocks
from tilelang import tvm
from tilelang.layout import Fragment, make_swizzled_layout

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

#: rows × columns of C
TILES = (
    *("256x128", "128x192", "192x176", "192x128", "256x176", "256x160", "128x256"),
    *("128x160", "128x176", "128x208", "128x224", "192x160", "256x192", "128x128"),
    *("144x256 swapped", "160x256 swapped", "176x256 swapped", "144x192 swapped", "160x192 swapped"),
    *("176x192 swapped", "144x128 swapped", "160x128 swapped", "176x128 swapped", "208x128 swapped"),
    *("224x128 swapped", "240x128 swapped", "288x128 swapped"),
)
SPACE: dict[str, Sequence[Any]] = {
    "tile": TILES,
    "cluster": ("2x1", "1x2", "1x1"),
    # every n-th row of A a tile
    "stride": (1, 8, 4),
    # staging buffers of C; the ring has what they leave
    "buffers": (1, 2),
    "group": (8, 16),
}
#: registers of a consumer thread after ``setmaxnreg``, by consumer warpgroups: 128 threads keep 24
REGISTERS = {1: 240, 2: 240, 3: 160}
#: valid refuses what the cost model thinks this many times as long as the best, and this many clocks longer
JUNK, JUNK_CLOCKS = 1.15, 8000
#: staging buffers must not share memory: TMA still reads one when the other is written
PASSES = {**plan.BY_HAND, "tl.disable_shared_memory_reuse": True}
#: the driver's numbers of the element types
KIND = {"float16": 6, "bfloat16": 9}


def cluster_of(text: str) -> tuple[int, int]:
    """(rows, columns) of tiles a cluster."""
    tall, wide = text.split("x")
    return int(tall), int(wide)


def by_class(tensor: Any, length: Any, rows: tuple[Any, Any, Any], dtype: str, box: tuple[int, int]) -> Any:
    """The tensor map of a row-major matrix with rows of ``length`` as (class, row, column). ``rows``:
    classes, the rows from one to the next of a class, and the rows of a class; ``box`` (rows, columns) lies
    in one class. 128-byte swizzle, L2 promotion to 128 bytes, zeros beyond the edges."""
    count, stride, height = rows
    wide, two = T.cast(length, "int64"), T.int64(2)
    sizes = (wide, T.cast(height, "int64"), T.cast(count, "int64"))
    strides = (two, wide * two * T.cast(stride, "int64"), wide * two)
    ones = (1, 1, 1)
    return T.create_tma_descriptor(
        KIND[dtype], 3, tensor.data, *sizes, *strides, box[1], box[0], 1, *ones, 0, 3, 2, 0
    )


def call(name: str, *args: Any) -> Any:
    """A call of one of TileLang's internal operations, which its language has no function for."""
    return T.call_intrin("handle", tvm.tirx.op.Op.get(name), *args)


def load(desc: Any, barrier: Any, at: Any, shared: bool, *xyz: Any) -> Any:
    """The load of a box at (column, row, class) ``xyz``, into both blocks of a cluster if ``shared``."""
    if shared:
        return call("tl.tma_load_multicast", desc, barrier, at, 3, *xyz, 0)
    return call("tl.tma_load", desc, barrier, at, *xyz, 0)


def lanes(shape: Shape) -> Any:
    """Which thread and which of its values holds an element of a chunk of C: as in wgmma's accumulator. Said
    here because TileLang, left alone, gives a chunk as many values as the whole tile; ``stmatrix`` is chosen
    where values follow each other as here."""
    strip, width = shape.upright // shape.groups, shape.width

    def thread(x: Any, y: Any) -> Any:
        p, q = (y, x) if shape.swap else (x, y)
        return p // strip * 128 + p // 16 % 4 * 32 + p % 8 * 4 + q % 8 // 2

    def value(x: Any, y: Any) -> Any:
        p, q = (y, x) if shape.swap else (x, y)
        return p // 64 % (strip // 64) * (width // 2) + q // 8 * 4 + p // 8 % 2 * 2 + q % 2

    chunk = (width, shape.bn) if shape.swap else (shape.bm, width)
    return Fragment(chunk, forward_thread_fn=thread, forward_index_fn=value)


def build(tile: str, cluster: str, buffers: int, dtype: str) -> Any:
    """The prim_func (a [m, k], b [n, k], c [m, n], blocks, rows of cluster tiles a band of the raster, then
    ``Classes.arguments``).

    As in gemm_ws, roles stand in the two arms of one ``if``. One warp produces: its elected lane announces
    the bytes of both tiles at ``full``, issues, and is the only one to arrive. ``empty`` counts one arrival a
    consumer warp, of both blocks in a cluster, since each block's multicast writes the other's ring."""
    m, n, k = T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    shape, (tall, wide) = Shape.of(tile), cluster_of(cluster)
    bm, bn, swap, width = shape.bm, shape.bn, shape.swap, shape.width
    size, math, stages = tall * wide, 128 * shape.groups, shape.stages(buffers)
    registers, pair = REGISTERS[shape.groups], size == 2
    # a block's share of each operand; a box has at most 256 rows
    share_a, share_b = bm // wide, bn // tall
    boxes_a = plan.cdiv(share_a, 256)
    box_a = share_a // boxes_a
    chunk = (width, bn) if swap else (bm, width)
    panels = bn // 64 if swap else 1
    box_c = (width, 64) if swap else (bm, 64)

    @T.prim_func
    def gemm(
        a: T.Tensor((m, k), dtype),
        b: T.Tensor((n, k), dtype),
        c: T.Tensor((m, n), dtype),
        blocks: T.int32,
        band: T.int32,
        rows: T.int32,
        stride: T.int32,
        height: T.int32,
        tail: T.int32,
        longer: T.int32,
        shorter: T.int32,
        last: T.int32,
        steps: T.int32,
    ):
        with T.Kernel(blocks, threads=128 + math, cluster_dims=(size, 1, 1)) as block:
            a_ring = T.alloc_shared((stages, bm, BK), dtype)
            b_ring = T.alloc_shared((stages, bn, BK), dtype)
            staged = [T.alloc_shared(chunk, dtype) for _ in range(buffers)]
            acc = T.alloc_fragment((shape.upright, shape.across), "float32")
            part = T.alloc_fragment(chunk, dtype)
            T.annotate_layout({x: make_swizzled_layout(x) for x in (a_ring, b_ring, *staged)})
            full = T.alloc_barrier([1] * stages)
            if pair:
                empty = T.alloc_cluster_barrier([4 * shape.groups * size] * stages)
            else:
                empty = T.alloc_barrier([4 * shape.groups] * stages)
            slot = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            held = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32")
            cols, rank = T.alloc_var("int32"), T.alloc_var("int32")
            index, inside, high = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            at, of, cls = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row, col, begin = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            cols = T.ceildiv(T.ceildiv(n, bn), wide)
            rank = block % size
            tile = block // size
            if thread < 128:
                T.set_max_nreg(24, 0)
                if thread < 32:
                    while tile < rows * cols:
                        index = T.truncdiv(tile, band * cols)
                        inside = tile - index * band * cols
                        high = T.min(rows - index * band, band)
                        col = T.truncdiv(inside, high)
                        at = index * band + inside - col * high
                        of = at - tail * longer
                        cls = T.if_then_else(of < 0, T.truncdiv(at, longer), tail + T.truncdiv(of, shorter))
                        row = T.if_then_else(of < 0, at - cls * longer, of - (cls - tail) * shorter)
                        begin = 0 - T.truncmod(cls * k, BK)
                        at = T.if_then_else(of < 0, longer - 1 - row, 1)  # 0: reached a class further on
                        row = T.if_then_else(at == 0, last, row * bm * tall) + rank * (tall - 1) * bm
                        cls = T.if_then_else(at == 0, cls + stride, cls)
                        col = (col * wide + rank * (wide - 1)) * bn
                        for step in T.serial(steps):
                            T.barrier_wait(empty[slot], phase ^ 1)
                            if T.shuffle_elect(32):
                                T.mbarrier_expect_tx(full[slot], (bm + bn) * BK * 2)
                                for box in T.unroll(boxes_a):
                                    T.evaluate(
                                        load(
                                            by_class(
                                                a, k, (stride + tail, stride, height), dtype, (box_a, BK)
                                            ),
                                            full[slot],
                                            T.access_ptr(
                                                a_ring[slot, rank * (wide - 1) * share_a + box * box_a, 0],
                                                "w",
                                                box_a,
                                                BK,
                                            ),
                                            wide == 2,
                                            begin + step * BK,
                                            row + rank * (wide - 1) * share_a + box * box_a,
                                            cls,
                                        )
                                    )
                                T.evaluate(
                                    load(
                                        by_class(b, k, (1, 1, n), dtype, (share_b, BK)),
                                        full[slot],
                                        T.access_ptr(
                                            b_ring[slot, rank * (tall - 1) * share_b, 0], "w", share_b, BK
                                        ),
                                        tall == 2,
                                        begin + step * BK,
                                        col + rank * (tall - 1) * share_b,
                                        0,
                                    )
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
                    at = index * band + inside - col * high
                    of = at - tail * longer
                    cls = T.if_then_else(of < 0, T.truncdiv(at, longer), tail + T.truncdiv(of, shorter))
                    row = T.if_then_else(of < 0, at - cls * longer, of - (cls - tail) * shorter)
                    at = T.if_then_else(of < 0, longer - 1 - row, 1)
                    row = T.if_then_else(at == 0, last, row * bm * tall) + rank * (tall - 1) * bm
                    cls = T.if_then_else(at == 0, cls + stride, cls)
                    col = (col * wide + rank * (wide - 1)) * bn
                    for step in T.serial(steps):
                        T.barrier_wait(full[slot], phase)
                        T.wgmma_gemm(
                            b_ring[slot, :, :] if swap else a_ring[slot, :, :],
                            a_ring[slot, :, :] if swap else b_ring[slot, :, :],
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
                    T.warpgroup_fence_operand(acc, num_regs=shape.sums)
                    if T.shuffle_elect(32):
                        T.barrier_arrive(empty[held])
                        if pair:
                            T.mbarrier_arrive(empty[held], rank ^ 1)
                    for turn, start in enumerate(shape.starts):
                        if swap:
                            for x, y in T.Parallel(*chunk, loop_layout=lanes(shape)):
                                part[x, y] = acc[y, start + x]
                        else:
                            for x, y in T.Parallel(*chunk, loop_layout=lanes(shape)):
                                part[x, y] = acc[x, start + y]
                        # the buffer's last store has read it; a tile's first may follow its own buffer
                        T.tma_store_wait(buffers - 1 if turn else 0)
                        T.sync_threads(1, math)
                        T.copy(part, staged[turn % buffers])
                        T.fence_proxy_async()
                        T.sync_threads(1, math)
                        if thread == 128:
                            for panel in T.unroll(panels):
                                T.evaluate(
                                    call(
                                        "tl.tma_store",
                                        by_class(c, n, (stride + tail, stride, height), dtype, box_c),
                                        T.access_ptr(staged[turn % buffers][0, panel * 64], "r", *box_c),
                                        col + panel * 64 + (0 if swap else start),
                                        row + (start if swap else 0),
                                        cls,
                                        0,
                                        0,
                                    )
                                )
                            T.tma_store_arrive()
                    tile = tile + T.truncdiv(blocks, size)
                T.tma_store_wait(0)
            if pair:
                T.cluster_sync()  # a block that leaves takes its barriers along

    return gemm


def static(case: Case, config: Config) -> Static:
    """Tile, cluster, buffers and element type; sizes, stride, grid and raster stay runtime values."""
    baked = {name: config[name] for name in ("tile", "cluster", "buffers")}
    return {**baked, "dtype": plan.ELEMENT[case.dtype]}


def source(static: Static, arch: str) -> TilelangSource:
    """The prim_func for one specialisation."""
    return TilelangSource(build, dict(static), PASSES)


def arguments(case: Case, config: Config, sms: int) -> tuple[int, ...]:
    """What follows the tensors: blocks (whole clusters, as many as there are SMs or tiles), rows of cluster
    tiles in a band, and the classes of rows."""
    shape, (tall, wide) = Shape.of(str(config["tile"])), cluster_of(str(config["cluster"]))
    rows = Classes.of(case["m"], case["k"], shape.bm * tall, int(config["stride"]))
    tiles = rows.tiles * plan.cdiv(plan.cdiv(case["n"], shape.bn), wide)
    blocks = min(sms // (tall * wide), tiles) * tall * wide
    return (blocks, max(1, int(config["group"]) // tall), *rows.arguments())


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The launch; TileLang's host code makes the tensor maps from its integers."""
    numbers = arguments(case, config, module.sms)
    return Call(module.launcher(inputs["a"], inputs["b"], outputs["c"], *numbers))


def _sizes(case: Case) -> tuple[int, int, int]:
    return case["m"], case["n"], case["k"]


def valid(case: Case, config: Config) -> str | None:
    """Rows that need this kernel; rules of TMA, registers and shared memory; then what is never worth a
    trial."""
    sizes = _sizes(case)
    if reason := _refused(sizes) or _reason(sizes, config):
        return reason
    if config["group"] != 8 and case["m"] <= 8 * Shape.of(str(config["tile"])).bm:
        return "the raster's bands are no shorter than the matrix: all heights are the same"
    estimate, best = _clocks(sizes, config), _clocks(sizes, _ranked(sizes)[0])
    if estimate < max(JUNK * best, best + JUNK_CLOCKS):
        return None
    return f"{estimate / best:.1f} times the estimated time of the best"


def _refused(sizes: tuple[int, int, int]) -> str | None:
    """Why this kernel is not for a case, or None."""
    m, n, k = sizes
    if m <= 128:
        return f"M={m}: gemm_skinny and gemm_ws read B as fast as it comes"
    if reason := plan.tma_reason(k, n) or plan.size_reason(m * k, n * k, m * n):
        return reason
    if not plan.odd_pitch(k):
        return "rows start on 128 bytes: nothing that gemm_ws lacks"
    return None


def _reason(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> str | None:
    """Why a config cannot be had for these sizes, whatever its time, or None."""
    m, n, _ = sizes
    shape, (tall, wide), stride = (
        Shape.of(config["tile"]),
        cluster_of(config["cluster"]),
        int(config["stride"]),
    )
    if reason := shape.reason((tall, wide), int(config["buffers"])):
        return reason
    if m < 64 * stride and stride > 1:
        return f"classes of every {stride}th row hold fewer than 64 rows"
    if m <= stride * shape.bm * (tall - 1) or n <= shape.bn * (wide - 1):
        return "a cluster shares between two tiles, and there is one"
    return None


def _clocks(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> float:
    shape, cluster = Shape.of(config["tile"]), cluster_of(config["cluster"])
    return clocks(sizes, shape, cluster, int(config["stride"]), int(config["buffers"]))


def _launches(sizes: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    for tile in SPACE["tile"]:
        for cluster in SPACE["cluster"]:
            for stride in SPACE["stride"]:
                for buffers in SPACE["buffers"]:
                    names = {"tile": tile, "cluster": cluster, "stride": stride, "buffers": buffers}
                    if _reason(sizes, names) is None:
                        yield {**names, "group": 8}


@lru_cache(maxsize=256)
def _ranked(sizes: tuple[int, int, int]) -> tuple[dict[str, Any], ...]:
    """All that can be launched, the cheapest first."""
    return tuple(sorted(_launches(sizes), key=lambda c: _clocks(sizes, c)))


def cost(case: Case, config: Config) -> float:
    """Estimated µs, at the clock of a loaded GPU."""
    return _clocks(_sizes(case), config) / 1600


def _guesses(case: Case) -> list[dict[str, Any]]:
    """The cheapest of each kind, kinds taking turns: swapped or not, and every row or some."""
    sizes = _sizes(case)
    if _refused(sizes):
        return []
    usable = [c for c in _ranked(sizes) if valid(case, c) is None]
    kinds: dict[tuple[bool, bool], dict[str, dict[str, Any]]] = {}
    for config in usable:
        kind = (str(config["tile"]).endswith("swapped"), config["stride"] > 1)
        kinds.setdefault(kind, {}).setdefault(config["tile"], config)
    turns = sorted(kinds.values(), key=lambda tiles: _clocks(sizes, next(iter(tiles.values()))))
    lists = [list(tiles.values()) for tiles in turns]
    return [found[i] for i in range(3) for found in lists if i < len(found)]


def default(case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    usual = {"tile": "256x128", "cluster": "2x1", "stride": 1, "buffers": 1, "group": 8}
    return next(iter(_guesses(case)), usual)


def seeds(case: Case) -> Sequence[Config]:
    """Further choices of the cost model, and the first with other strides, buffers, clusters and raster."""
    found = _guesses(case)
    changes: tuple[dict[str, Any], ...] = (
        *({"stride": s} for s in SPACE["stride"]),
        *({"buffers": b} for b in SPACE["buffers"]),
        *({"cluster": c} for c in SPACE["cluster"]),
        {"group": 16},
    )
    others = [{**g, **change} for g in found[:1] for change in changes]
    kept = [c for i, c in enumerate(others) if c not in (*found, *others[:i]) and valid(case, c) is None]
    return [*found[1:], *kept]


KERNELS = (
    Kernel(
        id="tilelang/gemm_pitch",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_pitch.py", "_plan.py"),
        summary="rows off 128 bytes: every eighth row a tile, swapped operands, C through stmatrix",
        cost=cost,
    ),
)
