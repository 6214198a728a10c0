"""The CUDA kernel for attention of prompts run on the CPU, as it is: only attention.cuh and ptx.cuh, the PTX,
have other bodies (``cuda_on_cpu``). Its barriers, rings, turns, addresses and softmax are compiled by g++.
Before that, the softmax's rule by itself in torch, on more rows than that can run."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from dsl_bench.kernels.cuda import _tma
from dsl_bench.kernels.cuda import attention_prefill as prefill

from dsl_bench import check
from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Case
from dsl_bench.workloads.attention_prefill import WORKLOAD

torch = pytest.importorskip("torch")

(KERNEL,) = prefill.KERNELS
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ---- the rule of the softmax ------------------------------------------------------------------------------


def walk(scores: Any, values: Any, bn: int, share: float = 2.0, low: str = "float32") -> tuple[Any, float]:
    """The kernel's softmax (softmax.cuh): tiles of ``bn`` keys from the last on; a warp's 16 rows move up
    their maxima together where one of them has a new weight over ``share`` times a thread's sum.

    ``scores`` are in units of log2, [rows, keys]; weights are rounded to ``low`` for the second product. The
    output in float32, and the share of the steps behind the first that rescale it."""
    rows, keys = scores.shape
    scores = torch.nn.functional.pad(torch.as_tensor(scores), (0, -keys % bn), value=float("-inf"))
    values = torch.nn.functional.pad(torch.as_tensor(values), (0, 0, 0, -keys % bn))
    top, sums = torch.full((rows,), -1e30), torch.zeros(rows, 4)
    out = torch.zeros(rows, values.shape[1])
    moves = []
    for start in range(scores.shape[1] - bn, -1, -bn):
        tile = scores[:, start : start + bn]
        best = tile.amax(dim=1)
        high = torch.exp2(best - top)[:, None] > (share * sums).clamp(1, 256)
        moved = high.view(rows // 16, -1).any(dim=1).repeat_interleave(16)
        new = torch.where(moved, torch.maximum(best, top), top)
        alpha = torch.exp2(top - new)
        p = torch.exp2(tile - new[:, None])
        assert p.max() <= 256
        sums = sums * alpha[:, None] + p.view(rows, bn // 8, 4, 2).sum(
            dim=(1, 3)
        )  # a thread has two columns in 8
        rounded = p.to(getattr(torch, low)).float()
        out = out * alpha[:, None] + rounded @ values[start : start + bn].float()
        top = new
        moves.append(moved[::16].float().mean())
    return out / sums.sum(dim=1, keepdim=True), float(np.mean(moves[1:]))


def exact(scores: Any, values: Any) -> Any:
    """The same in float64."""
    p = np.exp2(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return p @ values / p.sum(axis=1, keepdims=True)


def test_a_late_maximum_and_rows_that_see_nothing_yet() -> None:
    rng = np.random.default_rng(5)
    scores = (rng.standard_normal((64, 400)) * 30).astype(np.float32)
    hidden = np.arange(400)[None, :] > np.arange(64)[:, None] + 3
    scores[hidden] = -np.inf
    scores[:, 0] += 100  # grows in the last tile of the walk
    values = rng.standard_normal((400, 16)).astype(np.float32)
    found, _ = walk(scores, values, 64)
    assert np.abs(found.numpy() - exact(scores, values)).max() < 1e-5


def errors_of_a_dominated_row(share: float) -> tuple[float, float]:
    """RMS and worst error, as multiples of those of rounding the exact result, where the key met last has all
    but a little of its row's weight, and is 4 to 200 times the key met first."""
    scores = np.full((512, 256), -30, np.float32)
    scores[:, -1] = 0
    scores[:, 0] = np.linspace(2, 7.7, 512)
    values = np.zeros((256, 64), np.float32)
    values[0] = torch.linspace(130, 255, 64).bfloat16().float()
    expected = exact(scores, values)
    found, _ = walk(scores, values, 128, share, "bfloat16")
    error = found.bfloat16().double().numpy() - expected
    unit = torch.as_tensor(expected).bfloat16().double().numpy() - expected
    return np.sqrt((error**2).mean() / (unit**2).mean()), np.abs(error).max() / np.abs(unit).max()


def test_the_rule_leaves_a_key_that_dominates_its_row_exact() -> None:
    bound = WORKLOAD.bound
    rms, worst = errors_of_a_dominated_row(2.0)
    assert rms < 1.02
    assert worst < 1.02
    # a maximum that follows only where it grows by more than 8 in log2, whatever the row's sum
    rms, worst = errors_of_a_dominated_row(1e30)
    assert rms > bound.rms
    assert worst > bound.worst


@pytest.mark.parametrize("kind", ["outliers", "normal"])
def test_the_softmax_is_as_exact_as_a_sound_algorithm(kind: str) -> None:
    case = WORKLOAD.parse_case({"lens": "1024", "heads": "2/1", "causal": "0"})
    generator = torch.Generator().manual_seed(4)
    inputs = {
        name: torch.empty(1024, heads, 128).bfloat16() for name, heads in (("q", 2), ("k", 1), ("v", 1))
    }
    for tensor in inputs.values():
        check.draw(tensor, kind, generator)
    reference = WORKLOAD.reference(case, inputs)
    yard = check.measure(reference, WORKLOAD.yardstick(case, inputs), kind)
    out = torch.empty_like(inputs["q"])
    rescaled = []
    for head in range(2):
        scores = inputs["q"][:, head].float() @ inputs["k"][:, 0].float().T * (np.log2(np.e) / 128**0.5)
        found, share = walk(scores, inputs["v"][:, 0], 128, low="bfloat16")
        out[:, head] = found
        rescaled.append(share)
    got = check.measure(reference, {"o": out}, kind)
    assert got.rms < 1.05 * yard.rms
    assert got.worst < 1.5 * yard.worst
    if kind == "normal":
        assert max(rescaled) < 0.3  # most steps leave O alone


# ---- the kernel itself ------------------------------------------------------------------------------------


class CpuModule:
    """Stands for CudaModule: ``launcher`` runs the kernel's shared library, a block after the other."""

    def __init__(self, library: Any, source: CudaSource, sms: int) -> None:
        self.library, self.source, self.sms, self.seed = library, source, sms, 0
        self.held: dict[str, Any] = {}

    def scratch(self, name: str, nbytes: int) -> Any:
        """Zeros at first, then what the kernel left."""
        return self.held.setdefault(name, torch.zeros(nbytes, dtype=torch.uint8))

    def launcher(self, grid: tuple[int, ...], args: list[bytes]) -> Callable[[], None]:
        """Four maps, on 64 bytes each, and the rest."""
        raw = [ctypes.create_string_buffer(len(a) + 64) for a in args]
        places = [-(-ctypes.addressof(r) // 64) * 64 for r in raw]
        for place, a in zip(places, args, strict=True):
            ctypes.memmove(place, a, len(a))

        def run() -> None:
            assert raw
            self.seed += 1
            shape = (grid[0], 1, self.source.threads, self.source.smem, self.seed)
            self.library.run(*shape, *map(ctypes.c_void_p, places))

        return run


#: launches the kernel
RUN = """
extern "C" void run(int grid, int cluster, int threads, int smem, int seed, TensorMap* q, TensorMap* k,
                    TensorMap* v, TensorMap* o, Args* args) {
    run_grid(grid, cluster, threads, smem, seed, [=] { attention_prefill(*q, *k, *v, *o, *args); });
}
"""


@pytest.fixture(scope="module")
def load(cuda_on_cpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., CpuModule]]:
    """Builds a specialisation for the CPU once; a module of ``sms`` SMs."""
    if not shutil.which("g++"):
        pytest.skip("no g++")

    def rows_map(address: int, dtype: str, shape: Any, pitch: int, box: Any, swizzle: int) -> bytes:
        assert swizzle == 128
        return cuda_on_cpu.tensor_map(shape[::-1], (2, pitch), box[::-1], address)

    patch = pytest.MonkeyPatch()
    patch.setattr(_tma, "tensor_map", rows_map)
    made: dict[Any, Any] = {}

    def get(static: Mapping[str, Any], sms: int) -> CpuModule:
        source = KERNEL.source(static, "sm_90a")
        key = tuple(sorted(static.items()))
        if key not in made:
            made[key] = ctypes.CDLL(cuda_on_cpu.written_kernel(source, RUN, tmp_path_factory.mktemp("cpu")))
        return CpuModule(made[key], source, sms)

    yield get
    patch.undo()


def case_of(lens: str, heads: str, d: int, causal: int, dtype: str = "bf16") -> Case:
    values = {"lens": lens, "heads": heads, "d": str(d), "causal": str(causal), "dtype": dtype}
    return WORKLOAD.parse_case(values)


def tensors(case: Case, kind: str) -> dict[str, Any]:
    """Drawn inputs. ``dominated``: the first key, which a walk meets last, outweighs all others of its row
    together by a factor of 4 to 200 that differs from row to row, and its value is large."""
    generator = torch.Generator().manual_seed(1)
    inputs = {}
    for spec in WORKLOAD.specs(case):
        if spec.role == "value":
            inputs[spec.name] = torch.empty(spec.shape, dtype=DTYPES[case.dtype])
            check.draw(inputs[spec.name], "normal" if kind == "dominated" else kind, generator)
    if kind == "dominated":
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        tokens, d = q.shape[0], case["d"]
        # 2 to 7.6 in units of log2: a score is d · q / √d, that of the last key 0, the others' below
        q[:] = torch.linspace(2, 7.6, tokens)[:, None, None] * 0.6931 / d**0.5
        k[:] = -1
        k[0], k[-1] = 1, 0
        v[0] = torch.linspace(130, 255, d)
    return inputs


ONE = {"pingpong": 1, "overlap": 1, "chain": 0, "order": "longest", "schedule": "dynamic"}
RUNS = [
    # empty and single tokens, tiles cut by the diagonal and the end, shared heads, both schedules
    (case_of("0+1+130+65", "4/2", 64, 1), {**ONE, "tile": "192x128"}, 2),
    (case_of("200+3", "2/1", 64, 0, "fp16"), {**ONE, "tile": "128x192", "chain": 1}, 1),
    (case_of("300+17", "2/2", 128, 1), {**ONE, "tile": "128x128", "schedule": "static"}, 2),
    (case_of("260+1+40", "1/1", 128, 1), {**ONE, "tile": "128x128", "chain": 1, "order": "groups"}, 1),
    (case_of("190+129", "2/1", 128, 0), {**ONE, "tile": "128x176"}, 3),
    (case_of("150+33", "2/1", 256, 1), {**ONE, "tile": "128x80"}, 1),
    (case_of("100", "1/1", 256, 0), {**ONE, "tile": "128x64", "pingpong": 0, "chain": 1}, 1),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize(("case", "config", "sms"), RUNS)
def test_kernel_on_the_cpu(
    load: Callable[..., CpuModule], case: Case, config: dict[str, Any], sms: int, kind: str
) -> None:
    assert KERNEL.valid(case, config) is None
    compare(load, case, config, sms, kind)


@pytest.mark.slow
def test_a_key_that_dominates_its_row_is_not_rounded(load: Callable[..., CpuModule]) -> None:
    compare(load, case_of("300", "1/1", 128, 0), {**ONE, "tile": "128x128"}, 1, "dominated")


def compare(load: Callable[..., CpuModule], case: Case, config: dict[str, Any], sms: int, kind: str) -> None:
    module, inputs = load(KERNEL.static(case, config), sms), tensors(case, kind)
    outputs = {"o": torch.empty(inputs["q"].shape, dtype=inputs["q"].dtype)}
    call = KERNEL.bind(module, case, config, inputs, outputs)
    reference = WORKLOAD.reference(case, inputs)
    yard = check.measure(reference, WORKLOAD.yardstick(case, inputs), kind)
    bound = WORKLOAD.bound
    for _ in range(2):  # counters have to be as they were
        check.poison(outputs)
        call.run()
        assert check.unwritten(outputs["o"]) == 0
        got = check.measure(reference, outputs, kind)
        assert got.rms <= bound.rms * yard.rms
        assert got.worst <= bound.worst * yard.worst
