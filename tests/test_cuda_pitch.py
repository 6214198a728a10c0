"""``cuda/gemm_pitch`` without a GPU: its binaries, and which rows, columns and steps its blocks work on."""

from pathlib import Path

import pytest
from dsl_bench.kernels.cuda import _plan, gemm_pitch
from dsl_bench.kernels.cuda._pitch import Classes, Shape, clusters_of, pitch_work

from dsl_bench.backends.cuda import BACKEND
from dsl_bench.codegen import cubin_facts
from dsl_bench.plugin import Case
from dsl_bench.workloads.gemm import WORKLOAD

(PITCH,) = gemm_pitch.KERNELS
RAGGED = [c for c in WORKLOAD.cases() if "ragged" in c.groups]
CONFIG = {"stride": 8, "stages": 4, "group": 8, "splits": 1, "fetch": 128}
BUILDS = (
    {**CONFIG, "tile": "128x192 pingpong", "cluster": "4x1", "stages": 5},
    {**CONFIG, "tile": "288x128 swapped", "cluster": "1x2"},
    {**CONFIG, "tile": "176x256 swapped", "cluster": "1x2", "stages": 3},
    {**CONFIG, "tile": "192x176 coop", "cluster": "2x1", "splits": 0},
    {**CONFIG, "tile": "176x192 swapped", "cluster": "2x1", "splits": 0},
)


@pytest.mark.parametrize("config", BUILDS, ids=lambda c: f"{c['tile']} {c['cluster']}")
def test_no_spills(config: dict, tmp_path: Path) -> None:
    state = BACKEND.probe("compile")
    if not state.ready:
        pytest.skip(f"{state.reason} ({state.hint})")
    source = PITCH.source(PITCH.static(RAGGED[0], config), "sm_90a")
    artifact = BACKEND.compile(source, "sm_90a", tmp_path)
    facts = cubin_facts(tmp_path / artifact.cubin, artifact.entry)
    assert (facts.spill_stores, facts.spill_loads, facts.stack, facts.loop_local) == (0, 0, 0, 0)
    assert artifact.meta["advisories"] == []
    shape = Shape.of(config["tile"])
    assert facts.sass["HGMMA"] == 4 * shape.engine.mi * shape.products
    assert facts.sass["USETMAXREG"] == 2


def test_guesses_are_valid_and_distinct() -> None:
    for case in RAGGED:
        guesses = [dict(PITCH.default(case)), *map(dict, PITCH.seeds(case))]
        assert all(PITCH.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(g.items()) for g in guesses}) == len(guesses), case.name
        assert any(g["tile"].endswith("swapped") for g in guesses), case.name
        assert case["m"] < 1000 or any(g["stride"] > 1 for g in guesses), case.name


def test_lines_start_elsewhere_only() -> None:
    case = next(c for c in WORKLOAD.cases() if c.name == "4096x4096x4096-bf16")
    assert "128 bytes" in (PITCH.valid(case, PITCH.default(case)) or "")


@pytest.mark.parametrize("stride", [1, 4, 8])
@pytest.mark.parametrize("rows", [128, 144, 176, 288, 384, 768])
def test_classes_cover_every_row_in_place(stride: int, rows: int) -> None:
    """``place`` of gemm_pitch.cu, replayed."""
    for m, k in (
        (512, 72),
        (517, 2056),
        (1000, 5000),
        (1023, 3336),
        (2049, 4104),
        (3333, 8200),
        (7777, 3336),
    ):
        c = Classes.of(m, k, rows, stride)
        seen = set()
        for row in range(c.tiles):
            rest = row - c.tail * c.longer
            more = rest < 0
            cls, q = divmod(row, c.longer) if more else divmod(rest, c.shorter)
            cls += 0 if more else c.tail
            first, begin = -(cls * k % 64), q * rows
            if more and q == c.longer - 1:
                cls, begin = cls + stride, c.last
            assert begin >= 0
            assert cls < c.count
            assert c.steps * 64 + first >= k
            for r in range(begin, min(begin + rows, c.height)):
                at = r * stride + cls
                assert at < m
                assert stride < 8 or (at * k + first) % 64 == 0
                seen.add(at)
        assert seen == set(range(m)), (m, k)


def test_no_more_clusters_than_fit() -> None:
    assert [clusters_of(x, 132) for x in ("1x1", "2x1", "1x2", "4x1")] == [132, 66, 66, 32]
    for case in RAGGED:
        for g in (PITCH.default(case), *PITCH.seeds(case)):
            sizes = (case["m"], case["n"], case["k"])
            work, _ = pitch_work(sizes, Shape.of(g["tile"]), g["cluster"], 8, g["splits"], g["stride"])
            assert work.launched <= clusters_of(g["cluster"], _plan.SMS)


class Matrix:
    def __init__(self, rows: int, columns: int) -> None:
        self.shape = (rows, columns)

    def data_ptr(self) -> int:
        return 0


class Module:
    """Records the launch that a bind asks for."""

    sms = 132

    def scratch(self, name: str, nbytes: int) -> Matrix:
        return Matrix(1, max(nbytes, 1))

    def launcher(self, grid, args):
        self.grid, self.args = grid, args
        return lambda: None


def test_bind_makes_boxes_that_the_kernel_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def class_map(tensor, dtype, rows, box, fetch):
        made.append((rows, box))
        assert box[0] <= 256
        assert box[0] % 8 == 0
        assert rows[1] * (rows[2] - 1) + rows[0] - 1 < tensor.shape[0]
        return b"x" * 128

    monkeypatch.setattr(gemm_pitch, "class_map", class_map)
    for case in RAGGED:
        m, n, k = case["m"], case["n"], case["k"]
        for config in (PITCH.default(case), *PITCH.seeds(case)):
            made.clear()
            module, inputs = Module(), {"a": Matrix(m, k), "b": Matrix(n, k)}
            PITCH.bind(module, case, config, inputs, {"c": Matrix(m, n)})
            shape, (cm, cn) = Shape.of(config["tile"]), _plan.blocks_of(config["cluster"])
            (_, (box_a, _)), (_, (box_b, _)), *stores = made
            assert shape.bm % (box_a * cn) == 0
            assert shape.bn % (box_b * cm) == 0
            if shape.swapped:
                ((_, box),) = stores
                assert shape.bm % box[0] == 0
                assert box[1] == 64
            else:  # a warp's rows, and the columns that 64 does not divide
                (_, whole), *tails = stores
                assert whole == (16, 64)
                assert [box for _, box in tails] == ([(16, shape.bn % 64)] if shape.bn % 64 else [])
            assert [len(a) for a in module.args] == [128, 128, 128 * len(stores), 64, 24]
            assert module.grid[0] % (cm * cn) == 0


def test_a_case_of_few_rows_has_no_classes() -> None:
    case = Case("gemm", "", {"m": 100, "n": 264, "k": 520}, "bf16")
    config = {**CONFIG, "tile": "128x128 coop", "cluster": "1x1", "stages": 6}
    assert "classes" in (PITCH.valid(case, config) or "")
    assert PITCH.valid(case, {**config, "stride": 1}) is None
