"""What ``gemm_ragged_split`` is made of besides Gluon: the cut of its last tiles, PTX of the flags, a
cost model.

A part's flags are raised and lowered a warp at a time: the warp that adds a part holds, element for element,
what the same warp of the other block held, so no barrier of more threads is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon._runtime import constexpr_function

from . import _common as common
from ._ragged import CLOCK, LINE_CLOCKS, LINES, Classes, Tile, _text, classes, load_text

#: fewest K steps of a part: shares end at a tile's end where less would be left
STEPS = 4
#: clocks a K step takes beyond its slowest resource, as a factor, by tile: fitted to ``gemm_ragged`` on
#: an H200
EXCESS = {192: 1.30, 128: 1.08, 256: 1.08}


@constexpr_function
def load_split_text(tile: Tile) -> str:
    """``load_text`` for this kernel's tensor maps."""
    return load_text(tile).replace("gemm_ragged_param", "gemm_ragged_split_param")


#: the flag of this warp, of four at address $1
_FLAG = (
    ".reg .pred p, done;",
    ".reg .b32 t, lane;",
    ".reg .b64 at;",
    "mov.u32 t, %tid.x;",
    "shr.u32 t, t, 5;",
    "and.b32 t, t, 3;",
    "mul.wide.u32 at, t, 4;",
    "add.u64 at, at, $1;",
    "mov.u32 lane, %laneid;",
    "setp.eq.u32 p, lane, 0;",
)


@constexpr_function
def post_text() -> str:
    """Raise the warp's flag at $1, behind all that the warp has stored."""
    return _text(
        *_FLAG, "bar.warp.sync 0xffffffff;", "mov.u32 t, 1;", "@p st.release.gpu.global.u32 [at], t;"
    )


@constexpr_function
def hear_text() -> str:
    """Wait for the warp's flag at $1 and lower it for the next launch."""
    return _text(
        *_FLAG,
        "again:",
        "ld.acquire.gpu.global.u32 t, [at];",
        "setp.ne.u32 done, t, 0;",
        "@!done bra again;",
        "bar.warp.sync 0xffffffff;",
        "mov.u32 t, 0;",
        "@p st.relaxed.gpu.global.u32 [at], t;",
    )


@dataclass(frozen=True)
class Cut:
    """How ``tiles`` of ``steps`` K steps are dealt to ``workers`` clusters: ``waves`` whole ones to each, the
    last ``shared`` as one row of K steps in equal shares.

    The kernel does the same arithmetic. Shares run over tiles in order, each in descending order of tiles: a
    part that does not end its tile comes first and is left for the cluster that has the tile's last step,
    which adds the others' from the nearest down. That one is a later cluster, so none waits for a cluster
    that started after it, nor before it has left its own part."""

    tiles: int
    steps: int
    workers: int
    waves: int
    shared: int

    @classmethod
    def of(cls, tiles: int, steps: int, workers: int, more: int) -> "Cut":
        """The tiles beyond whole waves, and of these ``more`` besides. A share has STEPS steps at least: one
        without any would be waited for in vain."""
        workers = max(1, min(workers, tiles * steps // STEPS))
        waves, rest = divmod(tiles, workers)
        if rest and rest * steps < STEPS * workers:
            more = max(more, 1)
        if rest:
            taken = min(waves, more)
            waves, rest = waves - taken, rest + taken * workers
        return cls(tiles, steps, workers, waves, rest)

    def edge(self, worker: int) -> int:
        """Where the share of ``worker`` begins in the shared tiles' K steps; that of the last ends at
        edge(workers)."""
        at = worker * (self.shared * self.steps) // self.workers
        over = at % self.steps
        if over < STEPS:
            return at - over
        return at - over + self.steps if over > self.steps - STEPS else at

    def units(self, worker: int) -> list[tuple[int, int, int]]:
        """Tile, first and last K step (exclusive), in order."""
        found = [(u * self.workers + worker, 0, self.steps) for u in range(self.waves)]
        low, high = self.edge(worker), self.edge(worker + 1)
        count = (high - 1) // self.steps - low // self.steps + 1 if high > low else 0
        for u in range(count):
            q = (high - 1) // self.steps - u
            begin, end = max(low - q * self.steps, 0), min(high - q * self.steps, self.steps)
            found.append((self.waves * self.workers + q, begin, end))
        return found

    def parts(self, worker: int, tile: int) -> int:
        """How many clusters before ``worker`` hold parts of the shared ``tile``, which it ends."""
        count = 0
        while self.edge(worker - count) > (tile - self.waves * self.workers) * self.steps:
            count += 1
        return count


def lines(tile: Tile, stride: int) -> float:
    """Clocks of an SM's TMA unit for a K step."""
    return LINE_CLOCKS * (LINES[stride] * tile.bm / tile.cn + LINES[1] * tile.columns / tile.cm)


def cost(sizes: Sequence[int], tile: Tile, rows: Classes, more: int) -> float:
    """Estimated µs: the K steps of the busiest cluster at the slowest of tensor cores (4096 FLOP a clock),
    shared memory (160 B) and lines of L2; epilogues; a part left, and the most that one cluster adds, at 24 B
    a clock and SM."""
    cut = Cut.of(
        rows.tiles * common.cdiv(sizes[1], tile.columns * tile.cn),
        rows.steps,
        common.SMS // (tile.cm * tile.cn),
        more,
    )
    tensor = tile.bm * tile.columns / 32
    reads = tile.bm // 64 * 4 * (64 + tile.columns) * 32
    shared = (reads + (tile.bm + tile.columns) * 128) / 160
    _, second, slowest = sorted((tensor, shared, lines(tile, rows.stride)))
    step = EXCESS[tile.bm] * slowest + 0.05 * second
    share = cut.shared / cut.workers
    stored = tile.rows * tile.columns / 32 + 600
    part = tile.bm * tile.columns * 4 / 24
    # who ends a tile of many shares leaves nothing and adds them all; with shares above a tile, one of each
    adding = part * max(2.0, 1 / share) if share else 0.0
    clocks = (cut.waves + share) * rows.steps * step + (cut.waves + (share > 0)) * stored + adding
    return (clocks + 4500 + 0.01 * tile.stages) / (1000 * CLOCK)


def plan(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> tuple[Tile, Classes]:
    """The tile of a config, and the rows of A as its clusters take them."""
    tile = Tile.of(config["tile"], config["cluster"], int(config["stages"]))
    return tile, classes(sizes[0], sizes[2], tile.bm * tile.cm, int(config["stride"]))


def reason(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> str | None:
    """Why these sizes cannot or need not be done, whatever the time."""
    (m, n, k), stride = sizes, int(config["stride"])
    tile, rows = plan(sizes, config)
    fault = common.tma_reason(K=k, N=n) or tile.reason()
    if fault:
        return fault
    if k % 64 == 0:
        return "rows start on 128 bytes: nothing that triton/gemm_streamk lacks"
    if m < 64:
        return "fewer rows than a warpgroup multiplies: triton/gemm_skinny"
    if stride > 1 and m < 64 * stride:
        return f"classes of every {stride}th row hold fewer rows than a warpgroup multiplies"
    if tile.cm > 1 and classes(m, k, tile.bm, stride).tiles < 2:
        return "a single tile along M: nothing for a cluster to share"
    if (config["tile"], config["cluster"]) == ("256x128", "1x2"):
        return "the cluster of 128x256 2x1, at more reads of shared memory"
    if tile.cn > 1 and n <= tile.columns:
        return "a single tile along N: nothing for a cluster to share"
    if config["group"] != 8 and m <= 8 * tile.bm:
        return "there are no more than 8 rows of tiles: the raster is the same as with groups of 8"
    if rows.steps < 2 * STEPS:
        return f"{rows.steps} steps of K are too few to cut"
    tiles = rows.tiles * common.cdiv(n, tile.columns * tile.cn)
    workers = common.SMS // (tile.cm * tile.cn)
    if 2 * workers * rows.steps * workers > common.INT32_MAX:
        return "shares of K exceed 32 bits"
    cut = Cut.of(tiles, rows.steps, workers, int(config["more"]))
    if not cut.shared or cut.workers < workers:
        return "nothing worth cutting: triton/gemm_ragged does the same"
    if config["more"] and tiles < workers:
        return "there is no whole wave to cut as well"
    return None
