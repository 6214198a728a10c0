"""The CUDA kernels without a GPU: what nvcc makes of them, and the host's arithmetic behind a launch."""

import random

import pytest
from dsl_bench.kernels.cuda import _plan, _tma, gemm, gemm_skinny

from dsl_bench.backends.cuda import BACKEND, LOG, CudaSource, fault, ok, ptxas_facts
from dsl_bench.codegen import cubin_facts, sass
from dsl_bench.errors import KernelFault
from dsl_bench.plugin import Case
from dsl_bench.workloads.gemm import WORKLOAD

GEMM, UNALIGNED = gemm.KERNELS
SKINNY, GEMV = gemm_skinny.KERNELS
KERNELS = (GEMM, UNALIGNED, SKINNY, GEMV)
WIDE = {"tile": "128x256 coop", "cluster": "2x1", "stages": 4, "group": 8, "splits": 0}
COPIED = {"tile": "192x176 coop", "cluster": "1x2", "stages": 4, "group": 8, "splits": 1, "pdl": 1}
BUILDS = {
    "cuda/gemm": (GEMM, "4096x2112x7168-bf16", WIDE),
    "cuda/gemm_unaligned": (UNALIGNED, "2047x2049x2051-bf16", COPIED),
    "cuda/gemm_skinny": (SKINNY, "16x6144x4096-bf16", None),
}


def case_named(name):
    return next(c for c in WORKLOAD.cases() if c.name == name)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compiles a kernel once; the artifact and its facts."""
    state = BACKEND.probe("compile")
    if not state.ready:
        pytest.skip(f"{state.reason} ({state.hint})")
    made = {}

    def get(kernel_id):
        if kernel_id not in made:
            kernel, case_name, config = BUILDS[kernel_id]
            case = case_named(case_name)
            config = config or kernel.default(case)
            assert kernel.valid(case, config) is None
            folder = tmp_path_factory.mktemp("build")
            source = kernel.source(kernel.static(case, config), "sm_90a")
            artifact = BACKEND.compile(source, "sm_90a", folder)
            made[kernel_id] = artifact, cubin_facts(folder / artifact.cubin, artifact.entry)
        return made[kernel_id]

    return get


@pytest.mark.parametrize("kernel_id", BUILDS)
def test_no_spills_and_hopper_instructions(build, kernel_id):
    artifact, facts = build(kernel_id)
    assert artifact.meta["spill_stores"] == artifact.meta["spill_loads"] == 0
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert artifact.meta["advisories"] == []  # C7510 and the like: wgmma serialised
    assert artifact.meta["registers"] * artifact.meta["threads"] <= 65536
    assert facts.sass.get("HGMMA", 0) >= 4
    assert facts.sass.get("UTMALDG", 0) >= 2
    assert (facts.sass.get("UTMASTG", 0) >= 1) == (kernel_id != "cuda/gemm_unaligned")
    assert facts.sass.get("HMMA", 0) == 0
    assert (artifact.folder / LOG).read_text()
    assert artifact.assembler.startswith("ptxas ")


def test_cluster_multicasts_and_registers_move(build):
    artifact, facts = build("cuda/gemm")
    assert artifact.meta["registers"] == 168  # at entry; setmaxnreg deals them out
    assert facts.sass["USETMAXREG"] == 2
    assert "UTMALDG.2D.MULTICAST" in sass(artifact.folder / artifact.cubin, artifact.entry)


def test_a_broken_source_is_a_compile_error(build, tmp_path):
    build("cuda/gemm_skinny")  # skips where there is no compiler
    broken = tmp_path / "broken.cu"
    broken.write_text('extern "C" __global__ void broken() { int x = ; }\n')
    with pytest.raises(KernelFault, match="error") as caught:
        BACKEND.compile(CudaSource(broken, "broken"), "sm_90a", tmp_path)
    assert caught.value.status == "compile_error"


def test_interpreter_is_refused_with_a_reason():
    state = BACKEND.probe("interpret")
    assert not state.ready
    assert "interpreter" in state.reason


def test_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("dsl_bench.backends.cuda._candidates", lambda: iter([tmp_path / "nvcc"]))
    state = BACKEND.probe("compile")
    assert not state.ready
    assert "nvcc" in state.reason
    assert "pip install" in state.hint
    assert BACKEND.versions()["nvcc"] == "none"


def test_ptxas_log_of_the_right_function():
    log = (
        "ptxas info    : Compiling entry function 'gemm' for 'sm_90a'\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
    )
    facts = ptxas_facts(log, "gemm")
    assert facts == {"registers": 168, "spill_stores": 4, "spill_loads": 12, "advisories": ["C7510"]}


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [(1, "launch_error", "driver error"), (2, "oom", "driver error"), (700, "illegal_access", "CUDA error")],
)
def test_driver_errors_by_kind(code, status, text):
    assert fault(code).status == status
    assert text in fault(code).reason
    with pytest.raises(KernelFault):
        ok((code,))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_guesses_are_valid_and_distinct(kernel):
    served = 0
    for case in WORKLOAD.cases():
        guesses = [dict(kernel.default(case)), *map(dict, kernel.seeds(case))]
        if kernel.valid(case, guesses[0]) is not None:
            assert len(guesses) == 1, case.name
            continue
        served += 1
        assert all(kernel.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(g.items()) for g in guesses}) == len(guesses), case.name
        assert all(g[name] in values for g in guesses for name, values in kernel.space.items()), case.name
    assert served


@pytest.mark.parametrize("name", ["33x61x47-fp16", "16x128x64-fp16", "72x104x40-fp16", "4095x4097x4099-bf16"])
def test_every_size_has_a_kernel(name):
    case = case_named(name)
    assert any(k.valid(case, k.default(case)) is None for k in KERNELS)


def test_shared_memory_of_every_ring_fits():
    for text in gemm.SPACE["tile"]:
        tile = gemm.parse_tile(text)
        assert tile.fits_registers(), text
        for stages in range(2, tile.max_stages() + 1):
            assert tile.store_buffers(stages) >= 1
            assert tile.smem(stages) <= _plan.SMEM_LIMIT
        assert tile.max_stages() >= 3


def units(work):
    """What tiles.cuh's unit_begin gives, first to last."""
    base, extra = divmod(work.unit_span, work.unit_count)
    for unit in range(work.sk_units):
        group, i = divmod(unit, work.unit_count)
        begin = group * work.unit_span + i * base + min(i, extra)
        yield begin, begin + base + (i < extra)


def test_units_cover_the_cut_tiles_evenly():
    rng = random.Random(7)
    for _ in range(300):
        blocks, splits = rng.choice([1, 3, 16, 33, 112]), rng.choice([0, 1, 2, 3, 8])
        tiles_m, tiles_n = rng.randint(1, 30), rng.randint(1, 30)
        work = _plan.cut(_plan.Work(1, 1, blocks, tiles_m, tiles_n, 8, rng.choice([1, 66, 132])), splits)
        if splits > 1 and blocks < splits:
            continue
        spans = list(units(work))
        ends = [0, *(end for _, end in spans)]
        assert [begin for begin, _ in spans] == ends[:-1]
        assert ends[-1] == work.sk_tiles * blocks
        lengths = {end - begin for begin, end in spans}
        assert not lengths or (min(lengths) >= 1 and max(lengths) - min(lengths) <= 1)
        if splits == 0:
            assert (work.tiles - work.sk_tiles) % work.clusters == 0


def test_arguments_have_the_layout_of_the_struct():
    work = _plan.Work(4096, 2112, 112, 16, 12, 4, 66, 10, 66, 66, 1120)
    packed = work.pack(1 << 40, 2 << 40)
    assert len(packed) == 64
    assert packed[48:] == (1 << 40).to_bytes(8, "little") + (2 << 40).to_bytes(8, "little")


class Matrix:
    """A tensor as far as a tensor map is concerned."""

    def __init__(self, address, rows, columns):
        self.shape = (rows, columns)
        self._address = address

    def stride(self, dim):
        return (self.shape[1], 1)[dim]

    def data_ptr(self):
        return self._address


def realigned(low, high, shift):
    """repack.cuh's realign on lists of 16-bit elements."""
    words = [*low, *high]
    for bit in (4, 2, 1):
        if shift & bit:
            words = words[bit:] + words[:bit]
    return words[:8]


@pytest.mark.parametrize("columns", [1, 7, 47, 1019, 1024, 2051])
def test_copied_rows_are_those_of_the_operand(columns):
    rows = 5
    memory = list(range(rows * columns)) + [-1] * 16  # what lies beyond is not the matrix's
    for row in range(rows):
        begin, end = row * columns, (row + 1) * columns
        shift = begin % 8
        out = []
        for at in range(begin - shift, begin - shift + 8 * _plan.cdiv(columns, 8), 8):
            low = memory[at : at + 8] if at < end else [0] * 8
            high = memory[at + 8 : at + 16] if shift and at + 8 < end else [0] * 8
            out += realigned(low, high, shift)
        assert out[:columns] == memory[begin:end]


class FakeModule:
    """Records the launch that a bind asks for."""

    sms = 132

    def __init__(self):
        self.calls = []

    def scratch(self, name, nbytes):
        return Matrix(1 << 30, 1, max(nbytes, 1))

    def launcher(self, grid, args, *, dependent=False):
        self.grid, self.args, self.dependent = grid, args, dependent
        return lambda: self.calls.append("gemm")

    def helper(self, entry, grid, threads, args):
        self.copy = (entry, grid, threads, [len(a) for a in args])
        return lambda: self.calls.append(entry)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_bind_passes_what_the_kernel_takes(monkeypatch, kernel):
    monkeypatch.setattr(_tma, "tensor_map", lambda *_, **__: b"x" * 128)
    monkeypatch.setattr(gemm_skinny, "tiled_map", lambda *_: b"x" * 128)
    sizes = {UNALIGNED.id: (333, 1021, 1019), GEMM.id: (333, 1024, 4096)}
    m, n, k = sizes.get(kernel.id, (1, 6144, 4096))
    case = Case("gemm", "", {"m": m, "n": n, "k": k}, "bf16")
    taken = {
        "cuda/gemm": [128, 128, 128, 64],
        "cuda/gemm_unaligned": [128, 128, 8, 64],
        "cuda/gemm_skinny": [128, 128, 128, 64],
        "cuda/gemv": [8, 8, 8, 4, 4, 4],
    }
    for config in (kernel.default(case), *kernel.seeds(case)):
        module = FakeModule()
        inputs = {"a": Matrix(0, m, k), "b": Matrix(0, n, k)}
        call = kernel.bind(module, case, config, inputs, {"c": Matrix(0, m, n)})
        assert [len(a) for a in module.args] == taken[kernel.id]
        assert 1 <= module.grid[0] <= (2 * 132 if kernel is not GEMV else 6144)
        call.run()
        if kernel is UNALIGNED:
            assert module.calls == ["repack", "gemm"]
            assert module.copy == ("repack", (_plan.cdiv(333 + 1021, 8),), 256, [40, 40])
            assert module.dependent == bool(config["pdl"])


@pytest.mark.parametrize(("n", "k", "copies", "bytes_of_c"), [(1021, 1024, 0, 8), (1024, 1019, 1, 128)])
def test_only_what_tma_cannot_do_is_done_otherwise(monkeypatch, n, k, copies, bytes_of_c):
    monkeypatch.setattr(_tma, "tensor_map", lambda *_, **__: b"x" * 128)
    case = Case("gemm", "", {"m": 333, "n": n, "k": k}, "bf16")
    config = UNALIGNED.default(case)
    assert UNALIGNED.valid(case, config) is None
    module = FakeModule()
    inputs = {"a": Matrix(0, 333, k), "b": Matrix(0, n, k)}
    UNALIGNED.bind(module, case, config, inputs, {"c": Matrix(0, 333, n)}).run()
    assert module.calls == ["repack"] * copies + ["gemm"]
    assert len(module.args[2]) == bytes_of_c
    static = UNALIGNED.static(case, config)
    assert (static["repack"], static["plain_stores"]) == (copies, int(bytes_of_c == 8))


def test_rows_off_128_bytes_want_wide_tiles():
    assert _plan.pieces(8192) == 1
    assert _plan.pieces(8256) == 1.5
    assert _plan.pieces(8144) == 2 - 16 / 128
    tile = gemm.parse_tile(GEMM.default(case_named("4000x4104x4072-bf16"))["tile"])
    assert (tile.bm, tile.bn) == (256, 176)
