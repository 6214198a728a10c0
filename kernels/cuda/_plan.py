"""The host's arithmetic behind the CUDA GEMMs: tiles, shared memory, the cut of K, a cost model. No GPU."""

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsl_bench.plugin import Case

#: shared memory a block may use on sm_90, bytes
SMEM_LIMIT = 232448
#: SMs of an H200: the cost model ranks with it, the grids use the device's own number
SMS = 132
#: elements of K in a k-block: one 128-byte row of the swizzle
BK = 64
#: bytes of one store buffer: 64 rows of 64 elements
STORE_BYTES = 64 * 64 * 2
#: ring.cuh's barriers and flags, bytes: of at most 14 stages and three warpgroups
BARRIER_BYTES = 256
INT32_MAX = 2**31 - 1
#: device memory that partial sums may take, bytes
WORKSPACE_LIMIT = 512 << 20


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Tile:
    """A tile of gemm.cu: ``bm`` x ``bn`` of C, and the warpgroups that multiply.

    ``coop``: all consumers share a tile, 64·mi rows each. ``pingpong``: each of two has its own."""

    bm: int
    bn: int
    schedule: str

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        if self.schedule == "pingpong":
            return 2
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.bm]

    @property
    def mi(self) -> int:
        """64-row halves (or thirds) that one warpgroup holds of a tile."""
        return self.bm // 64 // (1 if self.schedule == "pingpong" else self.consumers)

    @property
    def accumulators(self) -> int:
        """fp32 sums a thread holds."""
        return self.mi * self.bn // 2

    @property
    def stage_bytes(self) -> int:
        """One k-block of both operands."""
        return (self.bm + self.bn) * BK * 2

    def fits_registers(self) -> bool:
        """Whether the sums leave room in what setmaxnreg gives: 240 of two warpgroups, 160 of three."""
        return self.accumulators <= (96 if self.consumers == 3 else 192 if self.mi > 1 else 128)

    def max_stages(self) -> int:
        """The deepest ring that leaves one store buffer a warpgroup."""
        return (SMEM_LIMIT - BARRIER_BYTES - self.consumers * STORE_BYTES) // self.stage_bytes

    def store_buffers(self, stages: int) -> int:
        """Store buffers a warpgroup that fit beside ``stages``, at most one for every 64 x 64 of its rows."""
        left = SMEM_LIMIT - BARRIER_BYTES - stages * self.stage_bytes
        return min(self.mi * cdiv(self.bn, 64), left // (self.consumers * STORE_BYTES))

    def smem(self, stages: int) -> int:
        """Dynamic shared memory in ring.cuh's layout, bytes: ring, store buffers, barriers and flags."""
        stores = self.consumers * self.store_buffers(stages) * STORE_BYTES
        return stages * self.stage_bytes + stores + BARRIER_BYTES


def store_widths(bn: int) -> tuple[int, ...]:
    """Columns of the boxes in which a tile is stored: 64, and what that does not divide of ``bn``."""
    return (64, bn % 64) if bn % 64 else (64,)


@dataclass(frozen=True)
class Work:
    """What a launch has to do, as tiles.cuh's WorkArgs: ``tiles_m`` x ``tiles_n`` cluster tiles, done by
    ``clusters`` clusters, the first ``sk_tiles`` of them cut along K into ``sk_units``."""

    m: int
    n: int
    k_blocks: int
    tiles_m: int
    tiles_n: int
    group: int
    clusters: int
    sk_tiles: int = 0
    sk_units: int = 0
    unit_count: int = 1
    unit_span: int = 1

    @cached_property
    def tiles(self) -> int:
        """Cluster tiles."""
        return self.tiles_m * self.tiles_n

    @property
    def launched(self) -> int:
        """Clusters that have something to do."""
        return max(1, min(self.clusters, max(self.sk_units, self.tiles - self.sk_tiles)))

    def pack(self, workspace: int, counters: int) -> bytes:
        """The kernel parameter; the arguments are device addresses."""
        base, extra = divmod(self.unit_span, self.unit_count)
        ints = (self.m, self.n, self.k_blocks, self.tiles_m, self.tiles_n, self.group)
        cut = (self.sk_tiles, self.sk_units, self.unit_count, self.unit_span, base, extra)
        return struct.pack("<12i2Q", *ints, *cut, workspace, counters)


def cut(work: Work, splits: int) -> Work:
    """``work`` with its K cut: 1 not at all, S > 1 every tile into S parts, 0 stream-K.

    Stream-K leaves whole waves alone and spreads the rest evenly over all clusters; where the rest is less
    than half a wave it takes a whole one with it, so that a tile has few parts to add up."""
    tiles, clusters, blocks = work.tiles, work.clusters, work.k_blocks
    if splits > 1:
        return _with(work, tiles, tiles * splits, splits, blocks)
    ragged = tiles % clusters
    if splits == 1 or ragged == 0:
        return work
    if tiles > clusters and 2 * ragged < clusters:
        ragged += clusters
    units = max(1, min(clusters, ragged * blocks // 4))
    return _with(work, ragged, units, units, ragged * blocks)


def _with(work: Work, tiles: int, units: int, count: int, span: int) -> Work:
    fields = (work.m, work.n, work.k_blocks, work.tiles_m, work.tiles_n, work.group, work.clusters)
    return Work(*fields, tiles, units, count, span)


def cut_reason(work: Work, splits: int, tile_bytes: int) -> str | None:
    """Why K should not be cut like that; ``tile_bytes`` is the size of a cluster tile's fp32 sums."""
    if work.tiles * work.k_blocks > INT32_MAX:
        return "more k-blocks in all tiles than an int counts"
    if splits == 1:
        return None
    if splits == 0 and work.tiles % work.clusters == 0:
        return "no ragged last wave for stream-K to spread"
    if splits > 1 and work.k_blocks < 4 * splits:
        return f"{work.k_blocks} k-blocks are too few for {splits} parts"
    if splits > 1 and work.tiles * splits > 4 * work.clusters:
        return "tiles enough without cutting K"
    need = 2 * cut(work, splits).sk_units * tile_bytes
    if need > WORKSPACE_LIMIT:
        return f"partial sums would take {need >> 20} MiB"
    return None


def tma_reason(**rows: int) -> str | None:
    """Why a matrix of 2-byte elements with these row lengths has no tensor map, if so."""
    for name, length in rows.items():
        if length % 8:
            return f"rows of {name} = {length} elements do not start on 16 bytes: no tensor map"
    return None


def blocks_of(cluster: str) -> tuple[int, int]:
    """``"2x1"`` as (tiles along M, tiles along N)."""
    m, n = cluster.split("x")
    return int(m), int(n)


def gemm_work(case: Case, tile: Tile, cluster: str, group: int, splits: int, sms: int = SMS) -> Work:
    """The work of gemm.cu on ``case``. ``group`` counts rows of tiles."""
    cm, cn = blocks_of(cluster)
    work = Work(
        m=case["m"],
        n=case["n"],
        k_blocks=cdiv(case["k"], BK),
        tiles_m=cdiv(cdiv(case["m"], tile.bm), cm),
        tiles_n=cdiv(cdiv(case["n"], tile.bn), cn),
        group=max(1, group // cm),
        clusters=sms // (cm * cn),
    )
    return cut(work, splits)


def pieces(pitch: int) -> float:
    """Lines of 128 bytes that 128 bytes of a row touch on average, rows ``pitch`` bytes apart: 1 to 2."""
    return 2 - math.gcd(pitch, 128) / 128


def gemm_clocks(case: Case, tile: Tile, cluster: str, splits: int, pitch: int) -> float:
    """Estimated clocks of gemm.cu: the slowest of tensor cores, shared memory, L2 and TMA for a k-block,
    times the k-blocks of the busiest cluster, and what a tile's prologue, epilogue and fix-up add.

    Operands have rows ``pitch`` bytes apart. Rates a clock and SM: 4096 FLOP, 160 B of shared memory (128 in
    the manual; what wgmma reads twice is partly shared), 40 B from L2. Each line that a row of a box touches
    takes 1.9 clocks, a little less where a neighbour loads it (fitted to 4000x4104x4072). Clocks for the rest
    are guesses, but for the fix-up."""
    cm, cn = blocks_of(cluster)
    work = gemm_work(case, tile, cluster, 8, splits)
    tensor = tile.bm * tile.bn * BK * 2 / 4096
    reads = tile.bm // 64 * 4 * (64 + tile.bn) * 32
    shared = (reads + tile.stage_bytes) / 160
    l2 = (tile.bm / cn + tile.bn / cm) * BK * 2 / 40
    rows = 1.9 * pieces(pitch) * (0.8 * (tile.bm + tile.bn) + 0.2 * (tile.bm / cn + tile.bn / cm))
    slowest = max(tensor, shared, l2, rows)
    block = slowest + 0.1 * min(tensor, max(shared, l2, rows))
    exposed = 300.0 if tile.schedule == "pingpong" else 600.0 + 4.0 * tile.accumulators
    whole = cdiv(work.tiles - work.sk_tiles, work.clusters)
    total = whole * (work.k_blocks * block + exposed)
    if work.sk_units:
        share = cdiv(cdiv(work.sk_tiles * work.k_blocks, work.sk_units) * work.sk_units, work.clusters)
        total += share * block + exposed + 4000 + _passes(splits) * tile.bm * tile.bn * 4 / 16
    start = 5000 + (300 if cm * cn > 1 else 0)
    return start + total + (exposed if whole else 0)


def _passes(splits: int) -> float:
    """How often a block moves a tile of fp32 sums to add up parts. Stream-K: measured at three tiles, about
    two parts written and one tile's parts read; otherwise one written and all read, which
    takes less as not all blocks read."""
    return 4.3 if splits == 0 else 0.45 * (1.0 + splits)


def ranked(
    configs: Iterable[Mapping[str, Any]], cost: Callable[[Mapping[str, Any]], float]
) -> list[dict[str, Any]]:
    """The configs, cheapest first; equal ones keep their order."""
    return [dict(c) for c in sorted(configs, key=cost)]


def spread(configs: Iterable[Mapping[str, Any]], keys: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """The first ``count`` configs of which no two agree in all ``keys``: further guesses that differ."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for config in configs:
        seen.setdefault(tuple(config[k] for k in keys), dict(config))
        if len(seen) == count:
            break
    return list(seen.values())
