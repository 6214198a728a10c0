"""``triton/gemm_ragged_split``: its cut of K replayed on the host, and what it compiles to for sm_90a."""

import json
import random
from pathlib import Path

import pytest

from dsl_bench.workload import Case

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language")

pytestmark = pytest.mark.timeout(600)

RAGGED = (
    (4000, 4104, 4072),
    (1000, 3000, 5000),
    (3333, 2728, 8200),
    (2049, 8200, 4104),
    (517, 10248, 2056),
    (7777, 1544, 3336),
)


def case(m: int, n: int, k: int) -> Case:
    return Case("gemm", f"{m}x{n}x{k}", {"m": m, "n": n, "k": k}, "bf16")


def cuts():
    from dsl_bench.kernels.triton._split import Cut

    rng = random.Random(0)
    for tiles, steps in (
        (48, 79),
        (154, 129),
        (297, 65),
        (123, 33),
        (217, 53),
        (272, 64),
        (67, 8),
        (1, 9),
        (66, 9),
    ):
        for workers in (66, 132):
            for more in (0, 1):
                yield Cut.of(tiles, steps, workers, more)
    for _ in range(300):
        tiles, steps = rng.randrange(1, 400), rng.randrange(8, 200)
        yield Cut.of(tiles, steps, rng.choice((4, 57, 66, 114, 132)), rng.choice((0, 1)))


def test_every_step_falls_to_one_cluster() -> None:
    for cut in cuts():
        found = sorted(
            (tile, step)
            for w in range(cut.workers)
            for tile, begin, end in cut.units(w)
            for step in range(begin, end)
        )
        assert found == [(t, s) for t in range(cut.tiles) for s in range(cut.steps)], cut


def test_parts_are_added_once_by_a_later_cluster() -> None:
    """Each cluster leaves one part at most, before it waits for any; what is waited for has been left by
    clusters that started earlier, so no order of residency can hang; and the parts make up the tile."""
    for cut in cuts():
        left: dict[int, tuple[int, int, int]] = {}
        added: list[int] = []
        for w in range(cut.workers):
            waited = False
            for tile, begin, end in cut.units(w):
                assert begin < end
                if end < cut.steps:
                    assert w not in left and not waited, cut
                    left[w] = (tile, begin, end)
                    continue
                if begin == 0:
                    continue
                waited = True
                at = begin
                for p in range(1, cut.parts(w, tile) + 1):
                    other, first, last = left[w - p]
                    assert (other, last) == (tile, at), cut
                    at = first
                    added.append(w - p)
                assert at == 0, cut
        assert sorted(added) == sorted(left), cut


def test_configs_of_the_ragged_cases() -> None:
    """Few, and all of them cut; the default is among them."""
    from dsl_bench.kernels.triton import gemm_ragged_split
    from dsl_bench.kernels.triton._split import Cut, plan

    kernel = gemm_ragged_split.KERNELS[0]
    for sizes in RAGGED:
        able = [c for c in kernel.configs() if kernel.valid(case(*sizes), c) is None]
        assert 2 <= len(able) <= 24, sizes
        assert kernel.default(case(*sizes)) in able
        assert all(seed in able for seed in kernel.seeds(case(*sizes)))
        for config in able:
            tile, rows = plan(sizes, config)
            workers = 132 // (tile.cm * tile.cn)
            tiles = rows.tiles * -(-sizes[1] // (tile.columns * tile.cn))
            cut = Cut.of(tiles, rows.steps, workers, int(config["more"]))
            assert cut.workers == workers
            assert cut.shared


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((4096, 4096, 4096), "128 bytes"), ((2047, 2049, 2051), "tensor map"), ((16, 64, 72), "few")],
)
def test_what_is_not_its_business(sizes: tuple[int, int, int], said: str) -> None:
    from dsl_bench.kernels.triton.gemm_ragged_split import KERNELS

    reason = KERNELS[0].valid(case(*sizes), KERNELS[0].default(case(*sizes)))
    assert said in (reason or ""), reason


@pytest.mark.parametrize(
    ("tile", "cluster", "stages"),
    [
        ("128x256", "2x1", 4),
        pytest.param("128x256", "1x2", 4, marks=pytest.mark.slow),
        pytest.param("256x128", "2x1", 4, marks=pytest.mark.slow),
        pytest.param("192x128", "1x2", 5, marks=pytest.mark.slow),
    ],
)
def test_it_compiles_to_what_it_should(tile: str, cluster: str, stages: int, tmp_path: Path) -> None:
    from dsl_bench.kernels.triton import gemm_ragged_split as kernel
    from dsl_bench.kernels.triton._ragged import Tile

    from dsl_bench.backends.triton import BACKEND
    from dsl_bench.plugin import cubin_facts

    config = {"tile": tile, "cluster": cluster, "stride": 1, "stages": stages, "group": 8, "more": 1}
    static = json.loads(json.dumps(kernel.static(case(3333, 2728, 8200), config)))
    artifact = BACKEND.compile(kernel.source(static, "sm_90a"), "sm_90a", tmp_path / "a")
    plan = Tile.of(tile, cluster, stages)
    facts = cubin_facts(artifact.folder / artifact.cubin, artifact.entry)
    assert (facts.stack, facts.loop_local) == (0, 0)
    assert facts.sass["HGMMA"] == plan.bm // 64 * 4
    ptx = (artifact.folder / "kernel.ptx").read_text()
    # the texts of the loads name the parameters that hold the tensor maps
    assert "gemm_ragged_split_param_0[128]" in ptx
    assert "gemm_ragged_split_param_7[128]" in ptx
    assert "gemm_ragged_param" not in ptx
    # parts move two elements at a time, each once left and once added
    pairs = plan.consumers * plan.rows * plan.bn // 128 // 2
    assert ptx.count("st.global.cg.v2.b32") == pairs
    assert ptx.count("ld.global.cg.v2.b32") == pairs
    assert ptx.count("st.release.gpu") == ptx.count("ld.acquire.gpu") == plan.consumers
    assert plan.barriers + 1024 <= artifact.meta["smem"] <= plan.barriers + 1024 + 256
