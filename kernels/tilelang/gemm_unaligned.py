"""``tilelang/gemm_unaligned``: C = A·Bᵀ where rows start on 2 bytes only (K or N not divisible by 8).

TMA needs rows that start on 16 bytes. So one pass copies A and B into rows padded with zeros to whole TMA
boxes (a workspace; part of every run), the persistent kernel of ``gemm_ws`` multiplies those, and, where N is
odd, stores C with plain predicated stores by way of shared memory. With K divisible by 8 the pass falls away.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _plan as plan
from dsl_bench.kernels.tilelang import gemm_ws

from dsl_bench.backends.tilelang import TilelangSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

SPACE = {
    "bm": (128, 256, 64, 192),
    "bn": (256, 128, 64, 192, 176),
    "stages": (4, 3, 5, 6),
    "cluster": ("1x1", "2x1", "1x2"),
    "group": (8, 16),
    "pack_rows": (8, 16),
    "pack_cols": (512, 256),
}


def build_pack(pack_rows: int, pack_cols: int, dtype: str) -> Any:
    """The prim_func (a [m, k], b [n, k], a_pad [m, kp], b_pad [n, kp]): rows padded with zeros, both matrices
    in one launch. Loads are 2 bytes a lane, coalesced; stores go by way of shared memory."""
    m, n, k, kp = T.dynamic("m"), T.dynamic("n"), T.dynamic("k"), T.dynamic("kp")

    @T.prim_func
    def pack(
        a: T.Tensor((m, k), dtype),
        b: T.Tensor((n, k), dtype),
        a_pad: T.Tensor((m, kp), dtype),
        b_pad: T.Tensor((n, kp), dtype),
    ):
        with T.Kernel(
            T.ceildiv(kp, pack_cols), T.ceildiv(m, pack_rows) + T.ceildiv(n, pack_rows), threads=256
        ) as (col, row):
            tile = T.alloc_shared((pack_rows, pack_cols), dtype)
            if row < T.ceildiv(m, pack_rows):
                for i, j in T.Parallel(pack_rows, pack_cols, coalesced_width=T.int32(1)):
                    tile[i, j] = a[row * pack_rows + i, col * pack_cols + j]
                T.copy(tile, a_pad[row * pack_rows, col * pack_cols])
            else:
                for i, j in T.Parallel(pack_rows, pack_cols, coalesced_width=T.int32(1)):
                    tile[i, j] = b[(row - T.ceildiv(m, pack_rows)) * pack_rows + i, col * pack_cols + j]
                T.copy(tile, b_pad[(row - T.ceildiv(m, pack_rows)) * pack_rows, col * pack_cols])

    return pack


def static(case: Case, config: Config) -> Static:
    """Tiles and ring, whether C can take TMA, whether rows are copied, and the element type."""
    baked = {x: config[x] for x in ("bm", "bn", "stages", "cluster", "pack_rows", "pack_cols")}
    return {
        **baked,
        "direct": case["n"] % 8 != 0,
        "pack": case["k"] % 8 != 0,
        "dtype": plan.ELEMENT[case.dtype],
    }


def source(static: Static, arch: str) -> TilelangSource:
    """The product, and with it the pass over A and B where rows need one."""
    product = {x: static[x] for x in ("bm", "bn", "stages", "cluster", "direct", "dtype")}
    copied = {x: static[x] for x in ("pack_rows", "pack_cols", "dtype")}
    extra = (TilelangSource(build_pack, copied),) if static["pack"] else ()
    return TilelangSource(gemm_ws.build, product, plan.BY_HAND, extra)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Workspace for the padded rows, and one or two launches."""
    import torch

    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    bm, bn, group = (int(config[x]) for x in ("bm", "bn", "group"))
    grid = gemm_ws.grid(case, bm, bn, str(config["cluster"]), group, module.sms)
    if case["k"] % 8 == 0:
        return Call(module.launcher(a, b, c, *grid))
    length = plan.cdiv(case["k"], gemm_ws.BK) * gemm_ws.BK
    a_pad, b_pad = (torch.empty((x.shape[0], length), dtype=x.dtype, device=x.device) for x in (a, b))
    pack = module.extra[0].launcher(a, b, a_pad, b_pad)
    product = module.launcher(a_pad, b_pad, c, *grid)

    def run() -> None:
        pack()
        product()

    return Call(run, keep=(a_pad, b_pad))


def valid(case: Case, config: Config) -> str | None:
    """Rows that need this kernel; shared memory and registers."""
    bm, bn, stages = (int(config[x]) for x in ("bm", "bn", "stages"))
    m, n, k = case["m"], case["n"], case["k"]
    if k % 8 == 0 and n % 8 == 0:
        return "rows start on 16 bytes: the aligned kernels need no copy"
    if reason := plan.size_reason(m * (k + 64), n * (k + 64), m * n):
        return reason
    if k % 8 == 0 and (config["pack_rows"], config["pack_cols"]) != (8, 512):
        return "nothing is copied: the pass's tile does not matter"
    return gemm_ws.shape_reason(case, bm, bn, stages, str(config["cluster"]), int(config["group"]))


def _cost(case: Case, config: Config) -> float:
    """As in gemm_ws, on rows of whole boxes where they are copied."""
    if case["k"] % 8 == 0:
        return gemm_ws.cost(case, config)
    length = plan.cdiv(case["k"], gemm_ws.BK) * gemm_ws.BK
    return gemm_ws.cost(dataclasses.replace(case, params={**case.params, "k": length}), config)


def _ranked(case: Case) -> list[dict[str, Any]]:
    rest = {"group": 8, "pack_rows": 8, "pack_cols": 512}
    shapes = itertools.product(*(SPACE[x] for x in ("bm", "bn", "stages", "cluster")))
    configs = ({"bm": bm, "bn": bn, "stages": s, "cluster": c, **rest} for bm, bn, s, c in shapes)
    return plan.best_tiles(case, configs, valid, _cost)


def default(case: Case) -> Config:
    """The tile with the fewest estimated clocks."""
    return _ranked(case)[0]


def seeds(case: Case) -> Sequence[Config]:
    """The next best tiles, then a larger tile of the copying pass."""
    best, *others = _ranked(case)[:4]
    return [*others, {**best, "pack_rows": 16}]


KERNELS = (
    Kernel(
        id="tilelang/gemm_unaligned",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",), packages=("tilelang>=0.1.15",)),
        files=("_plan.py", "gemm_ws.py"),
        summary="odd K or N: rows copied to 16-byte starts, then the persistent kernel with plain stores",
    ),
)
