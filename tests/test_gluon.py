"""Gluon sources: compiled for sm_90a without a GPU; and what ``triton/gemm_ragged`` assumes of its binary."""

import json
import re
from pathlib import Path

import pytest

from dsl_bench.workload import Case

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon")
gl = pytest.importorskip("triton.experimental.gluon.language")

pytestmark = pytest.mark.timeout(600)

LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
SHAPES = ((512, 72), (517, 2056), (1000, 5000), (1023, 3336), (2049, 4104), (3333, 8200), (7777, 3336))


def case(m: int, n: int, k: int) -> Case:
    return Case("gemm", f"{m}x{n}x{k}", {"m": m, "n": n, "k": k}, "bf16")


def build(config: dict, folder: Path):
    from dsl_bench.kernels.triton import gemm_ragged

    from dsl_bench.backends.triton import BACKEND

    static = json.loads(json.dumps(gemm_ragged.static(case(4000, 4104, 4072), config)))
    return BACKEND.compile(gemm_ragged.source(static, "sm_90a"), "sm_90a", folder)


@gluon.jit
def first_row(x, out, BLOCK: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    value = tile.load(layout)
    at = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    gl.store(out + at, gl.sum(value.to(gl.float32), 0))


def source(**more):
    from dsl_bench.backends.triton import TritonSource

    signature = {"x": f"tensordesc<bf16[64,64],{LAYOUT!r}>", "out": "*fp32"}
    return TritonSource(first_row, signature, {"BLOCK": 64}, options={"num_warps": 4}, gluon=True, **more)


def test_a_gluon_function_compiles(tmp_path: Path) -> None:
    from dsl_bench.backends.triton import BACKEND

    artifact = BACKEND.compile(source(), "sm_90a", tmp_path / "a")
    assert artifact.entry == "first_row"
    meta = json.loads((artifact.folder / "kernel.json").read_text())
    assert meta["num_ctas"] == 1
    assert meta["tensordesc_meta"][0]["block_size"] == [64, 64]
    assert json.loads((artifact.folder / "manifest.json").read_text())["params"][0][1].startswith(
        "tensordesc<"
    )


def test_a_cluster_is_the_launchers_affair(tmp_path: Path) -> None:
    from dsl_bench.backends.triton import BACKEND

    alone = BACKEND.compile(source(), "sm_90a", tmp_path / "a")
    two = BACKEND.compile(source(cluster=2), "sm_90a", tmp_path / "b")
    assert json.loads((two.folder / "kernel.json").read_text())["num_ctas"] == 2
    assert (two.folder / "kernel.cubin").read_bytes() == (alone.folder / "kernel.cubin").read_bytes()


def test_gluon_is_not_interpreted() -> None:
    from dsl_bench.backends.triton import BACKEND
    from dsl_bench.errors import KernelFault

    with pytest.raises(KernelFault, match="Gluon"):
        BACKEND.interpret(source())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tile", "cluster", "stages"),
    [
        ("192x128", "1x2", 5),
        ("256x192", "2x1", 3),
        pytest.param("128x256", "2x1", 4, marks=pytest.mark.slow),
        pytest.param("256x128", "2x1", 4, marks=pytest.mark.slow),
        pytest.param("128x192", "2x1", 5, marks=pytest.mark.slow),
        pytest.param("192x192", "1x2", 4, marks=pytest.mark.slow),
        pytest.param("128x128", "1x1", 6, marks=pytest.mark.slow),
    ],
)
def test_the_ring_lies_where_its_ptx_says(tile: str, cluster: str, stages: int, tmp_path: Path) -> None:
    from dsl_bench.kernels.triton._ragged import Tile

    from dsl_bench.plugin import cubin_facts

    config = {"tile": tile, "cluster": cluster, "stride": 8, "stages": stages, "group": 8}
    plan = Tile.of(tile, cluster, stages)
    artifact = build(config, tmp_path / "a")
    facts = cubin_facts(artifact.folder / artifact.cubin, artifact.entry)
    assert (facts.stack, facts.loop_local) == (0, 0)
    assert facts.sass["HGMMA"] == plan.bm // 64 * 4 * (2 if plan.bx else 1)
    assert facts.sass["UTMALDG"] == plan.consumers + plan.columns // (plan.box_b * plan.cm)
    assert artifact.meta["threads"] == 128 * (plan.consumers + 1)
    assert plan.barriers + 1024 <= artifact.meta["smem"] <= plan.barriers + 1024 + 256
    ptx = (artifact.folder / "kernel.ptx").read_text()
    assert "gemm_ragged_param_0[128]" in ptx
    assert "gemm_ragged_param_7[128]" in ptx
    # every matrix descriptor starts from the place that the loads fill
    starts = {int(x) for x in re.findall(r"add\.s32\s+%r\d+, %r\d+, (\d+);", ptx)}
    assert plan.ring_b in starts
    assert plan.ring in starts
    assert not plan.bx or plan.ring_x in starts
    # the compiler's own state lies behind the one allocation
    stores = {int(x) for x in re.findall(r"st\.shared[.\w]*\s+\[global_smem\+(\d+)\]", ptx)}
    assert stores
    assert min(stores) >= plan.barriers + 1024
    assert ptx.count("multicast::cluster") == (plan.consumers if plan.cn > 1 else 0) + (
        plan.columns // (plan.box_b * plan.cm) if plan.cm > 1 else 0
    )


@pytest.mark.parametrize("stride", [1, 4, 8])
@pytest.mark.parametrize("rows", [128, 192, 256, 288, 352, 512])
def test_classes_cover_every_row_in_place(stride: int, rows: int) -> None:
    """What ``place`` does, replayed: every row of A falls to a tile, none beyond A, and all steps of a tile
    together cover K; with every eighth row, each starts on a line of 128 bytes."""
    from dsl_bench.kernels.triton._ragged import classes

    for m, k in SHAPES:
        c = classes(m, k, rows, stride)
        seen = set()
        for i in range(c.tiles):
            extra, rest = i < c.tail * c.long, i - c.tail * c.long
            which, q = divmod(i, c.long) if extra else divmod(rest, c.short)
            which += 0 if extra else c.tail
            first = -(which * k % 64)
            end = extra and q == c.long - 1
            row, which = (c.last, which + c.stride) if end else (q * rows, which)
            assert which < c.count
            assert c.steps * 64 + first >= k
            for r in range(max(row, 0), min(row + rows, c.height)):
                at = r * c.stride + which
                assert at < m
                assert stride < 8 or (at * k + first) % 64 == 0
                seen.add(at)
        assert seen == set(range(m)), (m, k)


def test_gemm_ragged_takes_rows_off_lines_only() -> None:
    from dsl_bench.kernels.triton.gemm_ragged import KERNELS

    kernel = KERNELS[0]
    assert kernel.valid(case(4000, 4104, 4072), kernel.default(case(4000, 4104, 4072))) is None
    for sizes, said in (
        ((4096, 4096, 4096), "128 bytes"),
        ((2047, 2049, 2051), "tensor map"),
        ((16, 64, 72), "few"),
    ):
        reason = kernel.valid(case(*sizes), kernel.default(case(*sizes)))
        assert said in (reason or ""), reason
