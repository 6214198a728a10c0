"""What the GEMM kernels share on the host: rules of TMA, the ranking of tiles, and how tiles are split.

Touches no GPU and imports no DSL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dsl_bench.plugin import Case

#: shared memory a block may use on sm_90, bytes
SMEM_LIMIT = 232448
#: SMs of an H200; the cost model ranks with it, grids use the device's own number
SMS = 132
#: TileLang's names of the element types
ELEMENT = {"bf16": "bfloat16", "fp16": "float16"}
#: hand-specialised kernels: TileLang must not specialise them a second time
BY_HAND = {"tl.disable_warp_specialized": True}

#: FLOP a clock of one SM, dense bf16 and fp16
_FLOP = 4096
#: bytes a clock of one SM from shared memory and from L2
_SMEM_BYTES, _L2_BYTES = 128, 64
#: clocks of one 128-byte row of a TMA box whose pitch is no multiple of 128 bytes (two L2 lines a row): four
#: tile shapes of gemm and gemm_ws at 4000x4104x4072 on an H200 fit it within 3 %, with and without multicast
_ODD_ROW = 3.6
#: elements: what an operand's load costs in clock rate under the power limit, a little more than nothing
_POWER = 15
#: clocks until the first operand of a block has come, and from the last product to the stored tile
_START, _FINISH = 1500, 600
#: clocks that a split tile costs its last owner: a partial written, a fence, the others' read
_FIXUP = 3000


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def tma_reason(k: int, n: int) -> str | None:
    """Why TMA cannot take rows of k and of n elements of 2 bytes, or None."""
    for name, length in (("K", k), ("N", n)):
        if length % 8:
            return f"{name}={length}: TMA needs rows that start on 16 bytes, so {name} divisible by 8"
    return None


def size_reason(*counts: int) -> str | None:
    """Why 32-bit indices cannot walk tensors of these element counts, or None."""
    if max(counts) >= 2**31:
        return f"{max(counts)} elements are too many for 32-bit indices"
    return None


def smem_reason(nbytes: int) -> str | None:
    """Why a block cannot have ``nbytes`` of shared memory (barriers apart), or None."""
    if nbytes + 1024 > SMEM_LIMIT:
        return f"{nbytes} bytes of shared memory, over {SMEM_LIMIT}"
    return None


def chunk(bn: int) -> int:
    """Columns of C that are staged at a time: 64 (one 128-byte swizzle atom), or the whole narrower tile."""
    return min(64, bn)


def chunks(bn: int) -> list[int]:
    """First columns of the chunks of C. Where 64 does not divide the tile, the last chunk reaches back and
    writes some columns once more, with the same values: every chunk is whole."""
    width = chunk(bn)
    return [min(i * width, bn - width) for i in range(cdiv(bn, width))]


def ring_bytes(bm: int, bn: int, bk: int, stages: int) -> int:
    """Bytes of the operand ring."""
    return stages * (bm + bn) * bk * 2


def buffers(bm: int, bn: int, bk: int, stages: int) -> int:
    """C's staging buffers of one chunk in the persistent kernels: two where the ring leaves room for them and
    there is more than one chunk."""
    two = ring_bytes(bm, bn, bk, stages) + 2 * bm * chunk(bn) * 2
    return 2 if chunk(bn) < bn and smem_reason(two) is None else 1


def staging_bytes(bm: int, bn: int, bk: int, stages: int) -> int:
    """Bytes of C's staging."""
    return buffers(bm, bn, bk, stages) * bm * chunk(bn) * 2


def persistent_bytes(bm: int, bn: int, bk: int, stages: int) -> int:
    """Shared memory of a persistent kernel, barriers apart."""
    return ring_bytes(bm, bn, bk, stages) + staging_bytes(bm, bn, bk, stages)


def consumers(bm: int) -> int:
    """Consumer warpgroups of a tile: 64 rows each up to three, 128 rows each of 256."""
    return {64: 1, 192: 3}.get(bm, 2)


def register_reason(bm: int, bn: int) -> str | None:
    """Why the fp32 sums of a tile do not fit a consumer's registers, or None. Two consumers have 240; ptxas
    refuses a single wgmma of three consumers that needs more than the 128 registers of 512 threads."""
    per_thread = bm * bn // (128 * consumers(bm))
    limit = 192 if bm == 256 else 96 if bm == 192 else 128
    return f"{per_thread} fp32 sums a thread, over {limit}" if per_thread > limit else None


def odd_pitch(k: int) -> bool:
    """Whether rows of k elements of 2 bytes start anywhere in an L2 line."""
    return k * 2 % 128 != 0


def step_clocks(bm: int, bn: int, bk: int, odd: bool = False, rows: int = 0) -> float:
    """Clocks of one K step of a tile: the slowest of tensor cores, shared memory and loading (``rows`` that a
    block issues, where not all)."""
    math = 2 * bm * bn * bk / _FLOP
    shared = (bk / 16) * (bm / 64) * (64 + bn) * 32 / _SMEM_BYTES
    rows = rows or bm + bn
    load = rows * bk * 2 / _L2_BYTES
    return max(math, shared, rows * bk / 64 * _ODD_ROW if odd else load)


def tile_clocks(case: Case, bm: int, bn: int, bk: int, persistent: bool, rows: int = 0) -> float:
    """Clocks of one whole tile, epilogue and (where nothing hides it) the start included."""
    work = cdiv(case["k"], bk) * step_clocks(bm, bn, bk, odd_pitch(case["k"]), rows)
    return work + _FINISH + bm * bn / 64 + (0 if persistent else _START)


def clocks(
    case: Case,
    bm: int,
    bn: int,
    bk: int,
    persistent: bool = True,
    cluster: tuple[int, int] = (1, 1),
    rows: int = 0,
) -> float:
    """Clocks of the product: waves of whole tiles over all SMs; clusters of (rows, columns) of tiles;
    ``rows`` of both operands that a block issues in a K step, where not all."""
    tiles = cdiv(cdiv(case["m"], bm), cluster[0]) * cdiv(cdiv(case["n"], bn), cluster[1])
    waves = cdiv(tiles, SMS // (cluster[0] * cluster[1]))
    traffic = 1 + _POWER * (1 / bm + 1 / bn)
    return traffic * waves * tile_clocks(case, bm, bn, bk, persistent, rows) + _START


def waste(m: int, n: int, bm: int, bn: int) -> float:
    """Multiply-adds of all waves of whole tiles over those of the product."""
    return cdiv(cdiv(m, bm) * cdiv(n, bn), SMS) * SMS * bm * bn / (m * n)


def fixup(bm: int, bn: int, parts: int) -> float:
    """Clocks that the last owner of a tile cut into ``parts`` spends on adding them up."""
    return _FIXUP + bm * bn / 8 * parts


def split_clocks(case: Case, bm: int, bn: int, bk: int) -> float:
    """Clocks of the product when the last tiles are split evenly over all SMs."""
    tiles = cdiv(case["m"], bm) * cdiv(case["n"], bn)
    traffic = 1 + _POWER * (1 / bm + 1 / bn)
    return traffic * (tiles / SMS * tile_clocks(case, bm, bn, bk, True) + _START) + 4 * fixup(bm, bn, 3)


def split_plan(tiles: int, iters: int, ctas: int, waves: int) -> tuple[int, int]:
    """(tiles that are done whole, K steps a block takes of the others).

    The split part is the ragged last wave and ``waves`` full waves before it; 0 steps where the tiles come
    out even, or where there would be nothing left to win.
    """
    ragged = tiles % ctas
    if ragged == 0:
        return tiles, 0
    whole = max(0, tiles - ragged - waves * ctas)
    return whole, cdiv((tiles - whole) * iters, ctas)


def best_tiles(
    case: Case,
    configs: Iterable[dict[str, Any]],
    valid: Callable[[Case, Mapping[str, Any]], str | None],
    cost: Callable[[Case, Mapping[str, Any]], float],
) -> list[dict[str, Any]]:
    """The cheapest valid config of each tile shape, best first; where none is valid, the first given."""
    given = list(configs)
    usable = sorted((c for c in given if valid(case, c) is None), key=lambda c: cost(case, c))
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for config in usable:
        best.setdefault((config["bm"], config["bn"]), config)
    return list(best.values()) or given[:1]
