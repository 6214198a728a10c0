"""``cuda/gemm_turns``: gemm.cu's ping-pong in whole tiles of 128 rows by 112 to 192 columns, bf16 or fp16.

Two warpgroups take turns on the tensor cores, each with a tile of its own. Under load little else counts than
how many columns the busiest block multiplies, so the widths are those that fill whole waves of many sizes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dsl_bench.kernels.cuda import _tma, gemm
from dsl_bench.kernels.cuda._maps import FETCHES, tiled_map
from dsl_bench.kernels.cuda._plan import INT32_MAX, SMS, Tile, Work, cdiv, gemm_work, store_widths, tma_reason

from dsl_bench.plugin import Call, Case, Config, Kernel, Needs

BM = 128
SPACE: dict[str, Sequence[Any]] = {
    "columns": tuple(range(112, 200, 8)),
    # blocks side by side along M, which share rows of B
    "cluster": (1, 2),
    # rows of tiles that are walked together
    "group": (16, 8, 12, 32),
    # bytes that L2 fetches around a miss
    "fetch": FETCHES[:2],
}
#: columns' worth of work that a turn costs
TURN = 4
#: valid refuses widths by which the busiest block has this many times the columns of the best
JUNK = 1.15


def tile(columns: int) -> Tile:
    """The tile of one warpgroup."""
    return Tile(BM, columns, "pingpong")


def as_gemm(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as ``cuda/gemm`` writes it: whole tiles, the deepest ring."""
    name = f"{BM}x{config['columns']} pingpong"
    stages = tile(config["columns"]).max_stages()
    return {
        "tile": name,
        "cluster": f"{config['cluster']}x1",
        "stages": stages,
        "group": config["group"],
        "splits": 1,
    }


def work_of(case: Case, config: Mapping[str, Any], sms: int = SMS) -> Work:
    """The tiles of a case and who does them."""
    return gemm_work(case, tile(config["columns"]), f"{config['cluster']}x1", config["group"], 1, sms)


@lru_cache(maxsize=4096)
def load(m: int, n: int, columns: int) -> int:
    """Columns that the busiest of 132 blocks multiplies of C [m, n], and what its turns cost."""
    return cdiv(cdiv(m, BM) * cdiv(n, columns), SMS) * (columns + TURN)


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
    m, n = case["m"], case["n"]
    times = load(m, n, config["columns"]) / min(load(m, n, width) for width in SPACE["columns"])
    if times > JUNK:
        return f"{times:.2f} times the columns of the best width"
    return None


def _widths(case: Case) -> list[int]:
    """Widths, the best first."""
    return sorted(SPACE["columns"], key=lambda columns: load(case["m"], case["n"], columns))


def default(case: Case) -> Config:
    """The width that leaves the busiest block the fewest columns."""
    return {"columns": _widths(case)[0], "cluster": 1, "group": 16, "fetch": 128}


def seeds(case: Case) -> Sequence[Config]:
    """The default with another fetch, in clusters, the next widths, and the default with other rasters."""
    first = dict(default(case))
    changes: tuple[dict[str, Any], ...] = (
        {"fetch": 256},
        {"cluster": 2},
        *({"columns": n} for n in _widths(case)[1:4]),
        {"group": 12},
        {"group": 8},
        {"group": 32},
    )
    return [c for c in ({**first, **change} for change in changes) if valid(case, c) is None]


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in; sizes and raster are arguments."""
    return gemm.static(case, as_gemm(config))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps with the fetch asked for, and the launch."""
    columns, cluster, fetch = (int(config[x]) for x in ("columns", "cluster", "fetch"))
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    work = work_of(case, config, module.sms)

    def rows(tensor: Any, box: int) -> bytes:
        sizes, pitch = (tensor.shape[1], tensor.shape[0]), tensor.stride(0) * _tma.ELEMENT
        return tiled_map(tensor.data_ptr(), case.dtype, sizes, (pitch,), (64, box), fetch)

    args = [
        rows(a, BM),
        rows(b, columns // cluster),
        b"".join(_tma.matrix_map(c, case.dtype, (16, width)) for width in store_widths(columns)),
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
        source=gemm.source,
        bind=bind,
        needs=Needs(archs=("sm_90a",)),
        files=(*gemm.FILES, "_maps.py", "gemm.py"),
        summary="whole tiles of 128 rows, ping-pong: two warpgroups take turns on the tensor cores",
    ),
)
