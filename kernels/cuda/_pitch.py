"""The host's arithmetic behind ``gemm_pitch``: shapes of tiles, classes of rows, a cost model. No GPU."""

import struct
from dataclasses import dataclass
from functools import cached_property

from dsl_bench.kernels.cuda._plan import SMS, Tile, Work, blocks_of, cdiv, cut, store_widths

#: clocks of an SM's TMA unit for a line of 128 bytes, as measured on an H200
LINE_CLOCKS = 1.9
#: lines that 128 bytes of a row touch on average, in tiles of every stride-th row
LINES = {1: 1.875, 4: 1.5, 8: 1.0}


@dataclass(frozen=True)
class Shape:
    """A tile of ``bm`` × ``bn`` of C. ``swapped``: rows of C are wgmma's N, columns its M."""

    bm: int
    bn: int
    schedule: str

    @classmethod
    def of(cls, text: str) -> "Shape":
        """``"288x128 swapped"`` as a Shape."""
        size, _, schedule = text.partition(" ")
        bm, bn = size.split("x")
        return cls(int(bm), int(bn), schedule)

    @property
    def swapped(self) -> bool:
        """Whether rows of C are wgmma's N."""
        return self.schedule == "swapped"

    @cached_property
    def engine(self) -> Tile:
        """The tile as the multipliers see it: rows on wgmma's M, columns on its N."""
        schedule = "pingpong" if self.schedule == "pingpong" else "coop"
        return Tile(self.bn, self.bm, schedule) if self.swapped else Tile(self.bm, self.bn, schedule)

    @property
    def products(self) -> int:
        """wgmmas side by side along N, of at most 256 columns each."""
        return 2 if self.engine.bn > 256 else 1

    def engine_cluster(self, cluster: str) -> tuple[int, int]:
        """The blocks of a cluster along wgmma's M and N."""
        cm, cn = blocks_of(cluster)
        return (cn, cm) if self.swapped else (cm, cn)

    def boxes(self, cluster: str) -> tuple[int, int]:
        """Rows of a load's box, of the operands on wgmma's M and N."""
        along_p, along_q = self.engine_cluster(cluster)
        share = self.engine.bn // along_p
        return self.engine.bm // along_q, share // (2 if share > 256 else 1)

    def store_boxes(self) -> list[tuple[int, int]]:
        """Rows and columns of C that a store takes; the second box takes columns that 64 does not divide."""
        q = self.engine.bn
        if self.swapped:
            return [(64 if q % 64 == 0 else 32 if q % 32 == 0 else 16, 64)]
        return [(16, width) for width in store_widths(q)]

    def reason(self, cluster: str, stages: int) -> str | None:
        """Why the tile does not suit registers, shared memory or the cluster, if so."""
        tile, (along_p, along_q) = self.engine, self.engine_cluster(cluster)
        if tile.bm // along_q % 8 or tile.bn % along_p or tile.bn // along_p % 8:
            return f"shares of a {self.bm}x{self.bn} tile are not whole swizzle atoms of 8 rows"
        if tile.accumulators > (96 if tile.consumers == 3 else 192):
            return f"{tile.accumulators} sums a thread do not fit its registers"
        most = tile.max_stages()
        if stages > most:
            return f"{stages} stages of {tile.stage_bytes} B do not fit in shared memory, {most} do"
        if stages < min(most, 8) - 1:
            return f"{stages} stages leave shared memory unused: {most} fit"
        return None


@dataclass(frozen=True)
class Classes:
    """Rows of A as tiles take them. Class c holds rows c, c + ``stride``, …, ``height`` of them or, the first
    ``tail`` classes, one more. Those have ``longer`` tiles, of which the last starts at row ``last`` of class
    c + ``stride``; the others have ``shorter``. ``tiles`` in all, each of ``steps`` of 64 elements of K."""

    k: int
    stride: int
    height: int
    tail: int
    longer: int
    shorter: int
    last: int
    tiles: int
    steps: int

    @classmethod
    def of(cls, m: int, k: int, rows: int, stride: int) -> "Classes":
        """For tiles (of a cluster) of ``rows`` rows over ``m`` rows of ``k`` elements."""
        height, tail = divmod(m, stride)
        shorter = cdiv(height, rows)
        longer = max(2, cdiv(height + 1, rows)) if tail else 1
        last = min((longer - 1) * rows, height) - 1
        # a tile begins up to this far before K = 0
        before = max(c * k % 64 for c in range(stride))
        tiles = tail * longer + (stride - tail) * shorter
        return cls(k, stride, height, tail, longer, shorter, last, tiles, cdiv(k + before, 64))

    @property
    def count(self) -> int:
        """Classes that a tensor map has: the longer ones are reached a second time, one row further on."""
        return self.stride + self.tail

    def pack(self) -> bytes:
        """The kernel parameter."""
        return struct.pack("<6i", self.k, self.stride, self.tail, self.longer, self.shorter, self.last)


def clusters_of(cluster: str, sms: int) -> int:
    """Clusters that fit on the device at once: of four, not as many as its SMs, since GPCs hold 16 or 18."""
    cm, cn = blocks_of(cluster)
    return (sms - 4 if cm * cn == 4 else sms) // (cm * cn)


def pitch_work(
    sizes: tuple[int, int, int],
    shape: Shape,
    cluster: str,
    group: int,
    splits: int,
    stride: int,
    sms: int = SMS,
) -> tuple[Work, Classes]:
    """The work of gemm_pitch.cu, and how its tiles take rows. ``group`` counts rows of tiles."""
    (m, n, k), (cm, cn) = sizes, blocks_of(cluster)
    rows = Classes.of(m, k, shape.bm * cm, stride)
    work = Work(
        m=m,
        n=n,
        k_blocks=rows.steps,
        tiles_m=rows.tiles,
        tiles_n=cdiv(cdiv(n, shape.bn), cn),
        group=max(1, group // cm),
        clusters=clusters_of(cluster, sms),
    )
    return cut(work, splits), rows


def pitch_clocks(sizes: tuple[int, int, int], shape: Shape, cluster: str, splits: int, stride: int) -> float:
    """Estimated clocks: waves of tiles at the slowest of tensor cores (4096 FLOP a clock), shared memory
    (160 B) and lines of L2, with a tenth of the next, and what start, epilogues and fix-up add."""
    tile, (cm, cn) = shape.engine, blocks_of(cluster)
    work, _ = pitch_work(sizes, shape, cluster, 8, splits, stride)
    tensor = shape.bm * shape.bn / 32
    reads = tile.bm // 64 * 4 * (64 * shape.products + tile.bn) * 32
    shared = (reads + tile.stage_bytes) / 160
    lines = LINES[stride] * shape.bm / cn + LINES[1] * shape.bn / cm
    _, second, slowest = sorted((tensor, shared, LINE_CLOCKS * lines))
    block = slowest + 0.1 * second
    exposed = 300.0 if shape.schedule == "pingpong" else 600.0 + 4.0 * tile.accumulators
    whole = cdiv(work.tiles - work.sk_tiles, work.clusters)
    total = whole * (work.k_blocks * block + exposed)
    if work.sk_units:
        # what gemm.cu's fix-up takes: some four passes over a tile's sums at 16 B a clock
        share = cdiv(cdiv(work.sk_tiles * work.k_blocks, work.sk_units) * work.sk_units, work.clusters)
        total += share * block + exposed + 4000 + 4.3 * shape.bm * shape.bn / 4
    return 5000 + total + (exposed if whole else 0)
