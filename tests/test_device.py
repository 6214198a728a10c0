"""The timers, the checks and the vendor's kernels on a real device. Run with ``-m gpu``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dsl_bench import check, stats, timing
from dsl_bench.backends import vendor
from dsl_bench.errors import KernelFault
from dsl_bench.workload import Case
from dsl_bench.workloads.gemm import WORKLOAD

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def product(m: int, n: int, k: int, sets: int = 2) -> tuple[Case, list[dict[str, Any]], list[dict[str, Any]]]:
    """A case with drawn inputs and poisoned outputs."""
    case = WORKLOAD.parse_case({"m": str(m), "n": str(n), "k": str(k)})
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, outputs = [], []
    for _ in range(sets):
        pair = {
            n: torch.empty(s, dtype=torch.bfloat16, device="cuda") for n, s in (("a", (m, k)), ("b", (n, k)))
        }
        for tensor in pair.values():
            check.draw(tensor, "normal", generator)
        inputs.append(pair)
        outputs.append({"c": torch.empty((m, n), dtype=torch.bfloat16, device="cuda")})
        check.poison(outputs[-1])
    return case, inputs, outputs


def bound(kernel: Any, case: Case, config: Any, inputs: Any, outputs: Any) -> list[Callable[[], object]]:
    """The kernel's calls on every buffer set."""
    module = vendor.BACKEND.load(vendor.BACKEND.compile("", "sm_90a", None))  # type: ignore[arg-type]
    return [kernel.bind(module, case, config, i, o).run for i, o in zip(inputs, outputs, strict=True)]


@pytest.mark.parametrize("size", [(512, 512, 512), (2049, 8200, 4104), (1023, 1021, 1019), (1, 6144, 4096)])
def test_every_cublaslt_algorithm_is_right(size: tuple[int, int, int]) -> None:
    case, inputs, outputs = product(*size, sets=1)
    reference = WORKLOAD.reference(case, inputs[0])
    tried = 0
    for config in vendor.CUBLASLT.configs():
        try:
            (run,) = bound(vendor.CUBLASLT, case, config, inputs, outputs)
        except KernelFault as fault:
            assert fault.status == "invalid_config"
            continue
        before = check.fingerprint(inputs[0])
        check.poison(outputs[0])
        try:
            run()
        except KernelFault as fault:  # the heuristic offers algorithms that then refuse: a row, not a result
            assert fault.status == "launch_error"
            continue
        check.verify(WORKLOAD, case, reference, outputs[0], inputs[0], before)
        tried += 1
    assert tried


@pytest.mark.parametrize("regime", ["cold", "sustained"])
@pytest.mark.parametrize("size", [(512, 512, 512), (4096, 4096, 4096)])
def test_a_against_a_is_one(regime: str, size: tuple[int, int, int]) -> None:
    case, inputs, outputs = product(*size, sets=4)
    racers = [bound(vendor.CUBLAS, case, {}, inputs, outputs) for _ in range(2)]

    def prove(racer: int, sets: Sequence[int], replay: Callable[[], object]) -> None:
        chosen = [outputs[s] for s in sets]
        for tensors in chosen:
            check.poison(tensors)
        replay()
        torch.cuda.synchronize()
        check.assert_written(chosen, f"capture of racer {racer}")

    if regime == "cold":
        result = timing.race_cold(racers, seconds=1.0)
        assert result.timer == "delay+events"
    else:
        result = timing.race_sustained(racers, seconds=1.0, prove=prove)
        assert result.timer in ("graph+events", "events")
    got = stats.ratio(*result.samples)
    assert got.value == pytest.approx(1.0, abs=0.01)
    assert not result.notes


def test_a_launch_on_another_stream_is_found_out() -> None:
    case, inputs, outputs = product(512, 512, 512)
    calls = bound(vendor.CUBLAS, case, {}, inputs, outputs)
    side = torch.cuda.Stream()

    def elsewhere(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with torch.cuda.stream(side):
                call()

        return run

    with pytest.raises(KernelFault):
        timing.quick([elsewhere(c) for c in calls], 0.02)


def test_events_agree_with_cupti_and_with_a_kernel_of_known_length() -> None:
    case, inputs, outputs = product(8192, 8192, 8192)
    calls = bound(vendor.CUBLAS, case, {}, inputs, outputs)
    # a burst as short as the profiled one: a longer one heats the chip into another clock
    ours, _ = timing.quick(calls, 0.03)
    assert timing.cupti_time(calls[0]) == pytest.approx(ours, rel=0.1)
    cycles, ns, mhz = timing.known_kernel()
    assert mhz
    assert cycles / ns * 1e3 == pytest.approx(mhz, rel=0.02)
