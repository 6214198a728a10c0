"""``cuda/gemm_turns`` without a GPU: its binaries, its shared memory, and what it is launched with."""

from pathlib import Path
from typing import Any

import pytest
from dsl_bench.kernels.cuda import _plan, _tma, gemm_turns

from dsl_bench.backends.cuda import BACKEND
from dsl_bench.codegen import cubin_facts, sass
from dsl_bench.plugin import Case
from dsl_bench.workloads.gemm import WORKLOAD

(TURNS,) = gemm_turns.KERNELS
CASES = [c for c in WORKLOAD.cases() if TURNS.valid(c, TURNS.default(c)) is None]


def case_named(name: str) -> Case:
    return next(c for c in WORKLOAD.cases() if c.name == name)


@pytest.mark.parametrize(("columns", "cluster"), [(112, 2), (168, 1), (192, 2)])
def test_no_spills(columns: int, cluster: int, tmp_path: Path) -> None:
    state = BACKEND.probe("compile")
    if not state.ready:
        pytest.skip(f"{state.reason} ({state.hint})")
    static = TURNS.static(CASES[0], {"columns": columns, "cluster": cluster, "group": 16, "fetch": 128})
    artifact = BACKEND.compile(TURNS.source(static, "sm_90a"), "sm_90a", tmp_path)
    facts = cubin_facts(tmp_path / artifact.cubin, artifact.entry)
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert artifact.meta["advisories"] == []
    assert artifact.meta["registers"] * artifact.meta["threads"] <= 65536
    # four k-steps of two halves
    assert facts.sass["HGMMA"] == 8
    text = sass(tmp_path / artifact.cubin, artifact.entry)
    assert ("UTMALDG.2D.MULTICAST" in text) == (cluster == 2)


def test_the_ring_fits_and_leaves_store_buffers() -> None:
    for columns in gemm_turns.SPACE["columns"]:
        tile = gemm_turns.tile(columns)
        stages = tile.max_stages()
        assert tile.fits_registers()
        assert 5 <= stages <= 14
        assert tile.store_buffers(stages) >= 1
        assert tile.smem(stages) <= _plan.SMEM_LIMIT
    assert gemm_turns.tile(112).max_stages() == 7


@pytest.mark.parametrize(
    ("name", "columns"),
    # what cublasLt takes under load at these sizes, but for 184 (its 176 has a hundredth more columns)
    [
        ("4096x4096x4096-bf16", 112),
        ("4096x6144x4096-bf16", 168),
        ("4096x10240x8192-bf16", 168),
        ("4096x57344x8192-bf16", 168),
        ("4096x28672x4096-bf16", 184),
        ("4096x24576x1536-bf16", 176),
        ("4096x7168x2048-bf16", 176),
        ("2048x2048x2048-bf16", 128),
    ],
)
def test_the_default_fills_whole_waves(name: str, columns: int) -> None:
    assert TURNS.default(case_named(name))["columns"] == columns


def test_guesses_are_valid_and_distinct() -> None:
    assert len(CASES) >= 20
    for case in CASES:
        guesses = [dict(TURNS.default(case)), *map(dict, TURNS.seeds(case))]
        assert all(TURNS.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(sorted(g.items())) for g in guesses}) == len(guesses), case.name
        assert all(g[name] in values for g in guesses for name, values in TURNS.space.items()), case.name


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((4096, 4096, 4097), "rows of K"),
        ((4096, 4092, 4096), "rows of N"),
        ((128, 65536, 4096), "one row of tiles"),
        ((1024, 1024, 1024), "no turns to take"),
        ((4096, 2112, 7168), "times the columns of the best width"),
        ((1 << 31, 4096, 4096), "32 bits"),
    ],
)
def test_what_it_does_not_do_has_a_reason(sizes: tuple[int, int, int], reason: str) -> None:
    case = Case("gemm", "", dict(zip("mnk", sizes, strict=True)), "bf16")
    config = {"columns": 128, "cluster": 1, "group": 16, "fetch": 128}
    assert reason in (TURNS.valid(case, config) or "")


class Matrix:
    """A tensor as far as a tensor map is concerned."""

    def __init__(self, rows: int, columns: int) -> None:
        self.shape = (rows, columns)

    def stride(self, dim: int) -> int:
        return (self.shape[1], 1)[dim]

    def data_ptr(self) -> int:
        return 0


class FakeModule:
    """Records the launch that a bind asks for."""

    sms = 132

    def launcher(self, grid: tuple[int, ...], args: list[bytes]) -> Any:
        self.grid, self.args = grid, args
        return lambda: None


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("columns", gemm_turns.SPACE["columns"])
def test_boxes_cover_a_tile(monkeypatch: pytest.MonkeyPatch, columns: int, cluster: int) -> None:
    boxes = []

    def tensor_map(address: int, dtype: str, shape: Any, pitch: int, box: Any, swizzle: int = 128) -> bytes:
        assert swizzle == 128
        boxes.append(box)
        return bytes(_tma.MAP_BYTES)

    def tiled_map(address: int, dtype: str, sizes: Any, strides: Any, box: Any, fetch: int) -> bytes:
        assert fetch == 128
        boxes.append(box[::-1])
        return bytes(_tma.MAP_BYTES)

    monkeypatch.setattr(_tma, "tensor_map", tensor_map)
    monkeypatch.setattr(gemm_turns, "tiled_map", tiled_map)
    m, n, k = 4000, 4096, 4096
    case = Case("gemm", "", {"m": m, "n": n, "k": k}, "bf16")
    config = {"columns": columns, "cluster": cluster, "group": 16, "fetch": 128}
    module = FakeModule()
    call = TURNS.bind(module, case, config, {"a": Matrix(m, k), "b": Matrix(n, k)}, {"c": Matrix(m, n)})
    call.run()
    a, b, *stores = boxes
    assert a == (128, 64)
    assert b[0] * cluster == columns
    # 64 columns at a time, and what is left, in boxes of a warp's rows
    assert {box[0] for box in stores} == {16}
    assert columns // 64 * 64 + (stores[1][1] if len(stores) > 1 else 0) == columns
    assert all(box[1] % 8 == 0 and box[1] <= 64 for box in stores)
    assert [len(x) for x in module.args] == [128, 128, 128 * len(stores), 64]
    assert module.grid == (132 // cluster * cluster,)


def test_clusters_cover_all_tiles_of_an_odd_count() -> None:
    case = Case("gemm", "", {"m": 128 * 35, "n": 4096, "k": 512}, "bf16")
    work = gemm_turns.work_of(case, {"columns": 128, "cluster": 2, "group": 16, "fetch": 128})
    assert (work.tiles_m, work.tiles_n, work.clusters) == (18, 32, 66)
    assert work.group == 8
