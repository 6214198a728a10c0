"""``triton/gemm_widths``: what it assumes of its binary, its PTX on the CPU (``ptx_on_cpu/``), choices."""

import json
import re
from types import ModuleType

import pytest

from dsl_bench.workload import Case

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language")

pytestmark = pytest.mark.timeout(600)

#: the widths that were fastest for cuda/gemm_turns
FASTEST = {
    (2048, 2048, 2048): 128,
    (8192, 8192, 8192): 192,
    (4096, 2112, 7168): 176,
    (4096, 28672, 4096): 184,
    (4096, 10240, 8192): 168,
    (4096, 8192, 28672): 168,
    (4096, 24576, 1536): 176,
}


def case(m: int, n: int, k: int) -> Case:
    return Case("gemm", f"{m}x{n}x{k}", {"m": m, "n": n, "k": k}, "bf16")


def config(tile: str, cluster: str, buffers: int = 1) -> dict:
    return {"tile": tile, "cluster": cluster, "buffers": buffers, "group": 16}


def build(compiled, chosen: dict):
    """The artifact and its facts; tests of one config share them."""
    from dsl_bench.kernels.triton import gemm_widths

    return compiled("triton/gemm_widths", gemm_widths.static(case(4096, 4096, 4096), chosen))


def product(
    cpu: ModuleType, ptx: str, chosen: dict, sizes: tuple[int, int, int], clusters: int, seed: int = 0
):
    """C of the kernel and as it should be, bits of bf16, by ``clusters`` clusters, of small integers."""
    import numpy as np
    from dsl_bench.kernels.triton import gemm_widths

    (m, n, k), tile = sizes, gemm_widths.tile_of(chosen)
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, (x, k)).astype(np.float32) for x in (m, n))
    c = np.full((m, n), 0x7FC1, np.uint16)

    def view(tensor, box: tuple[int, int]):
        rows, pitch = tensor.shape
        return cpu.TensorMap(tensor, (1, rows, pitch), (pitch, pitch, 1), (1, *box), 128)

    params: list = [0] * 40
    params[0] = view(cpu.bf16(a), (tile.box_a, 64))
    params[7] = view(cpu.bf16(b), (tile.box_b, 64))
    params[14], params[21] = view(c, (64, 64)), view(c, (64, tile.tail))
    params[28:33] = [k, *gemm_widths.grid(sizes, tile), k // 64, 2]
    blocks = tile.cm * tile.cn
    program = cpu.Program(ptx)
    for first in range(0, clusters * blocks, blocks):
        cpu.Cluster(program, params, first, blocks, clusters * blocks, seed).run()
    return c, cpu.bf16(a @ b.T)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tile", "cluster", "stages"),
    [
        ("128x168 pingpong", "2x1", 5),
        pytest.param("128x112 pingpong", "1x1", 6, marks=pytest.mark.slow),
        pytest.param("128x184 pingpong", "1x1", 5, marks=pytest.mark.slow),
        pytest.param("128x192 pingpong", "1x1", 5, marks=pytest.mark.slow),
        ("256x176 coop", "1x2", 3),
        pytest.param("256x192 coop", "2x1", 3, marks=pytest.mark.slow),
        pytest.param("192x176 coop", "1x1", 4, marks=pytest.mark.slow),
        pytest.param("128x224 coop", "2x1", 4, marks=pytest.mark.slow),
    ],
)
def test_the_binary_is_as_planned(tile: str, cluster: str, stages: int, compiled) -> None:
    from dsl_bench.kernels.triton.gemm_widths import tile_of

    from dsl_bench.codegen import sass

    plan = tile_of(config(tile, cluster))
    assert plan.stages == stages
    artifact, facts = build(compiled, config(tile, cluster))
    assert (facts.stack, facts.loop_local, facts.spill_stores) == (0, 0, 0)
    # a step's products for each warpgroup, as wide as the tile; none waits for another
    products = re.findall(r"HGMMA\.(\w+)", sass(artifact.folder / artifact.cubin))
    assert set(products) == {f"64x{plan.q}x16"}
    assert len(products) in (plan.mi * 4 * plan.consumers, 2 * plan.mi * 4 * plan.consumers)
    assert facts.sass["WARPGROUP"] <= 5 * plan.consumers
    assert facts.sass["UTMALDG"] == 2
    # a box of C for 64 columns, or fewer
    assert facts.sass["UTMASTG"] == plan.consumers * plan.mi * -(-plan.q // 64)
    assert artifact.meta["threads"] == 128 * (plan.consumers + 1)
    assert plan.barriers + 1024 <= artifact.meta["smem"] <= plan.barriers + 1024 + 256
    ptx = (artifact.folder / "kernel.ptx").read_text()
    assert "gemm_widths_param_0[128]" in ptx
    assert "gemm_widths_param_7[128]" in ptx
    # the compiler's own state lies behind the one allocation
    stores = {int(x) for x in re.findall(r"st\.shared[.\w]*\s+\[global_smem\+(\d+)\]", ptx)}
    assert stores
    assert min(stores) >= plan.barriers + 1024
    meta = json.loads((artifact.folder / "kernel.json").read_text())["tensordesc_meta"]
    boxes = [[1, plan.box_a, 64], [1, plan.box_b, 64], [1, 64, 64], [1, 64, plan.tail]]
    assert [m["block_size"] for m in meta] == boxes
    assert [m["swizzle"] for m in meta] == [3] * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tile", "cluster", "sizes"),
    [
        # rows and columns that no tile divides, several tiles a block
        ("128x168 pingpong", "2x1", (300, 520, 192)),
        pytest.param("128x168 pingpong", "1x1", (300, 520, 128), marks=pytest.mark.slow),
        pytest.param("128x112 pingpong", "1x1", (200, 344, 448), marks=pytest.mark.slow),
        pytest.param("128x184 pingpong", "1x1", (200, 560, 384), marks=pytest.mark.slow),
        ("256x176 coop", "1x2", (300, 360, 128)),
        pytest.param("128x192 pingpong", "2x1", (400, 392, 64), marks=pytest.mark.slow),
        pytest.param("256x192 coop", "2x1", (530, 200, 256), marks=pytest.mark.slow),
        pytest.param("192x176 coop", "1x1", (200, 360, 320), marks=pytest.mark.slow),
        pytest.param("128x208 coop", "2x1", (250, 432, 320), marks=pytest.mark.slow),
    ],
)
def test_its_ptx_multiplies(
    tile: str, cluster: str, sizes: tuple[int, int, int], ptx_on_cpu: ModuleType, compiled
) -> None:
    """Every element right, no deadlock, no operand or staged sum overwritten too early."""
    chosen = config(tile, cluster)
    artifact, _ = build(compiled, chosen)
    got, want = product(ptx_on_cpu, (artifact.folder / "kernel.ptx").read_text(), chosen, sizes, clusters=2)
    assert (got == want).all()


def test_tiles_are_staged_whole() -> None:
    """Chunks cover a tile; a buffer is written once all stores from it have read; parts do not overlap."""
    from dsl_bench.kernels.triton import gemm_widths

    for config in gemm_widths.KERNELS[0].configs():
        tile = gemm_widths.tile_of(config)
        if tile.reason():
            continue
        assert [first for first, _ in tile.chunks] == list(range(0, tile.q, 64))
        assert sum(width for _, width in tile.chunks) == tile.q
        assert tile.chunks[-1][1] == tile.tail
        assert tile.buffers >= config["buffers"]
        assert tile.pieces * tile.piece == tile.mi * tile.q
        assert tile.ring % 1024 == 0
        assert tile.barriers + 1024 + 256 <= 232448
        for n, younger in enumerate(tile.younger):
            # each chunk is one store; the n-th waits for all but the youngest, none of them from its buffer
            assert all(before % tile.buffers != n % tile.buffers for before in range(n - younger, n))


def test_the_width_is_the_one_with_the_fewest_columns() -> None:
    from dsl_bench.kernels.triton.gemm_widths import KERNELS

    kernel = KERNELS[0]
    for sizes, width in FASTEST.items():
        seeds = list(kernel.seeds(case(*sizes)))
        assert 6 <= len(seeds) <= 8
        assert seeds[0] == kernel.default(case(*sizes))
        assert seeds[0]["tile"] == f"128x{width} pingpong", sizes
        assert any(c["tile"].endswith("coop") for c in seeds[:3])
        assert all(kernel.valid(case(*sizes), c) is None for c in seeds)


def test_gemm_widths_refuses_what_others_do() -> None:
    from dsl_bench.kernels.triton.gemm_widths import KERNELS

    kernel, big, first = KERNELS[0], case(4096, 10240, 8192), config("128x168 pingpong", "1x1")
    assert kernel.valid(big, first) is None
    for sizes, change, said in (
        ((4000, 4104, 4072), {}, "128 bytes"),
        ((2047, 2049, 2051), {}, "tensor map"),
        ((128, 8192, 8192), {}, "one row"),
        ((1024, 1024, 1024), {}, "two tiles"),
        ((1024, 1024, 1024), {"tile": "128x208 coop"}, "half the SMs"),
        ((2048, 2048, 2048), {"tile": "128x192 pingpong"}, "columns of the best"),
        ((4096, 10240, 8192), {"buffers": 2}, "as many buffers"),
        ((4096, 10240, 8192), {"cluster": "1x2"}, "share B"),
        ((1024, 10240, 8192), {"group": 8}, "raster"),
    ):
        reason = kernel.valid(case(*sizes), {**first, **change})
        assert said in (reason or ""), (sizes, change, reason)
