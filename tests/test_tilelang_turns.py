"""``tilelang/gemm_turns`` without a GPU: widths, shared memory, its binaries, and its code run on the CPU.

As in ``test_tilelang_pitch``, g++ compiles TileLang's generated code with the headers of ``cuda_on_cpu``: two
warpgroups, a ring and turns, in random order; what would hang there ends with a list of the barriers.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsl_bench.backends.tilelang import BACKEND
from dsl_bench.codegen import sass
from dsl_bench.workloads.gemm import WORKLOAD

READY = BACKEND.probe("compile")
pytestmark = pytest.mark.skipif(not READY.ready, reason=READY.reason or "ready")
CPU = Path(__file__).with_name("cuda_on_cpu")


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
    run_on_cpu(turns, artifact, config, case_of(*sizes, dtype), sms, tmp_path)


def cpu_map(tensor: Any, box: tuple[int, int]) -> bytes:
    """What cuda_on_cpu takes for a matrix, without the address."""
    rows, length = tensor.shape
    numbers = (length, rows, 1, 1, 1, 2, length * 2, 0, 0, 0, box[1], box[0], 1, 1, 1)
    return struct.pack("<Qi4x5q5q5i4x", 0, 2, *numbers).ljust(128, b"\0")


def cpu_library(text: str, dtype: str, folder: Path) -> list[str]:
    """Makes the generated kernel a shared library, cpu.so; returns the names of its parameters in order."""
    names = re.findall(r"(\w+)(?=[,)])", re.search(r"gemm_kernel\((.*?)\) \{", text).group(1) + ")")
    body = "\n".join(x for x in text.splitlines() if not x.startswith("#"))
    body = re.sub(r"extern __shared__ .*\[\];", "unsigned char* const buf_dyn_shmem = tl_dynamic();", body)
    for i, name in enumerate(re.findall(r"auto (\w+) = reinterpret_cast<Barrier\*>", body)):
        body = body.replace(f"reinterpret_cast<Barrier*>({name}_mem)", f"tl_barriers({i})")
    maps = ["a_desc", "b_desc", "c_desc", "c_desc_1"]
    given = ", ".join(f"maps[{maps.index(x)}]" if x in maps else f"numbers[{i}]" for i, x in enumerate(names))
    body = f'#define BF16 {int(dtype == "bf16")}\n#include "tilelang.h"\n#define __align__(x)\n{body}\n' + (
        'extern "C" void run(int grid, int cluster, int threads, int smem, int seed, TensorMap* maps, '
        "int* numbers) {\n    stores.clear();\n"
        f"    run_grid(grid, cluster, threads, smem, seed, [=] {{ gemm_kernel({given}); }});\n"
        "    for (const auto& [fiber, q] : stores)\n"
        '        demand(q.groups.empty() && q.open.empty(), "a store is left");\n'
        "}\n"
    )
    for file in CPU.iterdir():
        shutil.copy(file, folder)
    (folder / "kernel.cpp").write_text(body)
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-w", "-o", "cpu.so"]
    done = subprocess.run(
        ["g++", *flags, "kernel.cpp"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:3000]
    return names


def run_on_cpu(turns: Any, artifact: Any, config: dict[str, Any], case: Any, sms: int, folder: Path) -> None:
    """One launch for each of two seeds, into NaNs, against a product in fp64."""
    torch = pytest.importorskip("torch")
    names = cpu_library((artifact.folder / "kernel.cu").read_text(), case.dtype, folder)
    m, n, k = case["m"], case["n"], case["k"]
    columns, cluster = config["columns"], turns.blocks_of(config["cluster"])
    generator = torch.Generator().manual_seed(3)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    a, b = (torch.randn((x, k), generator=generator).to(kind) for x in (m, n))
    c = torch.full((m, n), float("nan"), dtype=kind)
    blocks, band = turns.arguments(case, config, sms)
    values = {"m": m, "n": n, "k": k, "blocks": blocks, "band": band}
    maps = [cpu_map(a, (128, 64)), cpu_map(b, (columns // cluster, 64)), cpu_map(c, (16, 64))]
    maps.append(cpu_map(c, (16, columns % 64 or 64)))
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        (folder / name).write_bytes(tensor.view(torch.int16).numpy().tobytes())
    job = {
        "library": str(folder / "cpu.so"),
        "arrays": [str(folder / name) for name in "abc"],
        "maps": [x.hex() for x in maps],
        "of": [0, 1, 2, 2],
        "shape": [blocks, cluster, artifact.meta["threads"], artifact.meta["smem"] + 2048],
        "numbers": [values.get(x, 0) for x in names],
        "seeds": [1, 2],
    }
    (folder / "job.json").write_text(json.dumps(job))
    launch = [sys.executable, str(CPU / "launch.py"), str(folder / "job.json")]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    want = a.double() @ b.double().T
    for seed in job["seeds"]:
        got = torch.frombuffer(bytearray((folder / f"out.{seed}").read_bytes()), dtype=kind).view(m, n)
        error = (got.double() - want).abs().max()
        assert error <= want.abs().max() * (2**-8 if case.dtype == "bf16" else 2**-11) + 1e-3, config
