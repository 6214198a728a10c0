"""GEMM for few tokens, bound by reading the weights: C[M,N] = A[M,K] · B[N,K]ᵀ with M <= 128.

``cuda/gemm_skinny`` (gemm_skinny.cu) swaps the operands, so that weights fill wgmma's 64 rows. ``cuda/gemv``
(gemv.cu) does up to four tokens on the CUDA cores. Both want rows of A and B that start on 16 bytes.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl_bench.kernels.cuda import _tma
from dsl_bench.kernels.cuda._maps import FETCHES, tiled_map
from dsl_bench.kernels.cuda._plan import (
    SMEM_LIMIT,
    SMS,
    Work,
    cdiv,
    cut,
    cut_reason,
    ranked,
    spread,
    tma_reason,
)

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs

#: bytes a second that one H200 reads, and that one SM can take in; seconds a load takes under load
READ_RATE, SM_RATE, LATENCY = 4.3e12, 80e9, 1.1e-6
#: shared memory of an SM that blocks can use in all, and what the system takes of each block
SM_SMEM, BLOCK_SMEM = 233472, 1024
MAX_TOKENS, MAX_GEMV_TOKENS = 128, 4

SPACE: dict[str, Sequence[Any]] = {
    "rows": (64, 128),
    "bk": (64, 128),
    "stages": (4, 6, 8, 10, 12, 16),
    "resident": (1, 2),
    "splits": (0, 1, 2, 3, 4, 6, 8),
    "fetch": FETCHES[:2],
}
GEMV_SPACE: dict[str, Sequence[Any]] = {"rows": (1, 2, 4), "splits": (1, 2, 4, 8), "loads": (2, 4, 8)}


def token_columns(m: int) -> int:
    """The N of wgmma that holds ``m`` tokens: whole eights, then whole thirty-twos."""
    return cdiv(m, 8) * 8 if m <= 32 else cdiv(m, 32) * 32


def stage_bytes(tokens: int, config: Mapping[str, Any]) -> int:
    """One stage of the ring: rows of B and all tokens of A, ``bk`` elements of K."""
    return (tokens + config["rows"]) * config["bk"] * 2


def smem(tokens: int, config: Mapping[str, Any]) -> int:
    """Dynamic shared memory, bytes, in gemm_skinny.cu's layout."""
    consumers, stages = config["rows"] // 64, config["stages"]
    return 1024 + stages * (stage_bytes(tokens, config) + 16) + consumers * (tokens * 128 + 4)


def work_of(case: Case, config: Mapping[str, Any], sms: int = SMS) -> Work:
    """Tiles of ``rows`` of the weights; a block is a cluster, and one of WorkArgs' k-blocks is a stage."""
    work = Work(
        m=case["m"],
        n=case["n"],
        k_blocks=cdiv(case["k"], config["bk"]),
        tiles_m=cdiv(case["n"], config["rows"]),
        tiles_n=1,
        group=1,
        clusters=sms * config["resident"],
    )
    return cut(work, config["splits"])


def valid(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/gemm_skinny`` cannot do ``case`` with ``config``."""
    if case["m"] > MAX_TOKENS:
        return f"M = {case['m']} is more than {MAX_TOKENS} tokens"
    reason = tma_reason(K=case["k"], N=case["n"])
    if reason:
        return reason
    c: Mapping[str, Any] = config
    tokens = token_columns(case["m"])
    need, resident = smem(tokens, c), c["resident"]
    if need > SMEM_LIMIT or resident * (need + BLOCK_SMEM) > SM_SMEM:
        return f"{need} B of shared memory, {resident} times on an SM"
    if resident * c["stages"] * stage_bytes(0, c) < 65536:
        return "less than 64 KiB of weights in flight on an SM"
    if resident > 1 and tokens > 64:
        return f"{tokens} tokens want the registers of a whole SM"
    whole = work_of(case, {**c, "splits": 1})
    if c["splits"] == 0 and whole.tiles > 16 * whole.clusters:
        return "so many tiles that their last wave does not count"
    return cut_reason(whole, c["splits"], c["rows"] * tokens * 4)


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in; the tokens are those that wgmma sees, M itself is not."""
    return {
        "tokens": token_columns(case["m"]),
        "rows": config["rows"],
        "bk": config["bk"],
        "stages": config["stages"],
        "resident": config["resident"],
        "partial": int(config["splits"] != 1),
        "bf16": int(case.dtype == "bf16"),
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """gemm_skinny.cu with its macros."""
    consumers, bytes_ = static["rows"] // 64, smem(static["tokens"], static)
    defines = {
        "TOKENS": static["tokens"],
        "CONSUMERS": consumers,
        "K_ROWS": static["bk"] // 64,
        "STAGES": static["stages"],
        "RESIDENT": static["resident"],
        "PARTIAL": static["partial"],
        "BF16": static["bf16"],
        "SMEM_BYTES": bytes_,
    }
    return CudaSource(
        Path(__file__).with_name("gemm_skinny.cu"), "gemm_skinny", defines, (), bytes_, 128 * consumers + 32
    )


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps, the cut of K and the launch."""
    c: Mapping[str, Any] = config
    tokens, rows, b = token_columns(case["m"]), c["rows"], inputs["b"]
    sizes, pitch = (case["k"], case["n"]), b.stride(0) * _tma.ELEMENT
    maps = [
        _tma.matrix_map(inputs["a"], case.dtype, (tokens, 64)),
        tiled_map(b.data_ptr(), case.dtype, sizes, (pitch,), (64, rows), c["fetch"]),
        _tma.matrix_map(outputs["c"], case.dtype, (tokens, 64)),
    ]
    work = work_of(case, c, module.sms)
    workspace = module.scratch("workspace", 2 * work.sk_units * rows * tokens * 4)
    counters = module.scratch("counters", work.sk_tiles * (rows // 64) * 4)
    args = [*maps, work.pack(workspace.data_ptr(), counters.data_ptr())]
    run = module.launcher((work.launched,), args)
    return Call(run, keep=(workspace, counters, inputs["a"], inputs["b"], outputs["c"]))


def seconds(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated time: the slower of memory and of the busiest block's share of B, and what a fix-up adds."""
    tokens = token_columns(case["m"])
    work = work_of(case, config)
    cut_blocks = work.sk_tiles * work.k_blocks
    whole = cdiv(work.tiles - work.sk_tiles, work.clusters) * work.k_blocks
    share = cdiv(cut_blocks, work.sk_units) * cdiv(work.sk_units, work.clusters) if work.sk_units else 0
    flying = config["resident"] * config["stages"] * stage_bytes(0, config)
    rate = min(SM_RATE, flying / LATENCY) / config["resident"]
    busiest = (whole + share) * stage_bytes(tokens, config) / rate
    total = case["n"] * case["k"] * 2 / READ_RATE
    fixup = 2.5e-6 + work.sk_units / max(1, work.sk_tiles) * 0.1e-6 if work.sk_units else 0.0
    # what is in flight matters a little even when it is enough
    return max(total, busiest) + fixup + 0.02 * total * LATENCY * SM_RATE / flying


def guesses(case: Case) -> list[dict[str, Any]]:
    """The cost model's choices, best first, that differ in more than the depth of the ring."""
    every = (
        {"rows": rows, "bk": bk, "stages": stages, "resident": resident, "splits": splits, "fetch": 128}
        for rows in SPACE["rows"]
        for bk in SPACE["bk"]
        for stages in reversed(SPACE["stages"])
        for resident in SPACE["resident"]
        for splits in SPACE["splits"]
    )
    possible = [c for c in every if valid(case, c) is None]
    return spread(ranked(possible, lambda c: seconds(case, c)), ("rows", "resident", "splits"), 8)


def default(case: Case) -> Config:
    """The cost model's first choice; where nothing is valid, a config whose reason says why."""
    none = {"rows": 64, "bk": 64, "stages": 8, "resident": 1, "splits": 1, "fetch": 128}
    return next(iter(guesses(case)), none)


def seeds(case: Case) -> Sequence[Config]:
    """Its first with more fetched by L2, further choices, and its first in steps of the other length."""
    found = guesses(case)
    far = [{**c, "fetch": 256} for c in found[:1]]
    other = ({**c, "bk": 192 - c["bk"], "stages": s} for c in found[:1] for s in reversed(SPACE["stages"]))
    return far + found[1:] + [c for c in other if valid(case, c) is None][:1]


# ---- gemv ------------------------------------------------------------------------------------------


def gemv_registers(tokens: int, config: Mapping[str, Any]) -> int:
    """Registers a thread needs so that all its loads can be in flight (measured, rounded up)."""
    rows, loads = config["rows"], config["loads"]
    return int((44 if tokens > 1 else 40) + 4 * rows * loads + 4 * tokens * (rows + 1))


def gemv_valid(case: Case, config: Config) -> str | None:
    """None, or why ``cuda/gemv`` cannot do ``case`` with ``config``."""
    if case["m"] > MAX_GEMV_TOKENS:
        return f"M = {case['m']} is more than {MAX_GEMV_TOKENS} tokens"
    if case["k"] % 8:
        return f"rows of K = {case['k']} elements do not start on 16 bytes"
    if gemv_registers(case["m"], config) > 200:
        return "too many loads in flight for the registers"
    if int(config["splits"]) * int(config["loads"]) * 256 > 2 * case["k"]:
        return f"K = {case['k']} is too short for {config['splits']} shares"
    return None


def gemv_static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in."""
    return {"tokens": case["m"], **config, "bf16": int(case.dtype == "bf16")}


def gemv_source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """gemv.cu with its macros."""
    resident = max(1, 65536 // (256 * gemv_registers(static["tokens"], static)))
    defines = {name.upper(): value for name, value in static.items()} | {"RESIDENT": resident}
    return CudaSource(Path(__file__).with_name("gemv.cu"), "gemv", defines, threads=256)


def gemv_bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The launch: addresses and sizes."""
    tensors = (inputs["a"], inputs["b"], outputs["c"])
    pointers = [struct.pack("<Q", t.data_ptr()) for t in tensors]
    sizes = [struct.pack("<i", case[name]) for name in ("m", "n", "k")]
    rows = 8 // int(config["splits"]) * int(config["rows"])
    return Call(module.launcher((cdiv(case["n"], rows),), pointers + sizes), keep=tensors)


def gemv_guesses(case: Case) -> list[dict[str, Any]]:
    """Blocks enough for several an SM, and loads enough in flight, in the fewest rows a warp."""

    def cost(config: Mapping[str, Any]) -> float:
        blocks = cdiv(case["n"], 8 // config["splits"] * config["rows"])
        held = 65536 // (256 * gemv_registers(case["m"], config)) * SMS
        waves = blocks / held
        flying = min(held, blocks) / SMS * 8 * 512 * config["rows"] * config["loads"]
        return max(1.0, 65536 / flying) * cdiv(blocks, held) / waves + 0.05 * config["splits"]

    configs = (
        {"rows": rows, "splits": splits, "loads": loads}
        for rows in GEMV_SPACE["rows"]
        for splits in GEMV_SPACE["splits"]
        for loads in GEMV_SPACE["loads"]
    )
    return ranked((c for c in configs if gemv_valid(case, c) is None), cost)[:6]


def gemv_default(case: Case) -> Config:
    """The first guess; where nothing is valid, a config whose reason says why."""
    return next(iter(gemv_guesses(case)), {"rows": 1, "splits": 1, "loads": 4})


def gemv_seeds(case: Case) -> Sequence[Config]:
    """The other guesses."""
    return gemv_guesses(case)[1:]


KERNELS = (
    Kernel(
        id="cuda/gemm_skinny",
        workload="gemm",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",)),
        files=("gemm_skinny.cu", "tiles.cuh", "ptx.cuh", "wgmma.cuh", "_plan.py", "_tma.py", "_maps.py"),
        summary="few tokens: operands swapped, deep TMA ring, weights streamed once, stream-K",
    ),
    Kernel(
        id="cuda/gemv",
        workload="gemm",
        space=GEMV_SPACE,
        default=gemv_default,
        seeds=gemv_seeds,
        valid=gemv_valid,
        static=gemv_static,
        source=gemv_source,
        bind=gemv_bind,
        needs=Needs(archs=("sm_90a",)),
        files=("gemv.cu", "ptx.cuh", "wgmma.cuh", "_plan.py"),
        summary="one to four tokens on the CUDA cores, 16-byte loads past the L1",
    ),
)
