"""``triton/gemm``: C = A·Bᵀ by output tiles, both operands by tensor map, bf16 or fp16 in and out, fp32 sum.

Three forms of one algorithm: ``tile`` (a block a tile), ``persistent`` (blocks walk tiles) and ``flat`` (the
same with tile and K loop fused, so that the loads of the next tile start beneath the epilogue). Tiles of 192
columns are two products a step, of 128 and of 64.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import store_masked, store_tile, tile_at

SPACE = {
    "form": ("flat", "persistent", "tile"),
    "bm": (128, 256, 64),
    "bn": (256, 192, 128, 64),
    "bk": (64, 128),
    "warps": (8, 4),
    "stages": (3, 4, 5, 6),
    "group": (8, 16),
    "sub": (1, 2),
}


@triton.jit
def gemm_tile(
    a, b, c, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """One tile of C a block. a [m, k], b [n, k] and c [m, n] are descriptors."""
    i, j = tile_at(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(k, BK)):
        x = a.load([i * BM, step * BK])
        y = b.load([j * BN, step * BK])
        acc = tl.dot(x, y.T, acc)
    store_tile(c, acc, i * BM, j * BN, BM, BN, SUB)


@triton.jit
def gemm_persistent(
    a, b, c, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr,
    FLAT: tl.constexpr, POINTER: tl.constexpr,
):  # fmt: skip
    """Every block takes each num_programs-th tile. a [m, k] and b [n, k] are descriptors; c [m, n] is one too
    or, with POINTER, a plain pointer."""
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    tiles = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(k, BK)):
            x = a.load([i * BM, step * BK])
            y = b.load([j * BN, step * BK])
            acc = tl.dot(x, y.T, acc)
        if POINTER:
            store_masked(c, acc, i * BM, j * BN, m, n, BM, BN)
        else:
            store_tile(c, acc, i * BM, j * BN, BM, BN, SUB)


@triton.jit
def gemm_wide(
    a, b, b2, c, c2, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """gemm_persistent with tiles of BN + BX columns, the first by ``b`` and ``c``, the others by ``b2`` and
    ``c2`` (descriptors of the same matrices). The loops stay two: fused, Triton clears one of two sums by a
    select, and every wgmma waits for it."""
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN + BX)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        row = i * BM
        col = j * (BN + BX)
        acc = tl.zeros((BM, BN), tl.float32)
        acc2 = tl.zeros((BM, BX), tl.float32)
        for step in range(tl.cdiv(k, BK)):
            x = a.load([row, step * BK])
            y = b.load([col, step * BK])
            y2 = b2.load([col + BN, step * BK])
            acc = tl.dot(x, y.T, acc)
            acc2 = tl.dot(x, y2.T, acc2)
        store_tile(c, acc, row, col, BM, BN, SUB)
        store_tile(c2, acc2, row, col + BN, BM, BX, SUB)


def static(case: Case, config: Config) -> Static:
    """The whole config; shapes stay runtime values."""
    return {**{x: config[x] for x in SPACE}, "dtype": case.dtype}


def maps(static: Static) -> dict[str, str]:
    """The types of a tile's descriptors: a, b and c, and b2 and c2 where the columns are two parts."""
    bm, bk, sub = static["bm"], static["bk"], static["sub"]
    t = common.element(static["dtype"])
    bn, bx = common.split_columns(static["bn"])
    out = {
        "a": f"tensordesc<{t}[{bm},{bk}]>",
        "b": f"tensordesc<{t}[{bn},{bk}]>",
        "c": f"tensordesc<{t}[{bm},{bn // sub}]>",
    }
    if bx:
        out |= {"b2": f"tensordesc<{t}[{bx},{bk}]>", "c2": f"tensordesc<{t}[{bm},{bx // sub}]>"}
    return out


def descriptors(
    config: Config, sub: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The descriptors of ``maps``, in a kernel's order: a, b, (b2,) c (, c2)."""
    bm, bk = int(config["bm"]), int(config["bk"])
    columns = [x for x in common.split_columns(int(config["bn"])) if x]
    return (
        common.descriptor(inputs["a"], bm, bk),
        *(common.descriptor(inputs["b"], x, bk) for x in columns),
        *(common.descriptor(outputs["c"], bm, x // sub) for x in columns),
    )


def source(static: Static, arch: str) -> TritonSource:
    """The form's function for one specialisation."""
    bn, bx = common.split_columns(static["bn"])
    form = static["form"]
    if bx:
        fn, more = gemm_wide, {"BX": bx}
    elif form == "tile":
        fn, more = gemm_tile, {}
    else:
        fn, more = gemm_persistent, {"FLAT": form == "flat", "POINTER": False}
    baked = {"BM": static["bm"], "BN": bn, "BK": static["bk"], "GROUP": static["group"], "SUB": static["sub"]}
    return TritonSource(
        fn=fn,
        signature={**maps(static), **dict.fromkeys(("m", "n", "k"), "i32")},
        constexprs={**baked, **more},
        options={"num_warps": static["warps"], "num_stages": static["stages"]},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Descriptors and grid: a block a tile, or as many blocks as fit on the device at once."""
    tiles = common.tiles(case, config)
    grid = tiles if config["form"] == "tile" else min(tiles, module.sms * module.blocks_per_sm)
    maps = descriptors(config, int(config["sub"]), inputs, outputs)
    return Call(module.launcher((grid,), *maps, case["m"], case["n"], case["k"]))


def _smem(config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: the ring, and where loads run beneath the epilogue also the staged C."""
    bm, bn = config["bm"], config["bn"]
    ring = config["stages"] * (bm + bn) * config["bk"] * 2
    staged = bm * bn * 2 // config["sub"]
    return (max(ring, staged) if config["form"] == "tile" else ring + staged) + 512


def valid(case: Case, config: Config) -> str | None:
    """Rules of tensor maps, shared memory and registers, then those of each form."""
    reason = common.tma_reason(K=case["k"], N=case["n"]) or common.tile_reason(config)
    reason = reason or common.size_reason(case, config)
    if reason:
        return reason
    smem = _smem(config)
    if smem > common.SMEM_LIMIT:
        return f"about {smem} bytes of shared memory, over {common.SMEM_LIMIT}"
    return _form_reason(config) or common.pipeline_reason(config, smem)


def _form_reason(config: Config) -> str | None:
    form, area = config["form"], int(config["bm"]) * int(config["bn"])
    if form == "tile" and config["warps"] == 8 and area >= 16384:
        return "Triton 3.6 lets every wgmma of this loop wait for the one before"
    if config["bn"] == 192 and form != "persistent":
        return "tiles of 192 columns are walked by blocks, with two loops"
    if form == "persistent" and area < 16384:
        return "small tiles: one block a tile, or loads beneath the epilogue, but not neither"
    if config["sub"] == 2 and area < 24576:
        return "a small C tile needs no slicing"
    if config["sub"] == 2 and form == "tile":
        return "without loads beneath the epilogue slicing C saves nothing"
    return None


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs: waves of tiles at the tile's rate, and what each form leaves of prologue and epilogue."""
    form = config["form"]
    fit = common.fitting(_smem(config), config, int(config["warps"]))
    time = common.wave_time(case, config, fit, common.pitched(case))
    exposed = {"flat": 0.3, "persistent": 0.8, "tile": 1.2}[form] / fit
    return time + exposed * common.waves(common.tiles(case, config), common.SMS * fit) + 3.0


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile and form by the cost model, best first."""
    return common.ranked(
        (c for c in KERNEL.configs() if valid(case, c) is None),
        lambda c: _cost(case, c),
        lambda c: (c["form"], c["bm"], c["bn"]),
        8,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the usual tile where no config is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/gemm",
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
    summary="tiles of C by tensor maps: persistent, flattened or one block a tile",
)
KERNELS = (KERNEL,)
