"""The host's half of ``tilelang/gemm_pitch``: tiles, which rows they take, a cost model. No GPU, no DSL."""

from dataclasses import dataclass
from functools import lru_cache

from dsl_bench.kernels.tilelang import _plan as plan

#: K elements of a step: one 128-byte row of the swizzle
BK = 64
#: clocks of an SM for a line of L2 that a box touches, measured on an H200
LINE_CLOCKS = 1.9
#: lines that 128 bytes of a row touch on average, in tiles of every stride-th row
LINES = {1: 1.875, 4: 1.5, 8: 1.0}
#: the deepest ring
MOST_STAGES = 6


@dataclass(frozen=True)
class Shape:
    """A tile of ``bm`` × ``bn`` of C. ``swap``: rows of C are wgmma's N, columns its M."""

    bm: int
    bn: int
    swap: bool

    @classmethod
    def of(cls, text: str) -> "Shape":
        """``"176x256 swapped"`` as a Shape."""
        size, _, swapped = text.partition(" ")
        bm, bn = map(int, size.split("x"))
        return cls(bm, bn, bool(swapped))

    @property
    def upright(self) -> int:
        """The tile's extent on wgmma's M."""
        return self.bn if self.swap else self.bm

    @property
    def across(self) -> int:
        """The tile's extent on wgmma's N."""
        return self.bm if self.swap else self.bn

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return plan.consumers(self.upright)

    @property
    def sums(self) -> int:
        """fp32 sums a thread."""
        return self.bm * self.bn // (128 * self.groups)

    @property
    def width(self) -> int:
        """wgmma's N that is staged at a time: 64, or what divides the tile."""
        return 48 if self.swap and self.bm % 48 == 0 else 64

    @property
    def starts(self) -> list[int]:
        """Where chunks of ``width`` begin. The last reaches back where they do not come out even, and stores
        some of C a second time, with the same values."""
        return [min(i, self.across - self.width) for i in range(0, self.across, self.width)]

    @property
    def buffer_bytes(self) -> int:
        """A staging buffer of C."""
        return self.upright * self.width * 2

    def stages(self, buffers: int) -> int:
        """The deepest ring beside ``buffers`` staging buffers (0: not even one stage)."""
        left = plan.SMEM_LIMIT - 1024 - buffers * self.buffer_bytes
        return min(MOST_STAGES, left // ((self.bm + self.bn) * BK * 2))

    def reason(self, cluster: tuple[int, int], buffers: int) -> str | None:
        """Why registers, shared memory or the cluster do not suit the tile, or None."""
        tall, wide = cluster
        limit = 96 if self.groups == 3 else 192
        if self.sums > limit:
            return f"{self.sums} fp32 sums a thread, over {limit}"
        if self.bm // wide % 8 or self.bn // tall % 8:
            return "a block's share of a tile is no whole number of swizzle atoms"
        if self.stages(buffers) < 3:
            return f"{self.stages(buffers)} stages fit beside {buffers} buffers of C: fewer than 3"
        return None


@dataclass(frozen=True)
class Classes:
    """Rows of A and C by their number modulo ``stride``, as a tensor map of three dimensions names them.

    Class c holds rows c, c + stride, …: ``height`` of them, or in the first ``tail`` classes one more. The
    map has ``height`` rows a class, since one more would reach beyond the matrix. So the last tile of a
    longer class is taken from class c + stride, whose row r is row r + 1 of class c, from row ``last`` on;
    ``longer`` and ``shorter`` are the tiles of a class. ``steps`` are those of K for any class: tiles begin
    up to 56 elements before K = 0, so that they begin where a line does."""

    stride: int
    height: int
    tail: int
    longer: int
    shorter: int
    last: int
    steps: int

    @classmethod
    def of(cls, m: int, k: int, rows: int, stride: int) -> "Classes":
        """For tiles, of a whole cluster, of ``rows`` rows."""
        height, tail = divmod(m, stride)
        longer = max(2, plan.cdiv(height + 1, rows)) if tail else 1
        last = min((longer - 1) * rows, height) - 1
        before = max(c * k % BK for c in range(stride))
        return cls(stride, height, tail, longer, plan.cdiv(height, rows), last, plan.cdiv(k + before, BK))

    @property
    def tiles(self) -> int:
        """Tiles of all classes."""
        return self.tail * self.longer + (self.stride - self.tail) * self.shorter

    def arguments(self) -> tuple[int, ...]:
        """What the kernel is given, in its order."""
        sizes = (self.stride, self.height, self.tail, self.longer, self.shorter)
        return (self.tiles, *sizes, self.last, self.steps)


@lru_cache(maxsize=65536)
def clocks(
    sizes: tuple[int, int, int], shape: Shape, cluster: tuple[int, int], stride: int, buffers: int
) -> float:
    """Estimated clocks of the product of ``sizes`` (m, n, k).

    A step takes the slowest of tensor cores (4096 FLOP a clock), shared memory (160 B) and lines of L2, and a
    tenth of the next; an epilogue is exposed, the more the fewer buffers it has."""
    (m, n, k), (tall, wide) = sizes, cluster
    rows = Classes.of(m, k, shape.bm * tall, stride)
    tiles = rows.tiles * plan.cdiv(plan.cdiv(n, shape.bn), wide)
    waves = plan.cdiv(tiles, plan.SMS // (tall * wide))
    tensor = shape.bm * shape.bn / 32
    reads = shape.upright // 64 * 4 * (64 * plan.cdiv(shape.across, 256) + shape.across) * 32
    shared = (reads + (shape.bm + shape.bn) * 128) / 160
    lines = LINES[stride] * shape.bm / wide + LINES[1] * shape.bn / tall
    _, second, slowest = sorted((tensor, shared, LINE_CLOCKS * lines))
    epilogue = 600 + 4 * shape.sums + (300 if buffers == 1 else 0)
    shallow = 1.01 if shape.stages(buffers) < shape.stages(1) else 1.0
    return 5000 + waves * (rows.steps * (slowest + 0.1 * second) * shallow + epilogue) + epilogue
