"""``triton/gemm_unaligned``: C = A·Bᵀ by pointers alone, for rows that start anywhere (odd N and K).

Such rows have no tensor map, and no asynchronous copy either (that moves 4 bytes at least): elements go one
by one through registers into shared memory. Every element is moved again for each tile that needs it, which
is what ``triton/gemm_repack`` avoids. Any unaligned shape, any architecture.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import store_masked, tile_at

SPACE = {
    "bm": (128, 64),
    "bn": (128, 64),
    "bk": (32, 64),
    "warps": (8, 4),
    "ahead": (True, False),
    "group": (8, 4),
}


@triton.jit
def gemm_unaligned(
    a, b, c, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of C a block; a [m, k], b [n, k] and c [m, n] are pointers. AHEAD: the loads of the next K
    step are issued before the product of this one. Rows past the end repeat the last, and their sums are
    not stored."""
    i, j = tile_at(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    at = tl.arange(0, BK)[None, :]
    x_at = tl.minimum(i * BM + tl.arange(0, BM), m - 1)[:, None] * k + at
    y_at = tl.minimum(j * BN + tl.arange(0, BN), n - 1)[:, None] * k + at
    acc = tl.zeros((BM, BN), tl.float32)
    if AHEAD:
        x = tl.load(a + x_at, mask=at < k, other=0.0)
        y = tl.load(b + y_at, mask=at < k, other=0.0)
        for start in range(BK, k, BK):
            x_next = tl.load(a + start + x_at, mask=at < k - start, other=0.0)
            y_next = tl.load(b + start + y_at, mask=at < k - start, other=0.0)
            acc = tl.dot(x, y.T, acc)
            x = x_next
            y = y_next
        acc = tl.dot(x, y.T, acc)
    else:
        for start in range(0, k, BK):
            x = tl.load(a + start + x_at, mask=at < k - start, other=0.0)
            y = tl.load(b + start + y_at, mask=at < k - start, other=0.0)
            acc = tl.dot(x, y.T, acc)
    store_masked(c, acc, i * BM, j * BN, m, n, BM, BN)


def static(case: Case, config: Config) -> Static:
    """The whole config; shapes stay runtime values, and nothing is promised about them."""
    return {**{x: config[x] for x in SPACE}, "dtype": case.dtype}


def source(static: Static, arch: str) -> TritonSource:
    """The function for one specialisation."""
    t = common.element(static["dtype"])
    return TritonSource(
        fn=gemm_unaligned,
        signature={**dict.fromkeys("abc", f"*{t}"), **dict.fromkeys("mnk", "i32")},
        constexprs={
            "BM": static["bm"],
            "BN": static["bn"],
            "BK": static["bk"],
            "GROUP": static["group"],
            "AHEAD": static["ahead"],
        },
        attrs=dict.fromkeys("abc", 16),
        options={"num_warps": static["warps"], "num_stages": 1},
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """A block a tile."""
    grid = (common.tiles(case, config),)
    sizes = (case["m"], case["n"], case["k"])
    return Call(module.launcher(grid, inputs["a"], inputs["b"], outputs["c"], *sizes))


def valid(case: Case, config: Config) -> str | None:
    """Unaligned rows, 32-bit offsets, and a tile whose loads fit in registers beside its sums."""
    if common.aligned(case):
        return "every row starts on 16 bytes: the kernels on tensor maps need none of this"
    if common.wide(case):
        return "offsets exceed 32 bits"
    bm, bn, bk, warps = (int(config[x]) for x in ("bm", "bn", "bk", "warps"))
    if bm < 16 * warps:
        return f"{warps} warps need {16 * warps} rows, bm is {bm}"
    threads = 32 * warps
    loads = (bm + bn) * bk // threads
    if loads * (2 if config["ahead"] else 1) > 96 or loads > 64 or bm * bn // threads > 64:
        return f"{loads} loads a thread and {bm * bn // threads} sums spill registers"
    return None


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs: a load and a store for 32 elements, one of either a clock, for every tile."""
    bm, bn, bk = config["bm"], config["bn"], config["bk"]
    moves = common.tiles(case, config) * common.cdiv(case["k"], bk) * (bm + bn) * bk / 32 * 2
    full = common.waves(common.tiles(case, config), common.SMS) * common.SMS / common.tiles(case, config)
    return moves / common.SMS / 1.7e3 * full * (1.0 if config["ahead"] else 1.2) + 4.0


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile by the cost model, best first."""
    return common.ranked(
        (c for c in KERNEL.configs() if valid(case, c) is None),
        lambda c: _cost(case, c),
        lambda c: (c["bm"], c["bn"], c["ahead"]),
        5,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the first point of the space where no config is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/gemm_unaligned",
    workload="gemm",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(packages=("triton>=3.6",)),
    files=("_common.py",),
    summary="any alignment: elements one by one through registers",
)
KERNELS = (KERNEL,)
