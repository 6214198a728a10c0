"""``cuda/gemm_pitch``: ``cuda/gemm`` with the granularity of its L2 fetches as an axis. Device code: gemm.cu.

Where rows lie an odd multiple of 16 bytes apart, nearly every 128-byte row of a TMA box touches two lines. A
tensor map may ask the L2 to fetch 256 bytes around what a box needs; next to such rows that is a second pair
of lines, which evicts what other blocks are about to read. This kernel asks for 128 bytes, or for nothing.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from dsl_bench.kernels.cuda import _tma, gemm
from dsl_bench.kernels.cuda._plan import blocks_of, gemm_work

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, KernelFault, Needs

#: bytes that the L2 fetches around a box row; 0: what the row needs
FETCH = (128, 0)
SPACE: dict[str, Sequence[Any]] = {**gemm.SPACE, "fetch": FETCH}


def _odd(case: Case) -> bool:
    return case["k"] * _tma.ELEMENT % 128 != 0


def valid(case: Case, config: Config) -> str | None:
    """What ``cuda/gemm`` says."""
    return gemm.valid(case, config)


def static(case: Case, config: Config) -> dict[str, Any]:
    """What ``cuda/gemm`` bakes in: the fetch is the tensor maps' affair."""
    return gemm.static(case, config)


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """gemm.cu with its macros, as ``cuda/gemm`` builds it."""
    return gemm.source(static, arch)


def _with(config: Mapping[str, Any], fetch: int) -> dict[str, Any]:
    return {**config, "fetch": fetch}


def default(case: Case) -> Config:
    """``cuda/gemm``'s first choice."""
    return _with(gemm.default(False, case), FETCH[0])


def seeds(case: Case) -> Sequence[Config]:
    """``cuda/gemm``'s own; few of them where rows start on lines and little is to be won."""
    found = [_with(c, FETCH[0]) for c in gemm.seeds(False, case)]
    return [*found, _with(gemm.default(False, case), 0)] if _odd(case) else found[:2]


def operand_map(tensor: Any, dtype: str, box: tuple[int, int], fetch: int) -> bytes:
    """The tensor map of a row-major operand [rows, K], 128-byte swizzle, L2 fetches of ``fetch`` bytes."""
    from cuda.bindings import driver as d

    kinds = {
        "bf16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }
    promotions = {
        0: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        128: d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    }
    (rows, columns), pitch = tensor.shape, max(tensor.stride(0) * _tma.ELEMENT, 16)
    status, made = d.cuTensorMapEncodeTiled(
        kinds[dtype],
        2,
        tensor.data_ptr(),
        [d.cuuint64_t(columns), d.cuuint64_t(rows)],
        [d.cuuint64_t(pitch)],
        [d.cuuint32_t(box[1]), d.cuuint32_t(box[0])],
        [d.cuuint32_t(1), d.cuuint32_t(1)],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions[fetch],
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise KernelFault("launch_error", f"cuTensorMapEncodeTiled: {status} for {rows}x{columns}", "bind")
    return ctypes.string_at(int(made.getPtr()), _tma.MAP_BYTES)


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps with the fetch asked for, the cut of K and the launch."""
    tile, cluster = gemm.parse_tile(str(config["tile"])), str(config["cluster"])
    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    work = gemm_work(case, tile, cluster, int(config["group"]), int(config["splits"]), module.sms)
    cm, cn = blocks_of(cluster)
    workspace = module.scratch("workspace", 2 * work.sk_units * cm * cn * tile.bm * tile.bn * 4)
    counters = module.scratch("counters", work.sk_tiles * cm * cn * 4 * 4)
    fetch, columns = int(config["fetch"]), gemm.store_columns(tile.bn)
    args = [
        operand_map(a, case.dtype, (tile.bm // cn, 64), fetch),
        operand_map(b, case.dtype, (tile.bn // cm, 64), fetch),
        _tma.matrix_map(c, case.dtype, (16 if columns == 64 else 64, columns), columns * 2),
        work.pack(workspace.data_ptr(), counters.data_ptr()),
    ]
    return Call(module.launcher((work.launched * cm * cn,), args), keep=(workspace, counters, a, b, c))


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
        files=(*gemm.FILES, "gemm.py"),
        summary="cuda/gemm with narrower L2 fetches, for rows an odd multiple of 16 bytes apart",
    ),
)
