"""The TileLang backend and GEMM kernels without a GPU: plans, the split's arithmetic, three compilations."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsl_bench.backends.tilelang import BACKEND
from dsl_bench.plugin import cubin_facts
from dsl_bench.workloads.gemm import WORKLOAD

READY = BACKEND.probe("compile")
pytestmark = pytest.mark.skipif(not READY.ready, reason=READY.reason or "ready")


@pytest.fixture(scope="module")
def kernels():
    return {kernel.id.partition("/")[2]: kernel for kernel in BACKEND.kernels() if kernel.workload == "gemm"}


def case_of(m, n, k, dtype="bf16"):
    return WORKLOAD.parse_case({"m": str(m), "n": str(n), "k": str(k), "dtype": dtype})


def test_every_case_has_a_kernel_whose_first_guess_is_valid(kernels):
    for case in WORKLOAD.cases():
        able = [i for i, k in kernels.items() if k.valid(case, k.default(case)) is None]
        assert able, case.name


def test_configs_come_from_the_space(kernels):
    for case, kernel in itertools.product(WORKLOAD.cases(), kernels.values()):
        for config in (kernel.default(case), *kernel.seeds(case)):
            assert config.keys() == kernel.space.keys()
            assert all(value in kernel.space[name] for name, value in config.items()), (kernel.id, config)


def test_no_binary_depends_on_the_size(kernels):
    for name in ("gemm", "gemm_ws", "gemm_splitk"):
        kernel = kernels[name]
        config = kernel.default(case_of(4096, 4096, 4096))
        assert kernel.static(case_of(4096, 4096, 4096), config) == kernel.static(
            case_of(1000, 3000, 5000), config
        )


@pytest.mark.parametrize(
    ("name", "size", "word"),
    [
        ("gemm", (1023, 1021, 1019), "16 bytes"),
        ("gemm", (128, 128, 64), "#2566"),
        ("gemm_ws", (2047, 2049, 2051), "16 bytes"),
        ("gemm_splitk", (16, 8192, 8192), "gemm_skinny"),
        ("gemm_skinny", (4096, 4096, 4096), "at most 128"),
        ("gemm_unaligned", (4096, 4096, 4096), "no copy"),
        ("gemv", (16, 4096, 4096), "one token"),
    ],
)
def test_refusals_say_why(kernels, name, size, word):
    case = case_of(*size)
    reason = kernels[name].valid(case, kernels[name].default(case))
    assert reason is not None and word in reason


def units_of_block(block, tiles, steps, blocks, whole, quota):
    """(tile, first step, steps) that a block does, in its order: the arithmetic of _streamk's loops."""
    unit, tile = block * quota, block
    stop = min(unit + quota, (tiles - whole) * steps)
    while unit < stop or tile < whole:
        if unit < stop:
            now = whole + unit // steps
            first = unit - (now - whole) * steps
            take = min(steps - first, stop - unit)
            unit += take
        else:
            now, first, take, tile = tile, 0, steps, tile + blocks
        yield now, first, take


@pytest.mark.parametrize("split", [-2, -1, 0, 1, 2, 3])
@pytest.mark.parametrize(
    ("tiles", "steps"), [(48, 32), (133, 7), (288, 112), (5, 64), (264, 3), (1, 500), (400, 5)]
)
def test_split_covers_every_step_once_and_finds_every_part(kernels, tiles, steps, split):
    from dsl_bench.kernels.tilelang import _streamk as streamk

    blocks, whole, quota = streamk.blocks_of(tiles, steps, 132, split)
    done: dict[int, list[int]] = {t: [] for t in range(tiles)}
    parts: dict[int, list[int]] = {}
    slots: set[int] = set()
    for block in range(blocks):
        for tile, first, take in units_of_block(block, tiles, steps, blocks, whole, quota):
            done[tile].extend(range(first, first + take))
            if take < steps:
                slot = 2 * block + (first == 0)
                assert slot not in slots, "a slot is written once a launch"
                slots.add(slot)
                parts.setdefault(tile, []).append(slot)
    assert all(sorted(d) == list(range(steps)) for d in done.values())
    for tile, wrote in parts.items():
        start, owner, read = (tile - whole) * steps, (tile - whole) * steps // quota, []
        while owner * quota < start + steps:
            read.append(2 * owner + (owner * quota <= start))
            owner += 1
        assert sorted(read) == sorted(wrote), tile


@pytest.mark.parametrize("bn", [16, 64, 160, 176, 192, 208, 224, 256])
def test_chunks_cover_the_tile(kernels, bn):
    from dsl_bench.kernels.tilelang import _plan as plan

    width, starts = plan.chunk(bn), plan.chunks(bn)
    assert {c for s in starts for c in range(s, s + width)} == set(range(bn))
    assert len(starts) == plan.cdiv(bn, width)


def test_whole_tiles_are_preferred_to_splits(kernels):
    even, ragged = case_of(4096, 4096, 4096), case_of(517, 10248, 2056)
    split = kernels["gemm_splitk"]
    assert not [c for c in split.configs() if split.valid(even, c) is None]
    assert split.valid(ragged, split.default(ragged)) is None
    skinny = kernels["gemm_skinny"]
    first = skinny.default(case_of(16, 6144, 4096))
    assert (first["bm"], first["bk"], first["stages"], first["split"]) == (64, 128, 10, 1)
    assert skinny.default(case_of(16, 4096, 14336))["split"] == 2


@pytest.mark.slow
def test_persistent_kernel_with_multicast(kernels, compiled):
    kernel, case = kernels["gemm_ws"], case_of(4096, 4096, 4096)
    config = {"bm": 128, "bn": 256, "stages": 4, "cluster": "2x1", "halves": False, "group": 8}
    assert kernel.valid(case, config) is None
    artifact, facts = compiled(kernel.id, kernel.static(case, config))
    assert facts.registers == 168 and facts.stack == 0
    assert artifact.meta["threads"] == 384 and artifact.meta["smem"] == 229376
    assert facts.sass["USETMAXREG"] == 2 and facts.sass["UTMASTG"] == 4 and facts.sass["UTMALDG"] >= 2
    assert facts.sass["HGMMA"] % 4 == 0 and not facts.sass.get("LDL", 0) and not facts.sass.get("STL", 0)
    text = (artifact.folder / "kernel.cu").read_text()
    assert "64, 256, 16," in text and "wait_wgmma<1>" in text and "tma_load_multicast" in text
    # a barrier of the whole block between the roles would stop the producer from running ahead
    assert "__syncthreads" not in text[text.index("warpgroup_reg_dealloc") :]
    assert not list(artifact.folder.glob("cache*")), "TileLang's cache must not stay in the artifact"


@pytest.mark.slow
def test_multicast_in_halves_issues_from_both_blocks(kernels, compiled):
    kernel, case = kernels["gemm_ws"], case_of(4000, 4104, 4072, "fp16")
    config = {"bm": 256, "bn": 176, "stages": 3, "cluster": "2x1", "halves": True, "group": 8}
    assert kernel.valid(case, config) is None
    artifact, facts = compiled(kernel.id, kernel.static(case, config))
    assert facts.stack == 0 and not facts.sass.get("LDL", 0) and not facts.sass.get("STL", 0)
    text = (artifact.folder / "kernel.cu").read_text()
    line = next(x for x in text.splitlines() if "tl::tma_load_multicast(b_desc" in x)
    assert "rank" in line and "(uint16_t)(3)" in line and "block_rank_in_cluster() ==" not in text


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_unaligned_kernel_predicates_what_tma_cannot_clip(kernels, compiled):
    kernel, case = kernels["gemm_unaligned"], case_of(2047, 2049, 2051)
    artifact, product = compiled(kernel.id, kernel.static(case, kernel.default(case)))
    folder = artifact.folder
    copy = cubin_facts(folder / "extra0" / artifact.cubin)
    assert product.stack == 0 and product.sass["STG"] and "UTMASTG" not in product.sass
    assert copy.sass["UTMASTG"] and copy.stack == 0
    stores = (folder / "kernel.cu").read_text()
    assert re.search(r"< n\)", stores) and re.search(r"< \(m \+ \d+\)\)", stores)
    loads = (folder / "extra0" / "kernel.cu").read_text()
    assert "< k)" in loads and "< m)" in loads and "< n)" in loads and "bfloat16_t(0x0p+0f" in loads


#: loads what was compiled and calls it with tensors on the CPU: the host code runs, and refuses them
LOAD = """
import sys, tilelang, torch
from tilelang import tvm
tilelang.contrib.nvcc.compile_cuda = None
call = tvm.runtime.load_module(sys.argv[1]).get_function(sys.argv[2])
wrong = torch.zeros(8, 8, dtype=torch.float16)
try:
    call(wrong, wrong, wrong)
except RuntimeError as fault:
    print(fault)
"""


@pytest.mark.slow
def test_library_loads_without_compiling(kernels, compiled):
    kernel, case = kernels["gemm"], case_of(512, 512, 512, "fp16")
    config = {"bm": 128, "bn": 176, "stages": 4, "panel": 10}
    artifact, facts = compiled(kernel.id, kernel.static(case, config))
    assert facts.stack == 0 and facts.sass["USETMAXREG"] == 2 and facts.sass["UTMASTG"]
    assert "64, 176, 16," in (artifact.folder / "kernel.cu").read_text()
    command = [sys.executable, "-c", LOAD, str(artifact.folder / "kernel.so"), artifact.meta["symbol"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "device_type mismatch" in done.stdout, done.stderr[-3000:]


def test_probe_is_honest():
    assert BACKEND.probe("interpret").reason == "TileLang has no interpreter"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert "libcuda" in BACKEND.probe("device").reason
    versions = BACKEND.versions()
    assert versions["tilelang"] and re.fullmatch(r"\d+\.\d+\.\d+", versions["nvcc"])


def test_kernel_folder_on_the_path_explains_itself():
    folder = Path(importlib.util.find_spec("dsl_bench.kernels.tilelang").origin)
    with pytest.raises(ImportError, match=r"sys\.path"):
        exec(compile(folder.read_text(), str(folder), "exec"), {"__name__": "tilelang"})
