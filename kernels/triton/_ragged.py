"""What ``gemm_ragged`` is made of besides Gluon: the PTX of its ring, the host's arithmetic, a cost model.

The texts run in every thread of a warpgroup; ``$0`` is a dummy result, operands follow. Shared memory starts
at the symbol ``global_smem``, where the kernel's one allocation lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from triton.experimental.gluon._runtime import constexpr_function

from . import _common as common

#: rows of a tile, columns of its first and second product, and the warpgroups that share its rows
TILES: dict[str, tuple[int, int, int, int]] = {
    "192x128": (192, 128, 0, 3),
    "128x256": (128, 256, 0, 2),
    "256x128": (256, 128, 0, 2),
    "128x192": (128, 128, 64, 2),
    "192x192": (192, 128, 64, 3),
    "256x192": (256, 128, 64, 2),
    "128x128": (128, 128, 0, 2),
}
#: clocks of an SM's TMA unit for a line of 128 bytes, as measured on an H200
LINE_CLOCKS = 1.9
#: lines that 128 bytes of a row touch on average, in tiles of every stride-th row
LINES = {1: 1.875, 4: 1.5, 8: 1.0}
#: GHz under load, for µs out of clocks
CLOCK = 1.6


@constexpr_function
def _text(*lines: str) -> str:
    return "\n".join(("{", *lines, "mov.u32 $0, 0;", "}"))


@constexpr_function
def init_text(tile: "Tile") -> str:
    """Make the ring's barriers: ``full`` of each stage, which the loads complete, then ``empty`` of each, for
    a lane of every warp that reads the stage."""
    lines = [".reg .pred p;", ".reg .b32 t, s;", "mov.u32 t, %tid.x;", "setp.eq.u32 p, t, 0;"]
    lines += ["mov.u32 s, global_smem;", f"add.u32 s, s, {tile.barriers};"]
    for i in range(2 * tile.stages):
        count = 1 if i < tile.stages else 4 * tile.consumers * tile.cm * tile.cn
        lines.append(f"@p mbarrier.init.shared::cta.b64 [s+{8 * i}], {count};")
    return _text(*lines, "@p fence.mbarrier_init.release.cluster;")


@constexpr_function
def sync_text(blocks: int) -> str:
    """A barrier of all threads of the cluster's blocks; nothing where it is one block."""
    arrive, wait = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"
    return _text(arrive, wait) if blocks > 1 else _text()


@constexpr_function
def rank_text(blocks: int) -> str:
    """The block's rank in its cluster."""
    return "mov.u32 $0, %cluster_ctarank;" if blocks > 1 else "mov.u32 $0, 0;"


@constexpr_function
def wait_text(barriers: int) -> str:
    """Wait until the phase of parity $2 of barrier $1 has completed."""
    return _text(
        ".reg .pred done;",
        ".reg .b32 bar;",
        "mov.u32 bar, global_smem;",
        "mad.lo.u32 bar, $1, 8, bar;",
        "again:",
        f"mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{barriers}], $2;",
        "@!done bra.uni again;",
    )


@constexpr_function
def arrive_text(blocks: int, barriers: int) -> str:
    """Arrive at barrier $1 of every block of the cluster, once a warp and block. Without an order of memory
    between blocks: what it guards is read by wgmma alone."""
    lines = [
        ".reg .pred p;",
        ".reg .b32 lane, bar;",
        "mov.u32 lane, %laneid;",
        f"setp.lt.u32 p, lane, {blocks};",
    ]
    lines += ["mov.u32 bar, global_smem;", "mad.lo.u32 bar, $1, 8, bar;", f"add.u32 bar, bar, {barriers};"]
    if blocks > 1:
        lines.append("mapa.shared::cluster.u32 bar, bar, lane;")
    where = "cluster" if blocks > 1 else "cta"
    return _text(*lines, f"@p mbarrier.arrive.shared::{where}.b64 _, [bar];")


@constexpr_function
def load_text(tile: "Tile") -> str:
    """Fill stage $1: expect its bytes, load this block's share of both tiles. $2 is the rank, $3 the column
    of A and B, $4 and $5 the row and class of A, $6 the row of B. The maps of A and B are the kernel's
    parameters 0 and 7: a descriptor of three dimensions takes seven."""
    lines = [
        ".reg .pred p;",
        ".reg .b32 t, s, bar, da, db, dx, row, none;",
        ".reg .b64 ma, mb;",
        ".reg .b16 all;",
        "mov.u32 t, %tid.x;",
        "and.b32 t, t, 127;",
        "setp.eq.u32 p, t, 0;",
        "mov.u32 s, global_smem;",
        "mad.lo.u32 bar, $1, 8, s;",
        f"add.u32 bar, bar, {tile.barriers};",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {(tile.bm + tile.columns) * 128};",
        "mov.b64 ma, gemm_ragged_param_0;",
        "cvta.param.u64 ma, ma;",
        "mov.b64 mb, gemm_ragged_param_7;",
        "cvta.param.u64 mb, mb;",
        f"mov.b16 all, {(1 << tile.cm * tile.cn) - 1};",
        "mov.u32 none, 0;",
    ]
    for name, start, rows, share in (
        ("da", 0, tile.bm, tile.box_a if tile.cn > 1 else 0),
        ("db", tile.ring_b, tile.bn, tile.box_b if tile.cm > 1 else 0),
        ("dx", tile.ring_x, tile.bx, tile.box_b if tile.cm > 1 else 0),
    ):
        lines += [f"mad.lo.u32 {name}, $1, {rows * 128}, s;", f"add.u32 {name}, {name}, {start};"]
        lines += [f"mad.lo.u32 {name}, $2, {share * 128}, {name};"]
    load = "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
    many, mask = (".multicast::cluster", ", all") if tile.cn > 1 else ("", "")
    for owner in range(tile.consumers):
        at = owner * tile.rows
        lines += [f"add.u32 row, $4, {at};", f"add.u32 t, da, {at * 128};"]
        lines.append(f"{load}{many} [t], [ma, {{$3, row, $5}}], [bar]{mask};")
    many, mask = (".multicast::cluster", ", all") if tile.cm > 1 else ("", "")
    # as many rows of B as the blocks of a cluster load together
    unit = tile.box_b * tile.cm
    for at in range(0, tile.columns, unit):
        to, within = ("dx", at - tile.bn) if at >= tile.bn else ("db", at)
        lines += [f"add.u32 row, $6, {at};", f"add.u32 t, {to}, {within * 128};"]
        lines.append(f"{load}{many} [t], [mb, {{$3, row, none}}], [bar]{mask};")
    return _text(*lines)


@dataclass(frozen=True)
class Tile:
    """A block's tile of ``bm`` × (``bn`` + ``bx``) in a cluster of ``cm`` × ``cn``, with its ring."""

    bm: int
    bn: int
    bx: int
    consumers: int
    cm: int
    cn: int
    stages: int

    @classmethod
    def of(cls, tile: Any, cluster: Any, stages: int) -> "Tile":
        """From a config's names."""
        cm, cn = (int(x) for x in str(cluster).split("x"))
        return cls(*TILES[str(tile)], cm, cn, stages)

    @property
    def rows(self) -> int:
        """Rows that a warpgroup multiplies."""
        return self.bm // self.consumers

    @property
    def box_a(self) -> int:
        """Rows of A that a load takes."""
        return self.rows // self.cn

    @property
    def box_b(self) -> int:
        """Rows of B that a load takes."""
        return (64 if self.bx else self.bn) // self.cm

    @property
    def columns(self) -> int:
        """Columns of the tile."""
        return self.bn + self.bx

    @property
    def ring(self) -> int:
        """Bytes of all stages."""
        return self.stages * (self.bm + self.columns) * 128

    @property
    def slices(self) -> int:
        """Slices of columns in which the first product is staged: the fewest that fit, none narrower than 64
        columns; where there is a second product, as wide as that."""
        if self.bx:
            return self.bn // self.bx
        fitting = (s for s in (1, 2, 4) if self.bn // s >= 64 and self._bytes(s) <= common.SMEM_LIMIT)
        return next(fitting, 1)

    def _bytes(self, slices: int) -> int:
        # the compiler's own state takes up to 200 bytes beyond the barriers' kilobyte
        return self.ring + self.bm * self.bn * 2 // slices + 1024 + 256

    def reason(self) -> str | None:
        """Why the tile's ring does not suit shared memory, if so."""
        size = self._bytes(self.slices)
        if size > common.SMEM_LIMIT:
            return f"about {size} bytes of shared memory, over {common.SMEM_LIMIT}"
        deeper = replace(self, stages=self.stages + 2)
        if deeper._bytes(deeper.slices) <= common.SMEM_LIMIT:
            return "two more stages fit: too shallow to compete"
        return None

    @property
    def ring_b(self) -> int:
        """Where the ring of B starts in shared memory, bytes; that of A starts at 0."""
        return self.stages * self.bm * 128

    @property
    def ring_x(self) -> int:
        """Where the ring of B's second part starts."""
        return self.stages * (self.bm + self.bn) * 128

    @property
    def barriers(self) -> int:
        """Where the barriers start, behind the rings and staged C."""
        return self.ring + self.bm * self.bn * 2 // self.slices

    @property
    def producer_regs(self) -> int:
        """Registers of a thread that loads."""
        return 65536 // 128 - 8 * (self.consumers == 2) - self.consumers * self.consumer_regs

    @property
    def consumer_regs(self) -> int:
        """Registers of a thread that multiplies: with three warpgroups of them as many as there are."""
        return 160 if self.consumers == 3 else 240 if self.rows * self.columns > 128 * 128 else 232


@dataclass(frozen=True)
class Classes:
    """Rows of A as tiles take them: ``count`` classes of the descriptor, ``stride`` rows from one to the next
    of a class, ``height`` of them. The first ``tail`` classes have one row more, ``long`` tiles and a last
    tile that starts at row ``last`` of the class ``stride`` further on; the others have ``short`` tiles.
    ``tiles`` in all, each of ``steps`` of 64 columns."""

    count: int
    stride: int
    height: int
    tail: int
    long: int
    short: int
    last: int
    tiles: int
    steps: int


def classes(m: int, k: int, rows: int, stride: int) -> Classes:
    """Row tiles of ``rows`` rows over ``m`` rows of ``k`` elements, each of every ``stride``-th row."""
    height, tail = divmod(m, stride)
    short = common.cdiv(height, rows)
    long = max(2, common.cdiv(height + 1, rows)) if tail else 1
    last = min((long - 1) * rows, height) - 1
    before = max(c * k % 64 for c in range(stride))
    tiles = tail * long + (stride - tail) * short
    steps = common.cdiv(k + before, 64)
    return Classes(stride + tail, stride, height, tail, long, short, last, tiles, steps)


def cost(sizes: Sequence[int], tile: Tile, stride: int) -> float:
    """Estimated µs: waves of tiles at the slowest of tensor cores (4096 FLOP a clock), shared memory (160 B)
    and lines of L2, with a tenth of the next, and what start and epilogues add."""
    m, n, k = sizes
    rows = classes(m, k, tile.bm * tile.cm, stride)
    count = rows.tiles * common.cdiv(n, tile.columns * tile.cn)
    tensor = tile.bm * tile.columns / 32
    reads = tile.bm // 64 * 4 * (64 * (2 if tile.bx else 1) + tile.columns) * 32
    shared = (reads + (tile.bm + tile.columns) * 128) / 160
    lines = LINES[stride] * tile.bm / tile.cn + LINES[1] * tile.columns / tile.cm
    _, second, slowest = sorted((tensor, shared, LINE_CLOCKS * lines))
    waves = common.cdiv(count, common.SMS // (tile.cm * tile.cn))
    tiles = waves * (rows.steps * (slowest + 0.1 * second) + 600 + tile.rows * tile.columns / 32)
    return (tiles + 4500 + 0.01 * tile.stages) / (1000 * CLOCK)
