"""What ``gemm_pitch`` and ``gemm_widths`` are made of besides Gluon: PTX of their loads and products, shapes
of tiles, a cost model.

Gluon's tensors have sides that are powers of two, so a tile of 176 or 144 is made of tensors of 16: the sums
of a warpgroup are pieces of [64, 16], which one ``wgmma`` of any multiple of 16 columns takes side by side.
An odd multiple of 8 is made of pieces of 8.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from triton.experimental.gluon._runtime import constexpr_function

from . import _common as common
from ._ragged import CLOCK, LINE_CLOCKS, LINES, Classes, _text, classes

#: bytes of a row of 64 elements
ROW = 128
#: rows and columns of C that are staged at once, at most
CHUNK = 64
#: rows and columns of C in a tile, by schedule
COOP = ("256x128", "256x160", "256x176", "256x192", "192x128", "192x160", "192x176", "192x192")
COOP_128 = ("128x192", "128x208", "128x224", "128x256")
PINGPONG = ("128x160", "128x176", "128x192")
SWAPPED = (
    *("144x256", "160x256", "176x256", "192x256", "144x192", "160x192", "176x192"),
    *("176x128", "208x128", "224x128", "240x128"),
)
TILES = (
    *(f"{t} coop" for t in (*COOP, *COOP_128)),
    *(f"{t} pingpong" for t in PINGPONG),
    *(f"{t} swapped" for t in SWAPPED),
)


@constexpr_function
def init_text(tile: "Tile") -> str:
    """Make the barriers: ``full`` of each stage, which the loads complete, then ``empty`` of each, for a lane
    of every warp that reads the stage, then one for the turn of either warpgroup."""
    lines = [".reg .pred p;", ".reg .b32 t, s;", "mov.u32 t, %tid.x;", "setp.eq.u32 p, t, 0;"]
    lines += ["mov.u32 s, global_smem;", f"add.u32 s, s, {tile.barriers};"]
    readers = 4 * tile.owners * tile.cm * tile.cn
    for i, count in enumerate([1] * tile.stages + [readers] * tile.stages + [4, 4]):
        lines.append(f"@p mbarrier.init.shared::cta.b64 [s+{8 * i}], {count};")
    return _text(*lines, "@p fence.mbarrier_init.release.cluster;")


@constexpr_function
def load_text(tile: "Tile") -> str:
    """Fill stage $1: expect its bytes, load this block's share of both operands. $2 is the rank, $3 the
    column of A and B, $4 and $5 the row and class of A, $6 the row of B. The maps of A and B are the kernel's
    parameters 0 and 7: a descriptor of three dimensions takes seven."""
    lines = [
        ".reg .pred p;",
        ".reg .b32 t, s, bar, da, db, none;",
        ".reg .b64 ma, mb;",
        ".reg .b16 all;",
        "mov.u32 t, %tid.x;",
        "and.b32 t, t, 127;",
        "setp.eq.u32 p, t, 0;",
        "mov.u32 s, global_smem;",
        "mad.lo.u32 bar, $1, 8, s;",
        f"add.u32 bar, bar, {tile.barriers};",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {tile.stage_bytes};",
        f"mov.b64 ma, {tile.kernel}_param_0;",
        "cvta.param.u64 ma, ma;",
        f"mov.b64 mb, {tile.kernel}_param_7;",
        "cvta.param.u64 mb, mb;",
        f"mov.b16 all, {(1 << tile.cm * tile.cn) - 1};",
        "mov.u32 none, 0;",
        f"mad.lo.u32 s, $1, {tile.stage_bytes}, s;",
    ]
    for name, start, share in (
        ("da", tile.start_a, tile.box_a if tile.cn > 1 else 0),
        ("db", tile.start_b, tile.box_b if tile.cm > 1 else 0),
    ):
        lines += [f"mad.lo.u32 {name}, $2, {share * ROW}, s;", f"add.u32 {name}, {name}, {start};"]
    load = "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
    for to, source, blocks in (
        ("da", "[ma, {$3, $4, $5}]", tile.cn),
        ("db", "[mb, {$3, $6, none}]", tile.cm),
    ):
        many, mask = (".multicast::cluster", ", all") if blocks > 1 else ("", "")
        lines.append(f"{load}{many} [{to}], {source}, [bar]{mask};")
    return _text(*lines)


@constexpr_function
def product_text(tile: "Tile", owner: int) -> str:
    """Add the products of a stage to the sums, which are the first operands, twice over (once as each). The
    stage's number follows, ``tile.first`` more for the first of a tile of C, which overwrites what the sums
    hold. Leaves these products in flight and waits for those before."""
    sums, width = tile.mi * tile.q // 2, tile.q // 2
    kind = "f16.f16" if tile.half else "bf16.bf16"
    lines = [
        ".reg .pred more;",
        ".reg .b32 s, t;",
        ".reg .b64 from, p, q;",
        f"setp.lt.u32 more, ${2 * sums}, {tile.first};",
        f"and.b32 t, ${2 * sums}, {tile.first - 1};",
        "mov.u32 s, global_smem;",
        f"mad.lo.u32 s, t, {tile.stage_bytes}, s;",
        "shr.u32 s, s, 4;",
        "and.b32 s, s, 0x3fff;",
        "cvt.u64.u32 from, s;",
        # rows of 128 bytes, swizzled, eight of them 1024 bytes from the next eight
        f"or.b64 from, from, {1 << 62 | 64 << 32 | 1 << 16};",
        "wgmma.fence.sync.aligned;",
    ]
    for k in range(4):
        lines.append(f"add.u64 q, from, {(tile.p * ROW + k * 32) >> 4};")
        for i in range(tile.mi):
            first = (0 if tile.pingpong else owner * tile.mi) + i
            regs = ", ".join(f"${i * width + r}" for r in range(width))
            lines.append(f"add.u64 p, from, {(first * 64 * ROW + k * 32) >> 4};")
            operands = f"{{{regs}}}, p, q, {'1' if k else 'more'}, 1, 1, 0, 0"
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{tile.q}k16.f32.{kind} {operands};")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"]
    return "\n".join(("{", *lines, "}"))


@constexpr_function
def constraints(tile: "Tile", more: int) -> str:
    """For a text that changes all sums in place, with ``more`` integers after them."""
    sums = tile.mi * tile.q // 2
    return ",".join(("=f",) * sums + tuple(str(i) for i in range(sums)) + ("r",) * more + ("~{memory}",))


@dataclass(frozen=True)
class Tile:
    """A block's tile of ``bm`` × ``bn`` of C in a cluster of ``cm`` × ``cn``, with its ring.

    P is the operand on wgmma's M (A, or B if swapped), Q the one on its N; a tile has ``p`` and ``q`` rows of
    them. A ``pingpong`` tile belongs to one of two warpgroups that take turns."""

    bm: int
    bn: int
    schedule: str
    cm: int
    cn: int
    stages: int
    half: bool = False

    #: the function that PTX knows the parameters of
    kernel: ClassVar[str] = "gemm_pitch"
    #: what tells the number of a tile's first stage apart
    first: ClassVar[int] = 256
    #: what a block's share of an operand's rows is a multiple of
    share: ClassVar[int] = 8

    @classmethod
    def of(cls, tile: Any, cluster: Any, stages: int, half: bool = False) -> Self:
        """From a config's names."""
        size, _, schedule = str(tile).partition(" ")
        (bm, bn), (cm, cn) = ([int(x) for x in s.split("x")] for s in (size, str(cluster)))
        return cls(bm, bn, schedule, cm, cn, stages, half)

    @property
    def swapped(self) -> bool:
        """Whether rows of C are wgmma's N."""
        return self.schedule == "swapped"

    @property
    def pingpong(self) -> bool:
        """Whether warpgroups take turns."""
        return self.schedule == "pingpong"

    @property
    def p(self) -> int:
        """Rows of the operand on wgmma's M."""
        return self.bn if self.swapped else self.bm

    @property
    def q(self) -> int:
        """Rows of the operand on wgmma's N."""
        return self.bm if self.swapped else self.bn

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 3 if self.p == 192 and not self.pingpong else 2

    @property
    def owners(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.pingpong else self.consumers

    @property
    def mi(self) -> int:
        """Blocks of 64 rows of P that a warpgroup multiplies."""
        return self.p // 64 // self.owners

    @property
    def piece(self) -> int:
        """Columns of a piece of sums: half as many a thread."""
        return 8 if self.q % 16 else 16

    @property
    def pieces(self) -> int:
        """Pieces of a warpgroup's sums, those of the first 64 rows first."""
        return self.mi * self.q // self.piece

    @property
    def box_a(self) -> int:
        """Rows of A that a load takes."""
        return self.bm // self.cn

    @property
    def box_b(self) -> int:
        """Rows of B that a load takes."""
        return self.bn // self.cm

    @property
    def stage_bytes(self) -> int:
        """One K step of both operands: P, then Q."""
        return (self.p + self.q) * ROW

    @property
    def start_a(self) -> int:
        """Where A lies in a stage."""
        return self.p * ROW if self.swapped else 0

    @property
    def start_b(self) -> int:
        """Where B lies in a stage."""
        return 0 if self.swapped else self.p * ROW

    @property
    def ring(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.stage_bytes

    @property
    def box_q(self) -> int:
        """Rows or columns of C along Q in a store's box: 64, 32 or 16."""
        return min(64, math.gcd(self.q, 64))

    @property
    def store_box(self) -> tuple[int, int]:
        """Rows and columns of C that a store takes."""
        return (self.box_q, 64) if self.swapped else (64, self.box_q)

    @property
    def buffers(self) -> int:
        """Chunks of a warpgroup that shared memory has room for beside the ring, four at most."""
        left = common.SMEM_LIMIT - self.ring - 1024 - 256
        return min(4, left // (self.consumers * CHUNK * ROW))

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """First and width of what is staged at once along Q: powers of two."""
        found, at = [], 0
        while at < self.q:
            width = min(CHUNK, 1 << ((self.q - at).bit_length() - 1))
            found.append((at, width))
            at += width
        return tuple(found)

    @property
    def younger(self) -> tuple[int, ...]:
        """How many stores may be in flight when a chunk's buffer is written, for each of a tile's chunks:
        those of the chunks since the buffer's last. A tile's first chunk waits for the tile before."""
        issued = [common.cdiv(width, self.box_q) for _, width in self.chunks] * self.mi
        return tuple(
            sum(issued[:n]) if n < self.buffers else sum(issued[n - self.buffers + 1 : n])
            for n in range(len(issued))
        )

    @property
    def barriers(self) -> int:
        """Where the barriers start, behind the ring and staged C."""
        return self.ring + self.consumers * self.buffers * CHUNK * ROW

    def reason(self) -> str | None:
        """Why the tile does not suit registers, shared memory or the cluster, if so."""
        sums = self.mi * self.q // 2
        if sums > (96 if self.consumers == 3 else 192):
            return f"{sums} sums a thread do not fit its registers"
        if self.bm % (self.cn * self.share) or self.bn % (self.cm * self.share):
            return f"shares of a {self.bm}x{self.bn} tile are no multiples of {self.share} rows"
        if self.buffers < 1:
            return f"{self.stages} stages of {self.stage_bytes} bytes leave no room for C"
        if replace(self, stages=self.stages + 2).buffers >= 1 and self.stages < 5:
            return "two more stages fit: too shallow to compete"
        return None

    @property
    def consumer_regs(self) -> int:
        """Registers of a thread that multiplies."""
        return 160 if self.consumers == 3 else 240 if self.mi * self.q > 320 else 232

    @property
    def producer_regs(self) -> int:
        """Registers of a thread that loads."""
        return 32 if self.consumers == 3 else 24 if self.mi * self.q > 320 else 40


def cost(sizes: Sequence[int], tile: Tile, rows: Classes) -> float:
    """Estimated µs: waves of tiles at the slowest of tensor cores (4096 FLOP a clock), shared memory (160 B)
    and lines of L2, with a tenth of the next, and what start and epilogues add."""
    count = rows.tiles * common.cdiv(sizes[1], tile.bn * tile.cn)
    tensor = tile.bm * tile.bn / 32
    shared = (tile.p // 64 * 4 * (64 + tile.q) * 32 + tile.stage_bytes) / 160
    lines = LINE_CLOCKS * (LINES[rows.stride] * tile.bm / tile.cn + LINES[1] * tile.bn / tile.cm)
    _, second, slowest = sorted((tensor, shared, lines))
    exposed = 300.0 if tile.pingpong else 600.0 + 2.0 * tile.mi * tile.q
    waves = common.cdiv(count, common.SMS // (tile.cm * tile.cn))
    clocks = 5000 + waves * (rows.steps * (slowest + 0.1 * second) + exposed) + exposed
    return (clocks - 0.01 * tile.stages) / (1000 * CLOCK)


def plan(sizes: Sequence[int], config: Any, half: bool = False) -> tuple[Tile, Classes]:
    """The tile of a config, and the rows of A as its clusters take them."""
    tile = Tile.of(config["tile"], config["cluster"], int(config["stages"]), half)
    return tile, classes(sizes[0], sizes[2], tile.bm * tile.cm, int(config["stride"]))


def reason(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> str | None:
    """Why these sizes cannot or need not be done, whatever the time."""
    (m, n, k), stride = sizes, int(config["stride"])
    tile, _rows = plan(sizes, config)
    fault = common.tma_reason(K=k, N=n) or tile.reason()
    if fault:
        return fault
    if k % 64 == 0:
        return "rows start on 128 bytes: nothing that triton/gemm lacks"
    if m < 64:
        return "fewer rows than a warpgroup multiplies: triton/gemm_skinny"
    if stride > 1 and m < 64 * stride:
        return f"classes of every {stride}th row hold fewer rows than a warpgroup multiplies"
    if tile.cm > 1 and classes(m, k, tile.bm, stride).tiles < 2:
        return "a single tile along M: nothing for a cluster to share"
    if tile.cn > 1 and n <= tile.bn:
        return "a single tile along N: nothing for a cluster to share"
    return None
