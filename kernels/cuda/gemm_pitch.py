"""``cuda/gemm_pitch``: GEMM for rows an odd multiple of 16 bytes apart, bf16 or fp16. Device: gemm_pitch.cu.

There, nearly every 128-byte row of a TMA box touches two lines of L2, and lines are what limits. What helps:
fetches of no more than that (a tensor map may ask the L2 for 256 bytes around a box, which here is a second
pair of lines); operands shared in a cluster; tiles that take every eighth row of A, which all lie the same
way in their lines; and tiles of any 16 rows, with the operands swapped, so that few waves are filled.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _tma, gemm
from dsl_bench.kernels.cuda._pitch import Classes, Shape, pitch_clocks, pitch_work
from dsl_bench.kernels.cuda._plan import INT32_MAX, blocks_of, cut_reason, ranked, spread, tma_reason

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, KernelFault, Needs

#: rows × columns of C, the former any 16
SWAPPED = (
    *("288x128", "240x128", "224x128", "208x128", "176x128", "160x128", "144x128"),
    *("192x256", "176x256", "160x256", "144x256", "176x192", "160x192", "144x192"),
)
SPACE: dict[str, Sequence[Any]] = {
    "tile": (*gemm.SPACE["tile"], *(f"{t} swapped" for t in SWAPPED)),
    "cluster": ("2x1", "1x2", "1x1", "4x1", "1x4"),
    # every n-th row of A a tile
    "stride": (1, 8, 4),
    "stages": (3, 4, 5, 6, 7, 8),
    "group": (8, 16),
    "splits": (1, 0),
    # bytes that the L2 fetches around a box row; 0: what the row needs
    "fetch": (128, 0),
}
#: valid refuses what the cost model thinks this many times as long as the best, and this many clocks longer
JUNK, JUNK_CLOCKS = 1.15, 8000


def _sizes(case: Case) -> tuple[int, int, int]:
    return case["m"], case["n"], case["k"]


def valid(case: Case, config: Config) -> str | None:
    """None, or why this kernel cannot or need not do ``case`` with ``config``."""
    reason = tma_reason(K=case["k"], N=case["n"]) or _reason(_sizes(case), config)
    if reason:
        return reason
    if config["group"] != 8 and case["m"] <= 8 * Shape.of(config["tile"]).bm:
        return "there are no more than 8 rows of tiles: the raster is the same as with groups of 8"
    clocks, best = _clocks(_sizes(case), config), _best(_sizes(case))
    if clocks < max(JUNK * best, best + JUNK_CLOCKS):
        return None
    return f"{clocks / best:.1f} times the estimated time of the best"


def _reason(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> str | None:
    """Why these sizes cannot be done, whatever the time."""
    (m, n, k), stride, splits = sizes, int(config["stride"]), int(config["splits"])
    if k % 64 == 0:
        return "rows start on 128 bytes: nothing that cuda/gemm lacks"
    shape, cluster = Shape.of(config["tile"]), str(config["cluster"])
    reason = shape.reason(cluster, int(config["stages"]))
    if reason:
        return reason
    if max(sizes) > INT32_MAX - 1024:
        return "a size exceeds 32 bits"
    if stride > 1 and m < 64 * stride:
        return f"classes of every {stride}th row hold less than 64 rows"
    cm, cn = blocks_of(cluster)
    if (cm > 1 and Classes.of(m, k, shape.bm, stride).tiles < cm) or (cn > 1 and n <= (cn - 1) * shape.bn):
        return f"too few tiles along {'M' if cm > 1 else 'N'} for a cluster to share"
    work, _ = pitch_work(sizes, shape, cluster, int(config["group"]), 1, stride)
    return cut_reason(work, splits, cm * cn * shape.bm * shape.bn * 4)


def _clocks(sizes: tuple[int, int, int], config: Mapping[str, Any]) -> float:
    names = ("tile", "cluster", "splits", "stride")
    return _clocks_of(sizes, *(config[x] for x in names))


@lru_cache(maxsize=65536)
def _clocks_of(sizes: tuple[int, int, int], tile: str, cluster: str, splits: int, stride: int) -> float:
    return pitch_clocks(sizes, Shape.of(tile), cluster, splits, stride)


def _launches(sizes: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """All that can be launched, with the deepest ring that fits."""
    for tile in SPACE["tile"]:
        stages = min(8, Shape.of(tile).engine.max_stages())
        for cluster in SPACE["cluster"]:
            for stride in SPACE["stride"]:
                for splits in SPACE["splits"]:
                    config = {"tile": tile, "cluster": cluster, "stride": stride, "stages": stages}
                    config |= {"group": 8, "splits": splits, "fetch": 128}
                    if _reason(sizes, config) is None:
                        yield config


@lru_cache(maxsize=256)
def _ranked(sizes: tuple[int, int, int]) -> tuple[dict[str, Any], ...]:
    return tuple(ranked(_launches(sizes), lambda c: _clocks(sizes, c)))


def _best(sizes: tuple[int, int, int]) -> float:
    """The least estimated clocks of all launches."""
    return _clocks(sizes, _ranked(sizes)[0])


def default(case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    usual = {"tile": "128x256 coop", "cluster": "2x1", "stride": 1, "stages": 4}
    return next(iter(_guesses(case)), {**usual, "group": 8, "splits": 1, "fetch": 128})


def _guesses(case: Case) -> list[dict[str, Any]]:
    if tma_reason(K=case["k"], N=case["n"]):
        return []
    possible = [c for c in _ranked(_sizes(case)) if valid(case, c) is None]
    whole = [c for c in possible if c["splits"] == 1]
    lists = (
        (whole, ("tile", "stride"), 6),
        (whole, ("tile",), 8),
        ([c for c in whole if c["stride"] == 1], ("tile",), 4),
        ([c for c in whole if c["tile"].endswith("swapped")], ("tile",), 3),
        ([c for c in whole if c["tile"].endswith("pingpong")], ("tile",), 1),
        ([c for c in whole if c["cluster"] in ("4x1", "1x4")], ("tile",), 2),
        ([c for c in possible if c["splits"] == 0], ("tile",), 1),
    )
    found = {tuple(c.items()): c for configs, keys, count in lists for c in spread(configs, keys, count)}
    return list(found.values())


def seeds(case: Case) -> Sequence[Config]:
    """Further choices of the cost model, and after them the first with other fetches, raster and clusters."""
    found = _guesses(case)
    changes: tuple[dict[str, Any], ...] = (
        *({"cluster": c} for c in SPACE["cluster"]),
        {"group": 16},
        {"fetch": 0},
    )
    others = [{**g, **change} for g in found[:1] for change in changes]
    return [*found[1:], *(c for c in others if c not in found and valid(case, c) is None)]


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in: the tile, the ring, the cluster, the type, whether K may be cut."""
    cm, cn = blocks_of(str(config["cluster"]))
    return {
        "tile": str(config["tile"]),
        "cluster_m": cm,
        "cluster_n": cn,
        "stages": int(config["stages"]),
        "partial": int(int(config["splits"]) != 1),
        "bf16": int(case.dtype == "bf16"),
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """gemm_pitch.cu with its macros."""
    shape, stages = Shape.of(static["tile"]), static["stages"]
    tile, (cm, cn) = shape.engine, (static["cluster_m"], static["cluster_n"])
    along_p, along_q = (cn, cm) if shape.swapped else (cm, cn)
    smem = tile.smem(stages)
    defines = {
        "PB": tile.bm,
        "QB": tile.bn,
        "STAGES": stages,
        "CLUSTER_P": along_p,
        "CLUSTER_Q": along_q,
        "CONSUMERS": tile.consumers,
        "MI": tile.mi,
        "NI": shape.products,
        "SWAPPED": int(shape.swapped),
        "PINGPONG": int(shape.schedule == "pingpong"),
        "PARTIAL": static["partial"],
        "STORE_BUFFERS": tile.store_buffers(stages),
        "BF16": static["bf16"],
        "SMEM_BYTES": smem,
    }
    file = Path(__file__).with_name("gemm_pitch.cu")
    return CudaSource(file, "gemm_pitch", defines, (), smem, 128 * (tile.consumers + 1), (cm * cn, 1, 1))


def class_map(tensor: Any, dtype: str, rows: tuple[int, int, int], box: tuple[int, int], fetch: int) -> bytes:
    """The tensor map of a row-major matrix as (class, row, column): ``rows`` are the classes, the rows from
    one to the next of a class, and the rows of a class. ``box`` (rows, columns) lies in one class."""
    from cuda.bindings import driver as d

    kinds = {
        "bf16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }
    promotions = {
        0: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        128: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    }
    (count, stride, height), pitch = rows, tensor.stride(0) * _tma.ELEMENT
    status, made = d.cuTensorMapEncodeTiled(
        kinds[dtype],
        3,
        tensor.data_ptr(),
        [d.cuuint64_t(x) for x in (tensor.shape[1], height, count)],
        [d.cuuint64_t(stride * pitch), d.cuuint64_t(pitch)],
        [d.cuuint32_t(x) for x in (box[1], box[0], 1)],
        [d.cuuint32_t(1)] * 3,
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions[fetch],
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        reason = f"cuTensorMapEncodeTiled: {status} for {tuple(tensor.shape)} by rows {rows}"
        raise KernelFault("launch_error", reason, "bind")
    return ctypes.string_at(int(made.getPtr()), _tma.MAP_BYTES)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps with the fetch asked for, the cut of K and the launch."""
    shape, cluster = Shape.of(str(config["tile"])), str(config["cluster"])
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    names = ("group", "splits", "stride")
    work, rows = pitch_work(_sizes(case), shape, cluster, *(int(config[x]) for x in names), module.sms)
    cm, cn = blocks_of(cluster)
    blocks = cm * cn
    workspace = module.scratch("workspace", 2 * work.sk_units * blocks * shape.bm * shape.bn * 4)
    counters = module.scratch("counters", work.sk_tiles * blocks * 4 * 4)
    fetch, box = int(config["fetch"]), shape.boxes(cluster)
    box_b, box_a = box if shape.swapped else box[::-1]
    by_class = (rows.count, rows.stride, rows.height)
    args = [
        class_map(a, case.dtype, by_class, (box_a, 64), fetch),
        class_map(b, case.dtype, (1, 1, case["n"]), (box_b, 64), fetch),
        b"".join(class_map(c, case.dtype, by_class, store, 128) for store in shape.store_boxes()),
        work.pack(workspace.data_ptr(), counters.data_ptr()),
        rows.pack(),
    ]
    return Call(module.launcher((work.launched * blocks,), args), keep=(workspace, counters, a, b, c))


KERNELS = (
    Kernel(
        id="cuda/gemm_pitch",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",)),
        files=(
            "gemm_pitch.cu",
            "ring.cuh",
            "tiles.cuh",
            "ptx.cuh",
            "wgmma.cuh",
            "_pitch.py",
            "_plan.py",
            "_tma.py",
            "gemm.py",
        ),
        summary="rows off 128 bytes: every eighth row a tile, swapped operands, clusters of four",
    ),
)
