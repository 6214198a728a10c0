"""``triton/gemm_repack``: C = A·Bᵀ for rows that start anywhere, in two launches inside the clock.

The first copies the operands to rows that start on 128 bytes; the second multiplies by tensor maps over the
copies and stores C through pointers. Where rows start on odd elements, one is moved alone once instead of
once a tile. Where they start on 16 bytes but not on 128, each row of a tensor map's box would cross two lines
of L2, again for every tile (25 to 35 % on an H200). With few rows of A only A is copied (form ``a``): then
every element of B is needed once, and comes through registers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from dsl_bench.backends.triton import TritonSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, Static

from . import _common as common
from ._common import add_peers, post, store_masked, tile_at
from .gemm import gemm_persistent

SPACE = {
    "form": ("flat", "a"),
    "bm": (128, 256, 64),
    "bn": (256, 128, 64),
    "bk": (64, 128),
    "warps": (8, 4),
    "stages": (3, 4, 5),
    "group": (8, 16),
}
#: rows and columns of a block of the copy; 4096 elements, 16 a thread
ROWS, COLS, COPY_WARPS = 8, 512, 8
#: copied rows are padded to this many elements
PAD = 64


@triton.jit
def copy_rows(src, dst, rows, k, pitch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A block of src [rows, k] to dst [rows, pitch], zeros beyond k."""
    i = row + tl.arange(0, ROWS)[:, None]
    j = col + tl.arange(0, COLS)[None, :]
    x = tl.load(src + i * k + j, mask=(i < rows) & (j < k), other=0.0, eviction_policy="evict_first")
    tl.store(dst + i * pitch + j, x, mask=(i < rows) & (j < pitch))


@triton.jit
def repack(a, b, a_copy, b_copy, m, n, k, pitch, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Copy a [m, k] and b [n, k] to rows of ``pitch`` elements; the grid covers the rows of a, then those of
    b where b is wanted."""
    block = tl.program_id(0)
    blocks_a = tl.cdiv(m, ROWS)
    col = tl.program_id(1) * COLS
    if block < blocks_a:
        copy_rows(a, a_copy, m, k, pitch, block * ROWS, col, ROWS, COLS)
    else:
        copy_rows(b, b_copy, n, k, pitch, (block - blocks_a) * ROWS, col, ROWS, COLS)


@triton.jit
def gemm_half(
    a, b, c, partial, flag, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """a [m, k] is a descriptor, b [n, k] and c [m, n] are pointers. All K steps in equal shares (see
    gemm_streamk); the elements of B are loaded a step ahead."""
    worker = tl.num_programs(0) - 1 - tl.program_id(0)
    workers = tl.num_programs(0)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    steps = tl.cdiv(k, BK)
    total = tiles_m * tiles_n * steps
    at = worker * total // workers
    end = (worker + 1) * total // workers
    inner = tl.arange(0, BK)[None, :]
    while at < end:
        tile = at // steps
        first = at % steps
        last = min(steps, first + end - at)
        i, j = tile_at(tile, tiles_m, tiles_n, GROUP)
        y_at = tl.minimum(j * BN + tl.arange(0, BN), n - 1)[:, None] * k + inner
        acc = tl.zeros((BM, BN), tl.float32)
        y = tl.load(b + first * BK + y_at, mask=inner < k - first * BK, other=0.0)
        for step in range(first, last):
            ahead = (step + 1) * BK
            x = a.load([i * BM, step * BK])
            y_next = tl.load(b + ahead + y_at, mask=inner < k - ahead, other=0.0)
            acc = tl.dot(x, y.T, acc)
            y = y_next
        if first > 0:
            post(partial, flag, worker, acc, BM, BN)
        else:
            acc = add_peers(partial, flag, acc, worker, workers, total, (tile + 1) * steps, BM, BN)
            store_masked(c, acc, i * BM, j * BN, m, n, BM, BN)
        at += last - first


def static(case: Case, config: Config) -> Static:
    """The whole config, and what divides a row of C; shapes stay runtime values."""
    divisors = {"n_div": common.divisor(case["n"]), "whole_rows": case["k"] % 8 == 0}
    return {**{x: config[x] for x in SPACE}, "dtype": case.dtype, **divisors}


def source(static: Static, arch: str) -> TritonSource:
    """The product's function for one specialisation, and the copy."""
    bm, bn, bk, form = (static[x] for x in ("bm", "bn", "bk", "form"))
    t = common.element(static["dtype"])
    rows = {"k": 8, "pitch": 16} if static["whole_rows"] else {"pitch": 2}
    copy = TritonSource(
        fn=repack,
        signature={
            **dict.fromkeys(("a", "b", "a_copy", "b_copy"), f"*{t}"),
            **dict.fromkeys(("m", "n", "k", "pitch"), "i32"),
        },
        constexprs={"ROWS": ROWS, "COLS": COLS},
        # where rows start anywhere, a promise of 16 would make 16-byte stores, and Triton then lays the
        # 2-byte loads out 16 bytes apart
        attrs={**dict.fromkeys(("a", "b", "a_copy", "b_copy"), 16), **rows},
        options={"num_warps": COPY_WARPS, "num_stages": 1},
    )
    sizes = dict.fromkeys("mnk", "i32")
    baked = {"BM": bm, "BN": bn, "BK": bk, "GROUP": static["group"]}
    options = {"num_warps": static["warps"], "num_stages": static["stages"]}
    maps = {"a": f"tensordesc<{t}[{bm},{bk}]>"}
    if form == "a":
        kinds = {**maps, "b": f"*{t}", "c": f"*{t}", "partial": "*fp32", "flag": "*i32", **sizes}
        attrs = {"b": 16, "c": 16, "partial": 16, "flag": 16, "n": static["n_div"]}
        return TritonSource(gemm_half, kinds, baked, attrs, options, (copy,))
    walks = {"SUB": 1, "FLAT": True, "POINTER": True}
    kinds = {**maps, "b": f"tensordesc<{t}[{bn},{bk}]>", "c": f"*{t}", **sizes}
    attrs = {"c": 16, "n": static["n_div"]}
    return TritonSource(gemm_persistent, kinds, {**baked, **walks}, attrs, options, (copy,))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """A workspace for the copies, descriptors over it, and both launches. The copying itself is in run()."""
    import torch

    a, b, c = inputs["a"], inputs["b"], outputs["c"]
    m, n, k = case["m"], case["n"], case["k"]
    bm, bn, bk = (int(config[x]) for x in ("bm", "bn", "bk"))
    pitch = common.cdiv(k, PAD) * PAD
    half = config["form"] == "a"
    a_copy = torch.empty((m, pitch), dtype=a.dtype, device=a.device)
    b_copy = b if half else torch.empty((n, pitch), dtype=b.dtype, device=b.device)
    blocks = common.cdiv(m, ROWS) + (0 if half else common.cdiv(n, ROWS))
    grid = (blocks, common.cdiv(pitch, COLS))
    copy = module.extra[0].launcher(grid, a, b, a_copy, b_copy, m, n, k, pitch)
    x = common.descriptor(a_copy[:, :k], bm, bk)
    slots = module.sms * module.blocks_per_sm
    if half:
        workers = min(slots, common.tiles(case, config) * common.cdiv(k, bk))
        partial = torch.empty((workers, bm, bn), dtype=torch.float32, device=c.device)
        flag = torch.zeros(workers, dtype=torch.int32, device=c.device)
        product = module.launcher((workers,), x, b, c, partial, flag, m, n, k)
        keep: tuple[Any, ...] = (a_copy, partial, flag)
    else:
        y = common.descriptor(b_copy[:, :k], bn, bk)
        product = module.launcher((min(common.tiles(case, config), slots),), x, y, c, m, n, k)
        keep = (a_copy, b_copy)

    def run() -> None:
        copy()
        product()

    return Call(run, keep=keep)


def _smem(config: Mapping[str, Any]) -> int:
    """Shared memory in bytes: the ring, and C on its way from the tensor cores' layout to rows."""
    bm, bn = config["bm"], config["bn"]
    if config["form"] == "a":
        return config["stages"] * bm * config["bk"] * 2 + bn * config["bk"] * 2 + 256
    return config["stages"] * (bm + bn) * config["bk"] * 2 + bm * bn * 2 + 512


def valid(case: Case, config: Config) -> str | None:
    """Unaligned rows, 32-bit offsets, shared memory, registers, and for what each form is made."""
    if common.aligned(case) and (common.pitched(case) or case["m"] < 1024):
        return "the kernels on tensor maps need no copy: rows start on 128 bytes, or on 16 and are few"
    if common.wide(case):
        return "offsets exceed 32 bits"
    reason = common.tile_reason(config) or common.size_reason(case, config)
    if reason:
        return reason
    smem = _smem(config)
    if smem > common.SMEM_LIMIT:
        return f"about {smem} bytes of shared memory, over {common.SMEM_LIMIT}"
    form, bm, bn, bk = config["form"], int(config["bm"]), int(config["bn"]), int(config["bk"])
    if form == "a":
        if common.aligned(case):
            return "B has a tensor map itself"
        if case["m"] > 256:
            return "B would be loaded element by element for more than two tiles of rows"
        loads = bn * bk // (32 * int(config["warps"]))
        if loads > 32 or bm * bn // (32 * int(config["warps"])) > 64:
            return f"{loads} loads a thread ahead spill registers"
        if config["stages"] != 4 or config["group"] != 8:
            return "the ring holds A only and the raster is one row: depth and groups hardly matter"
        return None
    return common.pipeline_reason(config, smem)


def _cost(case: Case, config: Mapping[str, Any]) -> float:
    """Estimated µs of both launches."""
    m, n, k, form = case["m"], case["n"], case["k"], config["form"]
    copied = m * k if form == "a" else (m + n) * k
    copy = 2.0 + copied * 4 / 3.8e6
    if form == "a":
        steps = common.tiles(case, config) * common.cdiv(k, config["bk"])
        moves = steps * config["bn"] * config["bk"] / 16 / common.SMS / 1.7e3
        blocks = common.fitting(_smem(config), config, config["warps"])
        flight = blocks * config["bn"] * config["bk"] * 2
        return copy + max(moves, n * k * 2 / 4.3e6 * (1 + 16384 / flight)) + 6.0
    fit = common.fitting(_smem(config), config, config["warps"])
    rounds = common.waves(common.tiles(case, config), common.SMS * fit)
    exposed = 0.3 / fit * rounds
    return copy + common.wave_time(case, config, fit) + exposed + 3.0


def seeds(case: Case) -> Sequence[Config]:
    """The best of each tile and form by the cost model, best first."""
    return common.ranked(
        (c for c in KERNEL.configs() if valid(case, c) is None),
        lambda c: _cost(case, c),
        lambda c: (c["form"], c["bm"], c["bn"]),
        8,
    )


def default(case: Case) -> Config:
    """The cost model's first choice, or the first point of the space where no config is valid."""
    return next(iter(seeds(case)), {name: values[0] for name, values in SPACE.items()})


KERNEL = Kernel(
    id="triton/gemm_repack",
    workload="gemm",
    space=SPACE,
    default=default,
    seeds=seeds,
    valid=valid,
    static=static,
    source=source,
    bind=bind,
    needs=Needs(archs=("sm_90a",), packages=("triton>=3.6",)),
    files=("_common.py", "gemm.py"),
    summary="any alignment: operands copied to aligned rows first, inside the clock, then tensor maps",
)
KERNELS = (KERNEL,)
