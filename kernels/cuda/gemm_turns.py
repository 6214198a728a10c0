"""``cuda/gemm_turns``: GEMM in tiles of 128 rows by 112 to 192 columns, bf16 or fp16. Device: gemm_turns.cu.

Two warpgroups take turns on the tensor cores, each with a tile of its own. Under load little else counts than
how many columns the busiest block multiplies, so the widths are those that fill whole waves of many sizes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _tma
from dsl_bench.kernels.cuda._plan import (
    INT32_MAX,
    SMEM_LIMIT,
    SMS,
    STORE_BYTES,
    Tile,
    Work,
    cdiv,
    gemm_work,
    tma_reason,
)

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs

BM = 128
SPACE: dict[str, Sequence[Any]] = {
    "columns": tuple(range(112, 200, 8)),
    # blocks side by side along M, which share rows of B
    "cluster": (1, 2),
    # rows of tiles that are walked together
    "group": (16, 8, 32, 4),
    # k-blocks before its load that L2 is asked for a box
    "ahead": (0, 8),
}
#: columns' worth of work that a turn costs
TURN = 4
#: valid refuses widths by which the busiest block has this many times the columns of the best
JUNK = 1.15


def tile(columns: int) -> Tile:
    """The tile of one warpgroup."""
    return Tile(BM, columns, "pingpong")


def ring(columns: int) -> tuple[int, int, int]:
    """Stages, store buffers a warpgroup and bytes of shared memory: the deepest ring that leaves each one."""
    stage, barriers = tile(columns).stage_bytes, 256
    stages = (SMEM_LIMIT - barriers - 2 * STORE_BYTES) // stage
    left = SMEM_LIMIT - barriers - stages * stage
    buffers = min(2 * cdiv(columns, 64), left // (2 * STORE_BYTES))
    return stages, buffers, stages * stage + 2 * buffers * STORE_BYTES + barriers


def work_of(case: Case, config: Mapping[str, Any], sms: int = SMS) -> Work:
    """The tiles of a case and who does them."""
    return gemm_work(case, tile(config["columns"]), f"{config['cluster']}x1", config["group"], 1, sms)


def load(case: Case, columns: int) -> int:
    """Columns that the busiest of 132 blocks multiplies, and what its turns cost."""
    work = work_of(case, {"columns": columns, "cluster": 1, "group": 8})
    return cdiv(work.tiles, work.clusters) * (columns + TURN)


def valid(case: Case, config: Config) -> str | None:
    """None, or why this kernel cannot or need not do ``case`` with ``config``."""
    reason = tma_reason(K=case["k"], N=case["n"])
    if reason:
        return reason
    if max(case["m"], case["n"], case["k"]) > INT32_MAX - 1024:
        return "a size exceeds 32 bits"
    if case["m"] <= BM:
        return f"M = {case['m']} is one row of tiles: cuda/gemm_skinny and cuda/gemm are for that"
    work = work_of(case, config)
    if work.tiles * work.k_blocks > INT32_MAX:
        return "more k-blocks in all tiles than an int counts"
    if work.tiles <= work.clusters:
        return "no block has two tiles: there are no turns to take"
    least = min(load(case, n) for n in SPACE["columns"])
    if load(case, config["columns"]) > JUNK * least:
        return f"{load(case, config['columns']) / least:.2f} times the columns of the best width"
    return None


def _widths(case: Case) -> list[int]:
    """Widths, the best first."""
    return sorted(SPACE["columns"], key=lambda n: load(case, n))


def default(case: Case) -> Config:
    """The width that leaves the busiest block the fewest columns."""
    return {"columns": _widths(case)[0], "cluster": 1, "group": 16, "ahead": 0}


def seeds(case: Case) -> Sequence[Config]:
    """The default with its rows asked for ahead, in clusters and with another raster, and the next widths."""
    first = dict(default(case))
    changes: tuple[dict[str, Any], ...] = (
        {"ahead": 8},
        {"cluster": 2},
        {"cluster": 2, "ahead": 8},
        *({"columns": n} for n in _widths(case)[1:3]),
        {"group": 32},
    )
    return [c for c in ({**first, **change} for change in changes) if valid(case, c) is None]


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in; sizes and raster are arguments."""
    return {name: int(config[name]) for name in ("columns", "cluster", "ahead")} | {
        "bf16": int(case.dtype == "bf16")
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """gemm_turns.cu with its macros."""
    stages, buffers, smem = ring(static["columns"])
    defines = {
        "BN": static["columns"],
        "STAGES": stages,
        "CLUSTER_M": static["cluster"],
        "AHEAD": static["ahead"],
        "STORE_BUFFERS": buffers,
        "BF16": static["bf16"],
        "SMEM_BYTES": smem,
    }
    file = Path(__file__).with_name("gemm_turns.cu")
    return CudaSource(file, "gemm_turns", defines, (), smem, 384, (static["cluster"], 1, 1))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps and the launch."""
    columns, cluster = int(config["columns"]), int(config["cluster"])
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    work = work_of(case, config, module.sms)
    # a warp's rows, 128 bytes of each; what 64 does not divide of a tile's columns has a map of its own
    widths = (64, columns % 64) if columns % 64 else (64,)
    args = [
        _tma.matrix_map(a, case.dtype, (BM, 64)),
        _tma.matrix_map(b, case.dtype, (columns // cluster, 64)),
        b"".join(_tma.matrix_map(c, case.dtype, (16, width)) for width in widths),
        work.pack(0, 0),
    ]
    return Call(module.launcher((work.launched * cluster,), args), keep=(a, b, c))


KERNELS = (
    Kernel(
        id="cuda/gemm_turns",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",)),
        files=("gemm_turns.cu", "tiles.cuh", "ptx.cuh", "wgmma.cuh", "_plan.py", "_tma.py"),
        summary="whole tiles of 128 rows, ping-pong: two warpgroups take turns on the tensor cores",
    ),
)
