"""``tilelang/gemm_pitch`` without a GPU: rows that its tiles take, its binaries, and its code run on the CPU.

TileLang's generated code is compiled by g++ with the headers of ``cuda_on_cpu`` in place of TileLang's and
run as it is, in a process of its own: barriers, rings, multicasts, products and stores, in random order. What
would hang there ends with a list of the barriers.
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
from dsl_bench.workloads.gemm import WORKLOAD

READY = BACKEND.probe("compile")
pytestmark = pytest.mark.skipif(not READY.ready, reason=READY.reason or "ready")
CPU = Path(__file__).with_name("cuda_on_cpu")
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
    run_on_cpu(pitch, artifact, config, case_of(*sizes, dtype), sms, tmp_path)


def cpu_map(tensor: Any, rows: tuple[int, int, int], box: tuple[int, int]) -> bytes:
    """What cuda_on_cpu takes for ``by_class``, without the address."""
    (count, stride, height), length = rows, tensor.shape[1]
    sizes = (length, height, count, 1, 1)
    strides = (2, stride * length * 2, length * 2, 0, 0)
    numbers = (*sizes, *strides, box[1], box[0], 1, 1, 1)
    return struct.pack("<Qi4x5q5q5i4x", 0, 3, *numbers).ljust(128, b"\0")


def cpu_library(text: str, dtype: str, folder: Path) -> list[str]:
    """Makes the generated kernel a shared library, cpu.so; returns the names of its parameters in order."""
    names = re.findall(r"(\w+)(?=[,)])", re.search(r"gemm_kernel\((.*?)\) \{", text).group(1) + ")")
    body = "\n".join(x for x in text.splitlines() if not x.startswith("#include"))
    body = re.sub(r"extern __shared__ .*\[\];", "unsigned char* const buf_dyn_shmem = tl_dynamic();", body)
    for i, name in enumerate(re.findall(r"auto (\w+) = reinterpret_cast<Barrier\*>", body)):
        body = body.replace(f"reinterpret_cast<Barrier*>({name}_mem)", f"tl_barriers({i})")
    given = ", ".join(
        f"maps[{'abc'.index(x[0])}]" if x.endswith("_desc") else f"numbers[{i}]" for i, x in enumerate(names)
    )
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


def run_on_cpu(pitch: Any, artifact: Any, config: dict[str, Any], case: Any, sms: int, folder: Path) -> None:
    """One launch for each of two seeds, against a product in fp64."""
    torch = pytest.importorskip("torch")
    names = cpu_library((artifact.folder / "kernel.cu").read_text(), case.dtype, folder)
    m, n, k = case["m"], case["n"], case["k"]
    generator = torch.Generator().manual_seed(3)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    a, b = (torch.randn((x, k), generator=generator).to(kind) for x in (m, n))
    c = torch.full((m, n), float("nan"), dtype=kind)
    blocks, band, *rest = pitch.arguments(case, config, sms)
    order = ("rows", "stride", "height", "tail", "longer", "shorter", "last", "steps")
    values = {"m": m, "n": n, "k": k, "blocks": blocks, "band": band, **dict(zip(order, rest, strict=True))}
    shape, (tall, wide) = pitch.Shape.of(config["tile"]), pitch.cluster_of(config["cluster"])
    rows = (values["stride"] + values["tail"], values["stride"], values["height"])
    share = shape.bm // wide
    boxes = ((share // (2 if share > 256 else 1), 64), (shape.bn // tall, 64))
    maps = [cpu_map(a, rows, boxes[0]), cpu_map(b, (1, 1, n), boxes[1])]
    maps.append(cpu_map(c, rows, (shape.width if shape.swap else shape.bm, 64)))
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        (folder / name).write_bytes(tensor.view(torch.int16).numpy().tobytes())
    job = {
        "library": str(folder / "cpu.so"),
        "arrays": [str(folder / name) for name in "abc"],
        "maps": [x.hex() for x in maps],
        "shape": [blocks, tall * wide, artifact.meta["threads"], artifact.meta["smem"] + 2048],
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
