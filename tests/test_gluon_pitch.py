"""``triton/gemm_pitch``: what it assumes of its binary, and its PTX run on the CPU (``ptx_on_cpu/``)."""

import json
import re
from types import ModuleType

import pytest

from dsl_bench.workload import Case

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language")

pytestmark = pytest.mark.timeout(600)

RAGGED = {
    # the tiles that were fastest for cuda/gemm_pitch
    (4000, 4104, 4072): "256x128 coop",
    (1000, 3000, 5000): "128x192 coop",
    (3333, 2728, 8200): "144x256 swapped",
    (2049, 8200, 4104): "176x256 swapped",
    (517, 10248, 2056): "176x256 swapped",
    (7777, 1544, 3336): "128x160 pingpong",
}


def case(m: int, n: int, k: int) -> Case:
    return Case("gemm", f"{m}x{n}x{k}", {"m": m, "n": n, "k": k}, "bf16")


def config(tile: str, cluster: str, stages: int, stride: int = 1) -> dict:
    return {"tile": tile, "cluster": cluster, "stride": stride, "stages": stages, "group": 8}


def build(compiled, chosen: dict):
    """The artifact and its facts; tests of one config share them."""
    from dsl_bench.kernels.triton import gemm_pitch

    return compiled("triton/gemm_pitch", gemm_pitch.static(case(4000, 4104, 4072), chosen))


def product(
    cpu: ModuleType, ptx: str, chosen: dict, sizes: tuple[int, int, int], clusters: int, seed: int = 0
):
    """C of the kernel and as it should be, bits of bf16, by ``clusters`` clusters, of small integers."""
    import numpy as np
    from dsl_bench.kernels.triton import _pitch

    (m, n, k), (tile, rows) = sizes, _pitch.plan(sizes, chosen)
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, (x, k)).astype(np.float32) for x in (m, n))
    c = np.full((m, n), 0x7FC1, np.uint16)

    def view(tensor, count: int, stride: int, height: int, box: tuple[int, int]):
        pitch = tensor.shape[1]
        return cpu.TensorMap(tensor, (count, height, pitch), (pitch, stride * pitch, 1), (1, *box))

    classes = (rows.count, rows.stride, rows.height)
    tiles_n = -(-n // (tile.bn * tile.cn))
    params: list = [0] * 40
    params[0] = view(cpu.bf16(a), *classes, (tile.box_a, 64))
    params[7] = view(cpu.bf16(b), 1, 1, n, (tile.box_b, 64))
    params[14] = view(c, *classes, tile.store_box)
    tail = (rows.stride, rows.tail, rows.long, rows.short, rows.last, rows.steps)
    params[21:30] = [k, rows.tiles, tiles_n, *tail]
    blocks = tile.cm * tile.cn
    program = cpu.Program(ptx)
    for first in range(0, clusters * blocks, blocks):
        cpu.Cluster(program, params, first, blocks, clusters * blocks, seed).run()
    return c, cpu.bf16(a @ b.T)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tile", "cluster", "stages"),
    [
        ("144x256 swapped", "2x1", 4),
        ("128x192 coop", "2x1", 5),
        pytest.param("176x256 swapped", "1x2", 3, marks=pytest.mark.slow),
        pytest.param("176x192 swapped", "2x1", 4, marks=pytest.mark.slow),
        pytest.param("192x176 coop", "2x1", 4, marks=pytest.mark.slow),
        pytest.param("256x128 coop", "2x1", 4, marks=pytest.mark.slow),
        pytest.param("256x176 coop", "1x2", 3, marks=pytest.mark.slow),
        pytest.param("128x160 pingpong", "2x1", 5, marks=pytest.mark.slow),
    ],
)
def test_the_binary_is_as_planned(tile: str, cluster: str, stages: int, compiled) -> None:
    from dsl_bench.kernels.triton._pitch import Tile

    plan = Tile.of(tile, cluster, stages)
    artifact, facts = build(compiled, config(tile, cluster, stages))
    assert (facts.stack, facts.loop_local) == (0, 0)
    # a step's products for each warpgroup, once more where the first step is peeled; none waits for another
    products = plan.mi * 4 * plan.consumers
    assert facts.sass["HGMMA"] in (products, 2 * products)
    assert facts.sass["WARPGROUP"] <= 5 * plan.consumers
    assert facts.sass["UTMALDG"] == 2
    assert artifact.meta["threads"] == 128 * (plan.consumers + 1)
    assert plan.barriers + 1024 <= artifact.meta["smem"] <= plan.barriers + 1024 + 256
    ptx = (artifact.folder / "kernel.ptx").read_text()
    assert "gemm_pitch_param_0[128]" in ptx
    assert "gemm_pitch_param_7[128]" in ptx
    # the compiler's own state lies behind the one allocation
    stores = {int(x) for x in re.findall(r"st\.shared[.\w]*\s+\[global_smem\+(\d+)\]", ptx)}
    assert stores
    assert min(stores) >= plan.barriers + 1024
    meta = json.loads((artifact.folder / "kernel.json").read_text())
    boxes = [m["block_size"] for m in meta["tensordesc_meta"]]
    assert boxes == [[1, plan.box_a, 64], [1, plan.box_b, 64], [1, *plan.store_box]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tile", "cluster", "stages", "stride", "sizes"),
    [
        ("144x256 swapped", "2x1", 4, 1, (300, 264, 200)),
        pytest.param("128x160 pingpong", "2x1", 5, 1, (300, 328, 200), marks=pytest.mark.slow),
        pytest.param("128x160 pingpong", "1x2", 5, 4, (270, 488, 456), marks=pytest.mark.slow),
        pytest.param("128x192 coop", "2x1", 5, 4, (520, 200, 136), marks=pytest.mark.slow),
        pytest.param("176x256 swapped", "1x1", 3, 1, (200, 264, 328), marks=pytest.mark.slow),
        pytest.param("176x192 swapped", "1x2", 4, 1, (180, 408, 328), marks=pytest.mark.slow),
        pytest.param("192x176 coop", "2x1", 4, 1, (400, 184, 264), marks=pytest.mark.slow),
        pytest.param("256x176 coop", "1x2", 3, 8, (530, 360, 72), marks=pytest.mark.slow),
        pytest.param("256x128 coop", "2x1", 4, 8, (530, 136, 72), marks=pytest.mark.slow),
        pytest.param("128x208 coop", "2x1", 4, 1, (250, 216, 136), marks=pytest.mark.slow),
    ],
)
def test_its_ptx_multiplies(
    tile: str,
    cluster: str,
    stages: int,
    stride: int,
    sizes: tuple[int, int, int],
    ptx_on_cpu: ModuleType,
    compiled,
) -> None:
    """Every element right, no deadlock, no operand or staged sum overwritten too early."""
    chosen = config(tile, cluster, stages, stride)
    artifact, _ = build(compiled, chosen)
    got, want = product(ptx_on_cpu, (artifact.folder / "kernel.ptx").read_text(), chosen, sizes, clusters=2)
    assert (got == want).all()


@pytest.mark.slow
def test_the_emulator_sees_what_is_missing(ptx_on_cpu: ModuleType, compiled) -> None:
    """Without releases the ring stands still; without a fence or a wait, bytes are read too early or late."""
    chosen, sizes = config("144x256 swapped", "2x1", 4), (300, 264, 520)
    ptx = (build(compiled, chosen)[0].folder / "kernel.ptx").read_text()
    for pattern, instead, fault in (
        (r"@p mbarrier\.arrive\.shared::cluster\.b64 _, \[bar\];", "", "wait"),
        (r"fence\.proxy\.async\.shared::cta;", "", "fence"),
        (r"wgmma\.wait_group\.sync\.aligned 1;", "", "operands changed"),
    ):
        broken = re.sub(pattern, instead, ptx)
        assert broken != ptx
        with pytest.raises(AssertionError, match=fault):
            product(ptx_on_cpu, broken, chosen, sizes, clusters=1)


def test_tiles_are_staged_whole() -> None:
    """Chunks cover a tile; a buffer is written once all stores from it have read; parts do not overlap."""
    from dsl_bench.kernels.triton import _pitch, gemm_pitch

    for name in _pitch.TILES:
        for cluster in gemm_pitch.SPACE["cluster"]:
            for stages in gemm_pitch.SPACE["stages"]:
                tile = _pitch.Tile.of(name, cluster, stages)
                if tile.reason():
                    continue
                at = 0
                for first, width in tile.chunks:
                    assert first == at
                    assert width & (width - 1) == 0
                    assert width % tile.box_q == 0
                    at += width
                assert at == tile.q
                assert tile.ring % 1024 == 0
                assert tile.barriers + 1024 + 256 <= 232448
                assert max(tile.box_a, tile.box_b) <= 256
                issued: list[int] = []
                for n, (_, width) in enumerate(tile.chunks * tile.mi):
                    done = len(issued) - tile.younger[n]
                    assert all(buffer != n % tile.buffers for buffer in issued[done:])
                    issued += [n % tile.buffers] * (width // tile.box_q)


def test_fast_tiles_are_among_the_first() -> None:
    from dsl_bench.kernels.triton.gemm_pitch import KERNELS

    kernel = KERNELS[0]
    for sizes, tile in RAGGED.items():
        first = list(kernel.seeds(case(*sizes)))[:3]
        assert first[0] == kernel.default(case(*sizes))
        assert tile in [c["tile"] for c in first], sizes
        assert all(kernel.valid(case(*sizes), c) is None for c in kernel.seeds(case(*sizes)))


def test_gemm_pitch_takes_rows_off_lines_only() -> None:
    from dsl_bench.kernels.triton.gemm_pitch import KERNELS

    kernel = KERNELS[0]
    for sizes, said in (
        ((4096, 4096, 4096), "128 bytes"),
        ((2047, 2049, 2051), "tensor map"),
        ((16, 64, 72), "few"),
    ):
        reason = kernel.valid(case(*sizes), kernel.default(case(*sizes)))
        assert said in (reason or ""), reason
