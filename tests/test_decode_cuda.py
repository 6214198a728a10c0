"""CUDA decode kernels without a GPU: what nvcc makes of them, shares of work, and the kernels run on the CPU.

``cuda_on_cpu`` gives the functions of ptx.cuh and decode_ptx.cuh other bodies; the rest of a kernel, its
barriers, rings, addresses and lists, is compiled by g++ and run as it is, with the ``bind`` that the harness
calls.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsl_bench.kernels.cuda import _pieces, attention_decode, mla_decode

from dsl_bench import check
from dsl_bench.backends.cuda import BACKEND, CudaSource
from dsl_bench.codegen import cubin_facts
from dsl_bench.plugin import Case, Kernel
from dsl_bench.workloads import attention_decode as paged
from dsl_bench.workloads import mla_decode as latent

torch = pytest.importorskip("torch")

(DECODE,), (MLA,) = attention_decode.KERNELS, mla_decode.KERNELS
KERNELS = [(DECODE, paged.WORKLOAD), (MLA, latent.WORKLOAD)]
SOURCES = Path(attention_decode.__file__).parent


# ---- what nvcc makes of them -------------------------------------------------------------------------


def statics(kernel: Kernel, workload: Any) -> list[dict[str, Any]]:
    """All specialisations that the named cases may need."""
    found = {
        tuple(sorted(kernel.static(case, config).items())): dict(kernel.static(case, config))
        for case in workload.cases()
        for config in kernel.configs()
        if kernel.valid(case, config) is None
    }
    return list(found.values())


SOME_DECODE = random.Random(0).sample(statics(DECODE, paged.WORKLOAD), 4)
BUILDS = [(MLA, s) for s in statics(MLA, latent.WORKLOAD)] + [(DECODE, s) for s in SOME_DECODE]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kernel", "static"), BUILDS, ids=lambda x: getattr(x, "id", None))
def test_no_spills_and_the_products_stay_asynchronous(
    kernel: Kernel, static: dict[str, Any], tmp_path: Path
) -> None:
    state = BACKEND.probe("compile")
    if not state.ready:
        pytest.skip(f"{state.reason} ({state.hint})")
    artifact = BACKEND.compile(kernel.source(static, "sm_90a"), "sm_90a", tmp_path)
    facts = cubin_facts(tmp_path / artifact.cubin, artifact.entry)
    assert artifact.meta["advisories"] == []  # C7510 and the like: wgmma serialised
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    resident = static.get("resident", 1)
    assert artifact.meta["registers"] * artifact.meta["threads"] * resident <= 65536
    copies = ("LDGSTS", 32) if static.get("load") == attention_decode.LOADS["warp"] else ("UTMALDG", 2)
    assert facts.sass.get(copies[0], 0) >= copies[1]
    if kernel is MLA:
        assert facts.sass["HGMMA"] >= 18 and facts.sass["USETMAXREG"] == 2 and "HMMA" not in facts.sass
    else:
        assert facts.sass["HMMA"] >= 24 and "HGMMA" not in facts.sass


# ---- shares of work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", _pieces.PLANS)
def test_lists_cover_every_job_once_and_evenly(way: str) -> None:
    rng = random.Random(1)
    for _ in range(200):
        units = [rng.choice((0, 1, 2, rng.randrange(300))) for _ in range(rng.randrange(1, 40))]
        workers, overhead = rng.choice((1, 3, 66, 132)), rng.choice((0.0, 0.25, 2.0))
        lists = _pieces.plan(units, workers, overhead, way, 1.0)
        assert 1 <= len(lists) <= workers and all(lists)
        for job, count in enumerate(units):
            mine = sorted(p for pieces in lists for p in pieces if p.job == job)
            edges = [p.begin for p in mine] + [mine[-1].end]
            assert edges == sorted({p.end for p in mine} | {0}) or (not count and edges == [0, 0])
            assert edges[-1] == count
        busiest = _pieces.makespan(units, lists, overhead)
        if way == "stream":
            pieces = sum(map(len, lists))
            assert busiest <= (sum(units) + overhead * pieces) / workers + overhead + 2


def test_a_grid_of_pieces_covers_every_job_once_longest_first() -> None:
    rng = random.Random(2)
    for _ in range(200):
        units = [rng.choice((0, 1, 2, rng.randrange(300))) for _ in range(rng.randrange(1, 40))]
        lists = attention_decode.deal(units, rng.choice((1, 3, 66, 132)), rng.choice((0.0, 0.25, 2.0)))
        assert {len(pieces) for pieces in lists} == {1}
        sizes = [piece.end - piece.begin for (piece,) in lists]
        assert sizes == sorted(sizes, reverse=True)
        for job, count in enumerate(units):
            mine = sorted(p for (p,) in lists if p.job == job)
            assert [p.begin for p in mine] == [0, *(p.end for p in mine[:-1])] and mine[-1].end == count
    assert attention_decode.busiest([[_pieces.Piece(0, 0, n)] for n in (5, 4, 3)], 2) == 7


def test_slots_of_a_cut_job_follow_each_other() -> None:
    lists = _pieces.plan([7, 0, 20, 1], 4, 0.0, "stream")
    found, starts, slots = _pieces.items(lists)
    assert [len(pieces) for pieces in lists] == [b - a for a, b in pairwise(starts)]
    cut = sorted(i for i in found if i.parts > 1)
    assert sorted(i.slot for i in cut) == list(range(slots))
    for item in cut:
        mine = [i for i in cut if i.job == item.job]
        assert [i.slot for i in mine] == list(range(item.first, item.first + item.parts))
    assert all((i.slot, i.first) == (0, 0) for i in found if i.parts == 1)


@pytest.mark.parametrize(("kernel", "workload"), KERNELS, ids=lambda x: getattr(x, "id", None))
def test_every_case_has_valid_and_distinct_guesses(kernel: Kernel, workload: Any) -> None:
    for case in workload.cases():
        guesses = [dict(kernel.default(case)), *map(dict, kernel.seeds(case))]
        assert all(kernel.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(g.items()) for g in guesses}) == len(guesses), case.name
        assert sum(kernel.valid(case, c) is None for c in kernel.configs()) <= (60 if kernel is MLA else 320)


def test_a_case_that_cannot_be_done_is_refused_with_a_reason() -> None:
    config = dict(DECODE.default(paged.WORKLOAD.cases()[0]))
    many = paged.WORKLOAD.parse_case({"lens": "100", "heads": "64/2"})
    assert "more than 16" in str(DECODE.valid(many, config))
    tiles = latent.WORKLOAD.parse_case({"lens": "100", "heads": "16"})
    wide = {"form": "wide", "cluster": 2, "lag": 0, "plan": "even"}
    assert "not pairs" in str(MLA.valid(tiles, wide))
    rows = latent.WORKLOAD.parse_case({"lens": "100", "heads": "64"})
    assert "more than 32" in str(MLA.valid(rows, {**wide, "form": "narrow", "cluster": 1}))


# ---- run on the CPU ----------------------------------------------------------------------------------


class CpuModule:
    """Stands for CudaModule: ``launcher`` runs the kernel's shared library."""

    def __init__(self, library: Any, source: CudaSource, sms: int, seed: int) -> None:
        self.library, self.source, self.sms, self.seed = library, source, sms, seed
        self.held: dict[str, Any] = {}

    def scratch(self, name: str, nbytes: int) -> Any:
        """Zeros at first, then what the kernel left."""
        if name not in self.held or self.held[name].numel() < nbytes:
            self.held[name] = torch.zeros(max(nbytes, 16), dtype=torch.uint8)
        return self.held[name]

    def launcher(
        self, grid: tuple[int, ...], args: list[bytes], *, dependent: bool = False
    ) -> Callable[[], None]:
        """Maps, on 64 bytes each, and the rest."""
        raw = [ctypes.create_string_buffer(len(a) + 64) for a in args]
        places = [-(-ctypes.addressof(r) // 64) * 64 for r in raw]
        for place, a in zip(places, args, strict=True):
            ctypes.memmove(place, a, len(a))
        s = self.source

        def run() -> None:
            assert raw
            self.seed += 1
            shape = (grid[0], s.cluster[0], s.threads, s.smem, self.seed)
            self.library.run(*shape, *map(ctypes.c_void_p, places))

        return run


@pytest.fixture(scope="module")
def load(cuda_on_cpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., CpuModule]]:
    """Builds a specialisation for the CPU once; a module of ``sms`` SMs."""
    if not shutil.which("g++"):
        pytest.skip("no g++")

    def tiled_map(address: int, dtype: str, sizes: Any, strides: Any, box: Any, fetch: int) -> bytes:
        return cuda_on_cpu.tensor_map(sizes, (2, *strides), box, address)

    patch = pytest.MonkeyPatch()
    for module in (mla_decode, attention_decode):
        patch.setattr(module, "tiled_map", tiled_map)
    made: dict[Any, Any] = {}

    def get(kernel: Kernel, static: Mapping[str, Any], sms: int, seed: int) -> CpuModule:
        source = kernel.source(static, "sm_90a")
        key = (source.entry, *sorted(static.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("cpu")
            made[key] = ctypes.CDLL(cuda_on_cpu.written_kernel(source, run_of(source), folder))
        return CpuModule(made[key], source, sms, seed)

    yield get
    patch.undo()


def run_of(source: CudaSource) -> str:
    """The function that launches the kernel."""
    names = "abc"[: 3 if source.entry == "mla_held" else 2]
    maps, taken = ("".join(part % n for n in names) for part in ("TensorMap* %s, ", "*%s, "))
    return f"""
extern "C" void run(int grid, int cluster, int threads, int smem, int seed, {maps}Args* args) {{
    run_grid(grid, cluster, threads, smem, seed, [=] {{ {source.entry}({taken}*args); }});
}}
"""


def tensors(workload: Any, case: Case, kind: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Drawn inputs and a poisoned output."""
    generator = torch.Generator().manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    index = workload.index(case, np.random.default_rng(seed))
    inputs = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in index.items()}
    outputs = {}
    for spec in workload.specs(case):
        if spec.role == "value":
            inputs[spec.name] = torch.empty(spec.shape, dtype=dtype)
            check.draw(inputs[spec.name], kind, generator)
        elif spec.role == "output":
            outputs[spec.name] = torch.empty(spec.shape, dtype=dtype)
    check.poison(outputs)
    return inputs, outputs


def decode_case(lens: str, heads: str = "8/2", page: int = 16, dtype: str = "bf16") -> Case:
    return paged.WORKLOAD.parse_case({"lens": lens, "heads": heads, "page": str(page), "dtype": dtype})


def mla_case(lens: str, heads: int, sq: int = 1, dtype: str = "bf16") -> Case:
    return latent.WORKLOAD.parse_case({"lens": lens, "heads": str(heads), "sq": str(sq), "dtype": dtype})


PLAIN = {"load": "halves", "fetch": 128}
LEAN = {"heads": 1, "slices": 4, "resident": 1, "flight": 64, "plan": "stream", **PLAIN}
WARP = {**LEAN, "load": "warp", "fetch": 0}
PAIRS = {**LEAN, "heads": 2, "slices": 2}
WIDE = {"form": "wide", "cluster": 1, "lag": 0, "plan": "even", "fetch": 128}
HELD = {**WIDE, "form": "held"}
NARROW = {**WIDE, "form": "narrow"}
RUNS = [
    # pieces across sequences, empty ones, pages of each size, one to sixteen query heads a KV head
    (DECODE, decode_case("0+1+15+16+17+100+0"), LEAN, 3),
    (DECODE, decode_case("700+3+0+260", "16/4"), {**LEAN, "heads": 4, "slices": 1, "plan": "even"}, 5),
    (
        DECODE,
        decode_case("300+65", "2/2", 32),
        {**LEAN, "heads": 2, "slices": 2, "resident": 2, "flight": 128},
        2,
    ),
    (DECODE, decode_case("129+63", "16/1", 64, "fp16"), {**LEAN, "slices": 8, "flight": 128}, 4),
    # each warp its own tiles: pieces without a tile for some warps, more than 32 and 64 tiles, many lists
    (DECODE, decode_case("0+1+15+16+17+100+0"), WARP, 3),
    (DECODE, decode_case("0+1+15+16+17+100+0+70+5"), {**WARP, "slices": 8, "flight": 128}, 2),
    (DECODE, decode_case("700+3+0+1100+16", "16/4"), {**WARP, "heads": 4, "slices": 1}, 1),
    (DECODE, decode_case("300+65", "2/2", 32), {**WARP, "heads": 2, "slices": 2, "plan": "even"}, 2),
    (
        DECODE,
        decode_case("512+33+512", "4/4"),
        {**WARP, "heads": 4, "slices": 1, "plan": "even", "flight": 96},
        1,
    ),
    (
        DECODE,
        decode_case("129+63", "16/1", 64, "fp16"),
        {**WARP, "slices": 8, "flight": 128, "fetch": 128},
        4,
    ),
    # a piece a block, more blocks than the GPU holds
    (DECODE, decode_case("0+1+15+400+17+100+0+260"), {**LEAN, "plan": "grid"}, 2),
    (DECODE, decode_case("0+1+15+400+17+100+0+260"), {**WARP, "plan": "grid", "fetch": 128}, 2),
    # all forms, one and two tiles of rows, clusters, lag, masks that hide a whole block, cut and whole
    (MLA, mla_case("0+1+63+65", 16, 1, "fp16"), {**WIDE, "plan": "stream"}, 3),
    (MLA, mla_case("65+2+0+200", 64, 2), {**WIDE, "cluster": 2, "plan": "stream"}, 6),
    (MLA, mla_case("129+64+1", 128), {**WIDE, "cluster": 2, "lag": 1}, 4),
    (MLA, mla_case("130+1+64", 40, 3), {**WIDE, "lag": 1, "plan": "stream"}, 4),
    (MLA, mla_case("0+1+63+65", 16, 1, "fp16"), {**HELD, "plan": "stream"}, 3),
    (MLA, mla_case("65+2+0+200", 64, 2), {**HELD, "cluster": 2, "plan": "stream"}, 6),
    (MLA, mla_case("129+64+1+0", 128), {**HELD, "cluster": 2, "lag": 1}, 4),
    (MLA, mla_case("130+1+64", 40, 3), {**HELD, "lag": 1, "plan": "stream"}, 4),
    (MLA, mla_case("700+5+0+64+130", 64), HELD, 2),
    (MLA, mla_case("700+1+0+64+130", 16), {**NARROW, "plan": "stream"}, 2),
    (MLA, mla_case("65+200+2", 16, 2), NARROW, 4),
    (MLA, mla_case("300", 5, 1, "fp16"), NARROW, 1),
]


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize(("kernel", "case", "config", "sms"), RUNS)
def test_kernel_on_the_cpu(
    load: Callable[..., CpuModule], kernel: Kernel, case: Case, config: dict[str, Any], sms: int, kind: str
) -> None:
    workload = paged.WORKLOAD if kernel is DECODE else latent.WORKLOAD
    assert kernel.valid(case, config) is None
    module = load(
        kernel, kernel.static(case, config), sms, seed=zlib.crc32(f"{case.name} {kind}".encode()) % 1000
    )
    inputs, outputs = tensors(workload, case, kind, 1)
    call = kernel.bind(module, case, config, inputs, outputs)
    reference, sound = workload.reference(case, inputs)["o"], workload.yardstick(case, inputs)["o"]
    expected = (sound.double() - reference).square().mean().sqrt() + 1e-9
    for _ in range(2):  # counters have to be as they were
        check.poison(outputs)
        call.run()
        assert check.unwritten(outputs["o"]) == 0
        error = outputs["o"].double() - reference
        assert error.square().mean().sqrt() <= 1.15 * expected
        assert error.abs().max() <= 2 * (sound.double() - reference).abs().max() + 1e-9


@pytest.mark.slow
def test_a_missing_arrival_ends_as_a_deadlock(cuda_on_cpu: Any, tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    text = """
#define BF16 1
#include "ptx.cuh"
int main() {
    run_grid(1, 1, 64, 4096, 1, [] {
        if (threadIdx.x == 0) barrier_init(SMEM_START, 2);
        named_sync(0, 64);
        if (threadIdx.x == 0) barrier_arrive(SMEM_START);
        barrier_wait(SMEM_START, 0);
    });
}
"""
    cuda_on_cpu.gather(tmp_path)
    (tmp_path / "main.cpp").write_text(text)
    subprocess.run(["g++", "-std=c++17", "-o", "main", "main.cpp"], cwd=tmp_path, check=True)
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "1 of 2 to come" in done.stderr
