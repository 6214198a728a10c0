"""``tilelang/gemm_turns`` without a GPU: widths, shared memory, its binaries, and its code run on the CPU.

As in ``test_tilelang_pitch``, g++ compiles TileLang's generated code with the headers of ``cuda_on_cpu``: two
warpgroups, a ring and turns, in random order; what would hang there ends with a list of the barriers.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsl_bench.backends.tilelang import BACKEND
from dsl_bench.codegen import sass
from dsl_bench.workloads.gemm import WORKLOAD

READY = BACKEND.probe("compile")
pytestmark = pytest.mark.skipif(not READY.ready, reason=READY.reason or "ready")


@pytest.fixture(scope="module")
def turns() -> Any:
    from dsl_bench.kernels.tilelang import gemm_turns

    return gemm_turns


def case_of(m: int, n: int, k: int, dtype: str = "bf16") -> Any:
    return WORKLOAD.parse_case({"m": str(m), "n": str(n), "k": str(k), "dtype": dtype})


def config_of(columns: int, cluster: str = "1x1", group: int = 16) -> dict[str, Any]:
    return {"columns": columns, "cluster": cluster, "group": group}


def test_guesses_are_valid_and_distinct(turns: Any) -> None:
    cases = [c for c in WORKLOAD.cases() if turns.valid(c, turns.default(c)) is None]
    assert len(cases) >= 20
    for case in cases:
        guesses = [dict(turns.default(case)), *map(dict, turns.seeds(case))]
        assert all(turns.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(g.items()) for g in guesses}) == len(guesses) >= 3, case.name


@pytest.mark.parametrize(
    ("sizes", "columns"),
    # as cuda/gemm_turns chooses
    [
        ((4096, 4096, 4096), 112),
        ((4096, 6144, 4096), 168),
        ((4096, 28672, 4096), 184),
        ((4096, 24576, 1536), 176),
        ((4096, 7168, 2048), 176),
        ((2048, 2048, 2048), 128),
    ],
)
def test_the_default_fills_whole_waves(turns: Any, sizes: tuple[int, int, int], columns: int) -> None:
    assert turns.default(case_of(*sizes))["columns"] == columns


@pytest.mark.parametrize(
    ("sizes", "config", "reason"),
    [
        ((4096, 4096, 4097), config_of(128), "16 bytes"),
        ((4096, 4092, 4096), config_of(128), "16 bytes"),
        ((128, 65536, 4096), config_of(128), "one row of tiles"),
        ((1024, 1024, 1024), config_of(128), "no turns to take"),
        ((4096, 2112, 7168), config_of(128), "times the columns of the best width"),
        ((2048, 2048, 2048), config_of(128, group=32), "all heights are the same"),
        ((1 << 20, 4096, 4096), config_of(128), "32-bit"),
    ],
)
def test_what_it_does_not_do_has_a_reason(
    turns: Any, sizes: tuple[int, int, int], config: dict[str, Any], reason: str
) -> None:
    assert reason in (turns.valid(case_of(*sizes), config) or "")


def test_the_ring_fits_and_chunks_cover_a_tile(turns: Any) -> None:
    for columns in turns.SPACE["columns"]:
        stages, buffers, smem = turns.ring(columns)
        assert stages >= 5 and buffers in (1, 2)
        assert smem + 1024 <= 232448
        # which buffer a chunk takes is baked in: every tile must begin with the same
        assert 2 * -(-columns // 64) % buffers == 0
        squares = [
            (x + y, 4 * count)
            for x in range(0, columns, 64)
            for y, count in turns.squares(min(64, columns - x))
        ]
        assert [c for start, width in squares for c in range(start, start + width)] == list(range(columns))


#: config, sizes, SMs: eight columns over; halves of 84 rows, which begin within a swizzle atom, and a tile
#: below the matrix; few SMs, so that the ring wraps, turns are taken and a block has an odd number of tiles
RUNS = [
    (config_of(136), (300, 400, 456), 2, "bf16"),
    (config_of(168, "2x1", 2), (330, 392, 200), 4, "fp16"),
]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("config", "sizes", "sms", "dtype"), RUNS, ids=["136 1x1", "168 2x1"])
def test_binary_and_code(
    turns: Any,
    tilelang_on_cpu: Any,
    compiled: Any,
    config: dict[str, Any],
    sizes: tuple[int, int, int],
    sms: int,
    dtype: str,
    tmp_path: Path,
) -> None:
    columns, pair = config["columns"], config["cluster"] == "2x1"
    artifact, facts = compiled("tilelang/gemm_turns", turns.static(case_of(4096, 4096, 4096, dtype), config))
    assert facts.registers == 168 and (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert artifact.meta["threads"] == 384 and artifact.meta["smem"] == turns.ring(columns)[2]
    # four k-steps of two halves; every chunk of both is stored once
    assert facts.sass["HGMMA"] == 8 and facts.sass["UTMASTG"] == 2 * -(-columns // 64)
    assert facts.sass["USETMAXREG"] == 2 and facts.sass["STSM"] and not facts.sass.get("STS", 0)
    code = sass(artifact.folder / artifact.cubin, artifact.entry)
    assert code.count(f"HGMMA.64x{columns}x16") == 8
    assert ("UTMALDG.2D.MULTICAST" in code) == pair
    # one batch stays in flight, then none: wgmma is not serialised
    assert re.findall(r"WARPGROUP.DEPBAR.LE gsb0, (\w+)", code) == ["0x1", "0x0"]
    text = (artifact.folder / "kernel.cu").read_text()
    assert "__sync" not in text[text.index("warpgroup_reg_dealloc") :].replace("__syncwarp", "")
    assert ("tl::cluster_sync" if pair else "__syncthreads") in text[: text.index("warpgroup_reg_dealloc")]
    if not shutil.which("g++"):
        pytest.skip("no g++")
    run_on_cpu(tilelang_on_cpu, turns, artifact, config, case_of(*sizes, dtype), sms, tmp_path)


def run_on_cpu(
    cpu: Any, turns: Any, artifact: Any, config: dict[str, Any], case: Any, sms: int, to: Path
) -> None:
    """One launch for each of two seeds, into NaNs, against a product in fp64."""
    pytest.importorskip("torch")
    m, n, k = case["m"], case["n"], case["k"]
    columns, cluster = config["columns"], turns.blocks_of(config["cluster"])
    blocks, band = turns.arguments(case, config, sms)

    def matrix(rows: int, length: int, box: tuple[int, int]) -> bytes:
        return cpu.tensor_map((length, rows), (2, length * 2), box[::-1])

    maps = {
        "a_desc": ("a", matrix(m, k, (128, 64))),
        "b_desc": ("b", matrix(n, k, (columns // cluster, 64))),
        "c_desc": ("c", matrix(m, n, (16, 64))),
        "c_desc_1": ("c", matrix(m, n, (16, columns % 64 or 64))),
    }
    cpu.check(artifact, case, maps, {"blocks": blocks, "band": band}, cluster, to)
