"""``tilelang/gemm_pitch`` without a GPU: rows that its tiles take, its binaries, and its code run on the CPU.

TileLang's generated code is compiled by g++ with the headers of ``cuda_on_cpu`` in place of TileLang's and
run as it is, in a process of its own: barriers, rings, multicasts, products and stores, in random order. What
would hang there ends with a list of the barriers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dsl_bench.backends.tilelang import BACKEND
from dsl_bench.workloads.gemm import WORKLOAD

READY = BACKEND.probe("compile")
pytestmark = pytest.mark.skipif(not READY.ready, reason=READY.reason or "ready")
RAGGED = [c for c in WORKLOAD.cases() if "ragged" in c.groups]


@pytest.fixture(scope="module")
def pitch() -> Any:
    from dsl_bench.kernels.tilelang import gemm_pitch

    return gemm_pitch


def case_of(m: int, n: int, k: int, dtype: str = "bf16") -> Any:
    return WORKLOAD.parse_case({"m": str(m), "n": str(n), "k": str(k), "dtype": dtype})


def test_guesses_are_valid_and_distinct(pitch: Any) -> None:
    for case in RAGGED:
        guesses = [dict(pitch.default(case)), *map(dict, pitch.seeds(case))]
        assert all(pitch.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(g.items()) for g in guesses}) == len(guesses), case.name
        assert any(g["tile"].endswith("swapped") for g in guesses), case.name
        assert case["m"] < 1000 or any(g["stride"] > 1 for g in guesses), case.name


def test_only_cases_off_128_bytes_are_taken(pitch: Any) -> None:
    for case in WORKLOAD.cases():
        taken = pitch.valid(case, pitch.default(case)) is None
        assert taken == ("ragged" in case.groups), case.name
    assert "128 bytes" in pitch.valid(case_of(4096, 4096, 4096), pitch.default(RAGGED[0]))
    assert "16 bytes" in pitch.valid(case_of(4096, 4096, 4099), pitch.default(RAGGED[0]))


@pytest.mark.parametrize("stride", [1, 4, 8])
@pytest.mark.parametrize("rows", [128, 144, 352, 576])
def test_classes_cover_every_row_in_place(pitch: Any, stride: int, rows: int) -> None:
    """The kernel's arithmetic, replayed."""
    for m, k in ((512, 72), (517, 2056), (1000, 5000), (1023, 3336), (2049, 4104), (3333, 8200)):
        c = pitch.Classes.of(m, k, rows, stride)
        seen = set()
        for tile in range(c.tiles):
            rest = tile - c.tail * c.longer
            cls = tile // c.longer if rest < 0 else c.tail + rest // c.shorter
            q = tile - cls * c.longer if rest < 0 else rest - (cls - c.tail) * c.shorter
            begin = -(cls * k % 64)
            row, cls = (c.last, cls + stride) if rest < 0 and q == c.longer - 1 else (q * rows, cls)
            assert row >= 0 and cls < c.stride + c.tail and c.steps * 64 + begin >= k
            for r in range(row, min(row + rows, c.height)):
                at = r * stride + cls
                assert at < m and (stride < 8 or (at * k + begin) % 64 == 0)
                seen.add(at)
        assert seen == set(range(m)), (m, k)


#: config, sizes, SMs: every kind of tile, operand shared, stride and number of buffers; few SMs, so that the
#: ring wraps and tiles follow each other
BASE = {"cluster": "2x1", "stride": 1, "buffers": 1, "group": 8}
RUNS = [
    ({**BASE, "tile": "128x192", "stride": 4}, (523, 392, 520), 4, "bf16"),
    ({**BASE, "tile": "256x128", "stride": 8}, (1029, 264, 200), 4, "fp16"),
    ({**BASE, "tile": "192x176", "cluster": "1x2", "buffers": 1}, (389, 712, 136), 2, "bf16"),
    ({**BASE, "tile": "144x256 swapped"}, (300, 520, 392), 2, "bf16"),
    ({**BASE, "tile": "176x256 swapped", "cluster": "1x1", "buffers": 2}, (517, 264, 72), 2, "bf16"),
    ({**BASE, "tile": "176x192 swapped", "cluster": "1x2", "stride": 4}, (517, 776, 264), 4, "fp16"),
    ({**BASE, "tile": "288x128 swapped", "cluster": "1x1", "buffers": 1}, (577, 136, 328), 3, "bf16"),
]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes", "sms", "dtype"), RUNS, ids=[f"{r[0]['tile']} {r[0]['cluster']}" for r in RUNS]
)
def test_binary_and_code(
    pitch: Any,
    tilelang_on_cpu: Any,
    compiled: Any,
    config: dict[str, Any],
    sizes: tuple[int, int, int],
    sms: int,
    dtype: str,
    tmp_path: Path,
) -> None:
    static = pitch.static(case_of(1000, 3000, 5000, dtype), config)
    artifact, facts = compiled("tilelang/gemm_pitch", static)
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert facts.sass["USETMAXREG"] == 2 and facts.sass["HGMMA"] % 4 == 0 and facts.sass["STSM"]
    assert not facts.sass.get("STS", 0), "C goes through stmatrix"
    text = (artifact.folder / "kernel.cu").read_text()
    assert "__syncthreads" not in text[text.index("warpgroup_reg_dealloc") :]
    assert "threadIdx.x) < 256)" not in text, "a chunk of C belongs to some of its threads only"
    if not shutil.which("g++"):
        pytest.skip("no g++")
    run_on_cpu(tilelang_on_cpu, pitch, artifact, config, case_of(*sizes, dtype), sms, tmp_path)


def run_on_cpu(
    cpu: Any, pitch: Any, artifact: Any, config: dict[str, Any], case: Any, sms: int, to: Path
) -> None:
    """One launch for each of two seeds, against a product in fp64."""
    pytest.importorskip("torch")
    n, k = case["n"], case["k"]
    blocks, band, *rest = pitch.arguments(case, config, sms)
    order = ("rows", "stride", "height", "tail", "longer", "shorter", "last", "steps")
    values = {"blocks": blocks, "band": band, **dict(zip(order, rest, strict=True))}
    shape, (tall, wide) = pitch.Shape.of(config["tile"]), pitch.cluster_of(config["cluster"])

    def by_class(length: int, rows: tuple[int, int, int], height: int) -> bytes:
        count, stride, rows_of_class = rows
        strides = (2, stride * length * 2, length * 2)
        return cpu.tensor_map((length, rows_of_class, count), strides, (64, height))

    rows = (values["stride"] + values["tail"], values["stride"], values["height"])
    share = shape.bm // wide
    maps = {
        "a_desc": ("a", by_class(k, rows, share // (2 if share > 256 else 1))),
        "b_desc": ("b", by_class(k, (1, 1, n), shape.bn // tall)),
        "c_desc": ("c", by_class(n, rows, shape.width if shape.swap else shape.bm)),
    }
    cpu.check(artifact, case, maps, values, tall * wide, to)
