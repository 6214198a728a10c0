"""``triton/gemm_pointer``: C = A·Bᵀ for rows that start on 16 but not on 128 bytes, loaded beside the TMA unit.

A tensor map's box of such rows touches two 128-byte lines a row, and the TMA unit's rate is one of lines. So
one operand or both come by pointers instead, which the compiler pipelines into 16-byte asynchronous copies
through the load/store unit; ``mixed`` keeps A on the TMA unit and ``mixed_b`` B, so that the two units
share the work. Tiles of 192 columns are two products a step, of 128 and of 64. Limited by issue slots of the copies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import store_tile, tile_at

SPACE = {
    "loads": ("pointer", "mixed", "mixed_b", "maps"),
    "bm": (128, 256),
    "bn": (256, 192, 128),
    "warps": (8,),
    "stages": (3, 4, 5),
    "group": (8, 4, 16),
}
#: K elements a step: 128 bytes
BK = 64


@triton.jit
def rows_at(base, first, limit, k, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Pointers [COUNT, STEP] to the first elements of COUNT rows of k from ``first`` on; beyond ``limit``,
    of the last row again."""
    rows = tl.minimum(first + tl.arange(0, COUNT), limit - 1)
    return base + rows[:, None] * k + tl.arange(0, STEP)[None, :]


@triton.jit
def gemm_pointer(
    a, b, c, m, n, k8,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr,
    A_MAP: tl.constexpr, B_MAP: tl.constexpr,
):  # fmt: skip
    """Every block takes each num_programs-th tile. a [m, 8·k8] and b [n, 8·k8] are descriptors where their map
    is set, else pointers to rows; c [m, n] is a descriptor."""
    k = k8 * 8
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        if not A_MAP:
            at_a = rows_at(a, i * BM, m, k, BM, STEP)
        if not B_MAP:
            at_b = rows_at(b, j * BN, n, k, BN, STEP)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(k, STEP)):
            inside = (tl.arange(0, STEP) < k - step * STEP)[None, :]
            if A_MAP:
                x = a.load([i * BM, step * STEP])
            else:
                x = tl.load(at_a, mask=inside, other=0.0)
                at_a += STEP
            if B_MAP:
                y = b.load([j * BN, step * STEP])
            else:
                y = tl.load(at_b, mask=inside, other=0.0)
                at_b += STEP
            acc = tl.dot(x, y.T, acc)
        store_tile(c, acc, i * BM, j * BN, BM, BN, SUB)


@triton.jit
def gemm_pointer_wide(
    a, b, b2, c, m, n, k8,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    A_MAP: tl.constexpr, B_MAP: tl.constexpr,
):  # fmt: skip
    """gemm_pointer with tiles of BN + BX columns; ``b2`` is b once more, with boxes of BX rows where it is a
    map. ``c`` has boxes of BX columns, and BN is two of them."""
    k = k8 * 8
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN + BX)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        col = j * (BN + BX)
        if not A_MAP:
            at_a = rows_at(a, i * BM, m, k, BM, STEP)
        if not B_MAP:
            at_b = rows_at(b, col, n, k, BN, STEP)
            at_b2 = rows_at(b2, col + BN, n, k, BX, STEP)
        acc = tl.zeros((BM, BN), tl.float32)
        acc2 = tl.zeros((BM, BX), tl.float32)
        for step in range(tl.cdiv(k, STEP)):
            inside = (tl.arange(0, STEP) < k - step * STEP)[None, :]
            if A_MAP:
                x = a.load([i * BM, step * STEP])
            else:
                x = tl.load(at_a, mask=inside, other=0.0)
                at_a += STEP
            if B_MAP:
                y = b.load([col, step * STEP])
                y2 = b2.load([col + BN, step * STEP])
            else:
                y = tl.load(at_b, mask=inside, other=0.0)
                y2 = tl.load(at_b2, mask=inside, other=0.0)
                at_b += STEP
                at_b2 += STEP
            acc = tl.dot(x, y.T, acc)
            acc2 = tl.dot(x, y2.T, acc2)
        store_tile(c, acc, i * BM, col, BM, BN, 2)
        store_tile(c, acc2, i * BM, col + BN, BM, BX, 1)


def _maps(loads: str) -> tuple[bool, bool]:
    """Whether A and B come by tensor map."""
    return loads in ("mixed", "maps"), loads in ("mixed_b", "maps")


def _box(config: Mapping[str, Any]) -> int:
    """Columns of C that one store takes."""
    return 64 if config["bn"] == 192 else config["bn"] // 2


def static(case: Case, config: Config) -> Static:
    """The whole config; shapes stay runtime values."""
    return {**{x: config[x] for x in SPACE}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation."""
    bm, t = static["bm"], common.element(static["dtype"])
    bn, bx = common.split_columns(static["bn"])
    a_map, b_map = _maps(static["loads"])

    def operand(rows: int, mapped: bool) -> str:
        return f"tensordesc<{t}[{rows},{BK}]>" if mapped else f"*{t}"

    signature = {"a": operand(bm, a_map), "b": operand(bn, b_map)}
    if bx:
        signature["b2"] = operand(bx, b_map)
    signature |= {"c": f"tensordesc<{t}[{bm},{_box(static)}]>", "m": "i32", "n": "i32", "k8": "i32"}
    baked = {"BM": bm, "BN": bn, "STEP": BK, "GROUP": static["group"], "A_MAP": a_map, "B_MAP": b_map}
    return TritonSource(
        fn=gemm_pointer_wide if bx else gemm_pointer,
        signature=signature,
        constexprs={**baked, **({"BX": bx} if bx else {"SUB": 2})},
        attrs={name: 16 for name in ("a", "b", "b2") if signature.get(name, "").startswith("*")},
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors of what comes by map, and as many blocks as fit on the device at once."""
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    bm, (bn, bx) = int(config["bm"]), common.split_columns(int(config["bn"]))
    a_map, b_map = _maps(str(config["loads"]))
    operands = [common.descriptor(a, bm, BK) if a_map else a]
    operands += [common.descriptor(b, rows, BK) if b_map else b for rows in (bn, bx) if rows]
    grid = min(common.tiles(case, config), module.sms * module.blocks_per_sm)
    sizes = (case["m"], case["n"], case["k"] // 8)
    return Call(module.launcher((grid,), *operands, common.descriptor(c, bm, _box(config)), *sizes))


def _smem(config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: the ring, and the slices of C on their way out."""
    bm, bn = config["bm"], config["bn"]
    return int(config["stages"] * (bm + bn) * BK * 2 + bm * _box(config) * 2 + 512)


def valid(case: Case, config: Config) -> str | None:
    """Rows on 16 but not on 128 bytes; then shared memory and registers."""
    reason = common.tma_reason(K=case["k"], N=case["n"])
    if reason:
        return reason
    if common.pitched(case):
        return "rows start on 128 bytes: tensor maps read a line a row"
    if common.wide(case):
        return "an offset exceeds 32 bits"
    bm, bn, loads = config["bm"], config["bn"], config["loads"]
    if bm * bn > 128 * 256 and not (bn == 192 and loads in ("mixed", "maps")):
        return f"{bm}x{bn} sums and pointers to their operands spill the registers of 8 warps"
    if loads == "maps" and (bm, bn) != (256, 192):
        return "triton/gemm does this tile by tensor maps"
    if _smem(config) > common.SMEM_LIMIT:
        return f"about {_smem(config)} bytes of shared memory, over {common.SMEM_LIMIT}"
    if _smem({**config, "stages": config["stages"] + 1}) <= common.SMEM_LIMIT and config["stages"] < 5:
        return "one more stage fits: too shallow to compete"
    return None


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated clocks: waves of tiles at the slowest of tensor cores (2048 products a clock), the TMA unit
    (3.8 clocks a row of a box) and the load/store unit (64 bytes a clock)."""
    bm, bn = config["bm"], config["bn"]
    a_map, b_map = _maps(config["loads"])
    rows = bm * a_map + bn * b_map
    step = max(bm * bn * BK / 2048, rows * 3.8, (bm + bn - rows) * 2.0) + 60
    waves = common.cdiv(common.tiles(case, config), common.SMS)
    return float(waves * (common.cdiv(case["k"], BK) * step + 2500))


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile and way of loading by the cost model, best first."""
    return common.ranked(
        (c for c in KERNEL.configs() if valid(case, c) is None),
        lambda c: _cost(case, c),
        lambda c: (c["loads"], c["bm"], c["bn"]),
        10,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the usual tile where no config is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/gemm_pointer",
    workload="gemm",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py",),
    summary="rows off 128 bytes: an operand or both by asynchronous copies instead of tensor maps",
)
KERNELS = (KERNEL,)
