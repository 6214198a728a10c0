"""What the GEMM kernels share: raster, epilogue, fix-up of split tiles, and the host's arithmetic for both.

Device functions are ``@triton.jit`` and inlined; the host half touches no GPU.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import triton
import triton.language as tl

from dsl_bench.plugin import Case, KernelFault

#: shared memory a block may use on sm_90, bytes
SMEM_LIMIT = 232448
#: SMs of an H200; the cost models rank with it, the grids use the device's own number
SMS = 132
INT32_MAX = 2**31 - 1


@triton.jit
def tile_at(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: bands of GROUP rows, walked column by column, so that the tiles that run
    together share operands in L2."""
    band = tile // (GROUP * tiles_n)
    inside = tile - band * (GROUP * tiles_n)
    rows = min(tiles_m - band * GROUP, GROUP)
    return band * GROUP + inside % rows, inside // rows


@triton.jit
def store_tile(c, acc, row, col, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr):
    """acc [BM, BN] fp32 to the descriptor ``c`` (block [BM, BN // SUB]) in SUB column slices, each rounded
    and staged through shared memory on its own."""
    if SUB == 1:
        c.store([row, col], acc.to(c.dtype))
    else:
        halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        store_tile(c, left, row, col, BM, BN // 2, SUB // 2)
        store_tile(c, right, row, col + BN // 2, BM, BN // 2, SUB // 2)


@triton.jit
def store_masked(c, acc, row, col, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """acc [BM, BN] fp32 to c [m, n] row-major through pointers, for rows no tensor map can describe."""
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(c + rows[:, None] * n + cols[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def leave_slices(partial, acc, BM: tl.constexpr, BN: tl.constexpr, PITCH: tl.constexpr, SLICES: tl.constexpr):
    """acc [BM, BN] fp32 to rows of PITCH at ``partial``, a slice of columns after the other: each goes
    through shared memory, of which the ring leaves little."""
    if SLICES == 1:
        at = tl.arange(0, BM)[:, None] * PITCH + tl.arange(0, BN)[None, :]
        tl.store(partial + at, acc, cache_modifier=".cg")
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        leave_slices(partial, left, BM, BN // 2, PITCH, SLICES // 2)
        leave_slices(partial + BN // 2, right, BM, BN // 2, PITCH, SLICES // 2)


@triton.jit
def post(partial, flag, worker, acc, BM: tl.constexpr, BN: tl.constexpr):
    """Leave acc [BM, BN] in this worker's slot and raise its flag. The barrier puts every thread's stores
    before the one thread's release."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(partial + worker * (BM * BN) + at, acc, cache_modifier=".cg")
    tl.debug_barrier()
    tl.atomic_xchg(flag + worker, 1, sem="release", scope="gpu")


@triton.jit
def wait(flag, worker):
    """Wait for another worker's flag and lower it for the next launch."""
    while tl.atomic_cas(flag + worker, 1, 0, sem="acquire", scope="gpu") != 1:
        pass
    tl.debug_barrier()


@triton.jit
def add_slices(partial, acc, BM: tl.constexpr, BN: tl.constexpr, PITCH: tl.constexpr, SLICES: tl.constexpr):
    """acc [BM, BN] plus the same columns at ``partial``, a slice of columns after the other: all at once, the
    loaded values would need as many registers as the sums."""
    if SLICES == 1:
        at = tl.arange(0, BM)[:, None] * PITCH + tl.arange(0, BN)[None, :]
        out = acc + tl.load(partial + at, cache_modifier=".cg")
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        left = add_slices(partial, left, BM, BN // 2, PITCH, SLICES // 2)
        right = add_slices(partial + BN // 2, right, BM, BN // 2, PITCH, SLICES // 2)
        out = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))
    return out


@triton.jit
def add_peers(partial, flag, acc, worker, workers, total, end, BM: tl.constexpr, BN: tl.constexpr):
    """acc plus what the workers after this one left of the same tile, which ends at K step ``end`` of all
    ``total`` steps; worker w holds the steps from w·total/workers on."""
    SLICES: tl.constexpr = 4 if BM * BN >= 8192 else 1
    peer = worker + 1
    while peer * total // workers < end:
        wait(flag, peer)
        acc = add_slices(partial + peer * (BM * BN), acc, BM, BN, BN, SLICES)
        peer += 1
    return acc


def split_columns(bn: int) -> tuple[int, int]:
    """The powers of two that make bn columns, the second 0 where one does."""
    return (128, 64) if bn == 192 else (bn, 0)


def element(dtype: str) -> str:
    """Triton's name of a case's dtype."""
    return {"bf16": "bf16", "fp16": "fp16"}[dtype]


def descriptor(tensor: Any, rows: int, cols: int) -> Any:
    """A host tensor descriptor over a contiguous (or row-strided) matrix with blocks of rows × cols."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])


def unfit(reason: str) -> KernelFault:
    """The fault of a binding that a binary was not compiled for."""
    return KernelFault("launch_error", reason, "bind")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def divisor(n: int) -> int:
    """The largest of 16, 8, …, 1 that divides n: what a binary is promised about a row length."""
    return next(d for d in (16, 8, 4, 2, 1) if n % d == 0)


def wide(case: Case) -> bool:
    """Whether an offset into A, B or C exceeds 32 bits."""
    m, n, k = case["m"], case["n"], case["k"]
    return max(m * k, n * k, m * n) > INT32_MAX


def aligned(case: Case) -> bool:
    """Whether rows of A, B and C all start on 16 bytes."""
    return case["k"] % 8 == 0 and case["n"] % 8 == 0


def tma_reason(**rows: int) -> str | None:
    """Why a matrix of 2-byte elements with these row lengths has no tensor map, if so."""
    for name, length in rows.items():
        if length % 8:
            return f"rows of {name} elements ({length}) do not start on 16 bytes: no tensor map"
    return None


def tiles(case: Case, config: Mapping[str, Any]) -> int:
    """Output tiles of bm × bn."""
    return cdiv(case["m"], config["bm"]) * cdiv(case["n"], config["bn"])


def tile_reason(config: Mapping[str, Any]) -> str | None:
    """Why a tile does not suit its warps: a warpgroup (4 warps) owns 64 rows, a thread at most 128 sums."""
    bm, bn, warps = config["bm"], config["bn"], config["warps"]
    if bn == 192 and (bm, warps) != (128, 8):
        return "192 columns are two products a step: made for 128 rows and 8 warps (256 spill)"
    groups = warps // 4
    if bm < 64 * groups:
        return f"{warps} warps need {64 * groups} rows, bm is {bm}"
    if bm * bn > groups * 128 * 128:
        return f"{bm}x{bn} sums spill the registers of {warps} warps"
    if bm * bn < (16384 if groups == 2 and config.get("form") != "a" else 4096):
        return f"{bm}x{bn} is too little work for {warps} warps"
    return None


def size_reason(case: Case, config: Mapping[str, Any]) -> str | None:
    """Why a tile does not suit the size of C: too small where large ones fill the device many times over."""
    area = config["bm"] * config["bn"]
    if area < 16384 and case["m"] * case["n"] > 3 * SMS * 128 * 128:
        return f"{config['bm']}x{config['bn']} reads its operands too often for a C of this size"
    if config["group"] > 8 and cdiv(case["m"], config["bm"]) <= 8:
        return "there are no more than 8 rows of tiles: the raster is the same as with groups of 8"
    return None


def pipeline_reason(config: Mapping[str, Any], smem: int, blocks: int = 1) -> str | None:
    """Why a pipeline is not worth a try: too shallow where there is room for more, or deeper than helps."""
    stage = (config["bm"] + config["bn"]) * config["bk"] * 2
    if config["bk"] == 128 and config["bm"] * config["bn"] > 16384:
        return "bk of 128 leaves two stages for this tile"
    if config["stages"] * config["bk"] > 512:
        return "more K in flight than helps"
    if smem + 2 * stage * blocks <= SMEM_LIMIT // (1 if config["bm"] * config["bn"] >= 32768 else 2):
        return "two more stages fit: too shallow to compete"
    return None


def share_reason(sums: int, warps: int, blocks: int) -> str | None:
    """Why blocks that add shares of others to ``sums`` do not fit on an SM together, if so. What was compiled
    took 76 to 100 registers a thread beside its sums."""
    threads = 32 * warps
    registers = (sums // threads + 92) * threads * blocks
    if blocks > 1 and registers > 65536:
        return f"{blocks} blocks take about {registers} registers of an SM's 65536"
    return None


def fitting(smem: int, config: Mapping[str, Any], warps: int) -> int:
    """Blocks that fit on an SM, by shared memory and by the registers of the sums (and 40 more a thread)."""
    threads = 32 * warps
    registers = threads * 40 + config["bm"] * config["bn"]
    return max(1, min(233472 // (smem + 1024), 65536 // registers, 2048 // threads, 4))


def pitched(case: Case) -> bool:
    """Whether rows of A and B start on 128 bytes, so that a row of a tensor map's box is one line of L2."""
    return case["k"] % 64 == 0


def tile_time(case: Case, config: Mapping[str, Any], pitched: bool = True) -> float:
    """µs of one tile on an SM of its own, at the share of 6.1 TFLOP/s (an SM's, under power) that the tile's
    wgmma shape and shared-memory traffic allow, and where rows cross lines at the 400 rows of 128 bytes a µs
    that an SM got on an H200: a guess that only ranks."""
    bm, bn = config["bm"], config["bn"]
    area = bm * bn
    share = 1.0 if area >= 24576 else 0.93 if area >= 16384 else 0.80 if area >= 8192 else 0.60
    if bn < bm:
        share *= 0.95 if bn > 64 else 0.65
    compute = 2.0 * area * cdiv(case["k"], config["bk"]) * config["bk"] / (6.1e6 * share)
    return compute if pitched else max(compute, (bm + bn) * cdiv(case["k"], 64) / 400)


def ring_time(case: Case, config: Mapping[str, Any]) -> float:
    """µs that the loads of one tile take however little it computes: a trip to memory (0.8 µs) for every
    ring of stages."""
    return 0.8 * cdiv(case["k"], config["bk"]) / (config["stages"] - 1)


def waves(count: int, slots: int) -> int:
    """Rounds that ``slots`` blocks need for ``count`` tiles."""
    return cdiv(count, slots)


def wave_time(case: Case, config: Mapping[str, Any], blocks: int, pitched: bool = True) -> float:
    """µs of all tiles with ``blocks`` of them sharing an SM, and no less than the operands' bytes take.

    A last wave that does not fill the slots is spread out, so it pays for the fullest SM. Among equals the
    deeper ring comes first."""
    full, rest = divmod(tiles(case, config), SMS * blocks)
    compute, loads = tile_time(case, config, pitched), ring_time(case, config)
    time = full * max(blocks * compute, loads)
    if rest:
        time += max(cdiv(rest, SMS) * compute, loads)
    return max(time, read_time(case)) + 0.5 / (config["stages"] - 1)


def read_time(case: Case) -> float:
    """µs to read both operands once at the device's 4.3 TB/s."""
    return (case["m"] + case["n"]) * case["k"] * 2 / 4.3e6


def ranked(
    configs: Iterable[Mapping[str, Any]],
    cost: Callable[[Mapping[str, Any]], float],
    family: Callable[[Mapping[str, Any]], Hashable],
    count: int,
) -> list[dict[str, Any]]:
    """The cheapest config of each family, the ``count`` cheapest of those, cheapest first."""
    best: dict[Hashable, dict[str, Any]] = {}
    for config in sorted((dict(c) for c in configs), key=cost):
        best.setdefault(family(config), config)
    return list(best.values())[:count]
