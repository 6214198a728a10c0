"""The device worker's trials and races on the host, with timers that only call: who is found out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import jobs, registry
from dsl_bench.errors import KernelFault
from dsl_bench.jobs import Origin, Partial
from dsl_bench.kernel import Call
from dsl_bench.race import RaceResult
from dsl_bench.records import CaseRef, Choice, Race, Trial

torch = pytest.importorskip("torch")

HERE = Path(__file__).resolve().parent
WRONG = HERE / "wrong_kernels" / "on_cpu.py"
GEMM = Origin("workload", "gemm", "dsl_bench.workloads.gemm:WORKLOAD")
CASE = CaseRef("gemm", "33x61x512-fp16", {"m": 33, "n": 61, "k": 512}, "fp16")
NS = 50_000.0

Run = Callable[[], object]


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"worker_{name}", HERE / "wrong_kernels" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kinds = _load("kinds")
PROMISED = {name: verdicts for kind in kinds.KINDS for name, verdicts in kind.cpu.items()}


def quick(calls: Sequence[Run], budget: float, *, prove: Any = None, device: Any = None) -> tuple[float, int]:
    """Calls each three times and proves one replay, as the timer does."""
    for call in [*calls] * 3:
        call()
    if prove is not None:
        prove(0, [0], calls[0])
    return NS, 5


def race_sustained(racers: Sequence[Sequence[Run]], *, prove: Any = None, **how: Any) -> RaceResult:
    """The same for several."""
    for number, calls in enumerate(racers):
        quick(calls, 0.0)
        if prove is not None:
            prove(number, [0], calls[0])
    return RaceResult([[int(NS)] * 30 for _ in racers], "none", host_us=[1.0] * len(racers))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device worker's bench that works on the host; what it sends is in ``sent``."""
    from dsl_bench import bench as benches

    monkeypatch.syspath_prepend(HERE / "plugin_fixture")
    monkeypatch.setattr(benches.timing, "quick", quick)
    monkeypatch.setattr(benches.timing, "race_sustained", race_sustained)
    monkeypatch.setattr(benches.timing, "race_cold", race_sustained)
    sent: list[Any] = []
    made = benches.Bench(registry.Shelf(), sent.append, interpret=True)
    made.sent = sent  # type: ignore[attr-defined]
    return made


def racer(bench: Any, name: str, role: str = "language") -> jobs.Racer:
    """A kernel of the file, as it would be loaded on a device."""
    mine = Origin("file", WRONG.stem, str(WRONG), "file")
    config = {"rows": 16} if name == "gemm" else {"kind": name}
    bench._modules[name] = 16
    return jobs.Racer(mine, (mine,), role, Choice(f"numpyref/{name}", "hash", config, name), "")


def trials(bench: Any, *names: str) -> dict[str, Trial]:
    """What trials of these kernels, in one job, come to."""
    bench.sent.clear()
    bench.handle(jobs.TrialsJob("run", GEMM, CASE, [racer(bench, name) for name in names], 0.01))
    found = [m.record for m in bench.sent if isinstance(m, Partial)]
    assert len(found) == len(names)
    return dict(zip(names, found, strict=True))


def races(bench: Any, *racers: jobs.Racer) -> list[Race]:
    """The races of these kernels."""
    bench.sent.clear()
    bench.handle(jobs.RaceJob("run", GEMM, CASE, ("cold", "sustained"), list(racers), 0.01))
    return [m.record for m in bench.sent if isinstance(m, Partial)]


def test_trials_find_out_what_a_single_check_does_not(bench: Any) -> None:
    names = ("gives_the_last_calls_output", "caches_by_identity", "caches_by_version", "mutates_an_input")
    found = trials(bench, "gemm", *names, "right_on_the_first_call_only", "writes_out_of_bounds", "gemm")
    assert found["gemm"].status == "ok"
    assert found["gemm"].median_ns == NS
    for name in names[:3]:
        assert (found[name].status, found[name].check) == ("unstable", "after"), found[name]
        assert found[name].reason.startswith("held before it was timed, not after it")
        assert found[name].median_ns == 0.0
    first = found["right_on_the_first_call_only"]
    assert (first.status, first.check) == ("incorrect", "capture")
    assert "when a captured graph was replayed" in first.reason
    for name in ("mutates_an_input", "writes_out_of_bounds"):
        assert (found[name].status, found[name].check) == (PROMISED[name][0].status, PROMISED[name][0].check)


def test_a_kernel_that_spoils_its_process_ends_the_job(bench: Any) -> None:
    with pytest.raises(KernelFault) as fault:
        trials(bench, "gemm", "works_in_a_thread_of_bind")
    assert fault.value.fatal
    assert fault.value.check == "threads"
    kept = [m.record for m in bench.sent if isinstance(m, Partial)]
    assert [r.status for r in kept] == ["ok"]
    assert bench.sent[-1] == jobs.Progress(f"trying numpyref/works_in_a_thread_of_bind on {CASE.name}", 1)


def later(spoil: Callable[[Any, Any, Any], None], calls: int) -> Any:
    """A right kernel that does ``spoil`` as well from a call on."""

    def bind(module: Any, case: Any, config: Any, inputs: Any, outputs: Any) -> Call:
        a, b, c = inputs["a"], inputs["b"], outputs["c"]
        count = [0]

        def run() -> None:
            count[0] += 1
            c.copy_(a.float() @ b.float().t())
            if count[0] > calls:
                spoil(a, b, c)

        return Call(run)

    return bind


def test_what_a_race_finds_out_while_each_is_timed_costs_nobody_else(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds in both checks and goes wrong from its third call on; the right one comes last."""
    import dataclasses

    spoils = {
        "writes_zeros": lambda a, b, c: a[0].copy_(a[0].flip(0)),
        "writes_a_part": lambda a, b, c: c.as_strided((4,), (1,), c.storage_offset() + c.numel()).zero_(),
        "makes_nan": lambda a, b, c: c.zero_(),
    }
    right = bench.kernel(racer(bench, "gemm"))
    table = {n: dataclasses.replace(right, bind=later(spoil, 2)) for n, spoil in spoils.items()}
    monkeypatch.setattr(bench, "kernel", lambda r: table.get(r.choice.kernel.partition("/")[2], right))
    (race, _) = races(bench, *(racer(bench, name) for name in (*spoils, "gemm")))
    caught = [(p.status, p.check) for p in race.participants]
    assert caught[0] in (("mutated_input", "fingerprint"), ("incorrect", "capture"))
    assert caught[1:3] == [("illegal_access", "canary"), ("incorrect", "capture")]
    assert caught[3:] == [("ok", "")] * 2
    assert race.racers == [3, 4]
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("spoil", "calls", "verdict"),
    [
        (lambda a, b, c: a[0].copy_(a[0].flip(0)), 1, ("mutated_input", "fingerprint")),
        (
            lambda a, b, c: c.as_strided((4,), (1,), c.storage_offset() + c.numel()).zero_(),
            1,
            ("illegal_access", "canary"),
        ),
        (lambda a, b, c: torch.set_default_dtype(torch.float64), 1, ("launch_error", "flags")),
        (lambda a, b, c: setattr(torch, "isfinite", print), 1, ("launch_error", "tamper")),
        (lambda a, b, c: c.zero_(), 4, ("unstable", "after")),
    ],
    ids=["mutates", "out of bounds", "flags", "tampers", "wrong at last"],
)
def test_what_starts_while_it_is_timed_is_found_out(
    bench: Any, monkeypatch: pytest.MonkeyPatch, spoil: Any, calls: int, verdict: tuple[str, str]
) -> None:
    import dataclasses

    given = racer(bench, "gemm")
    kernel = dataclasses.replace(bench.kernel(given), bind=later(spoil, calls))
    monkeypatch.setattr(bench, "proof", lambda *args: None)  # which would be first
    monkeypatch.setattr(bench, "kernel", lambda racer: kernel)
    assert (lambda t: (t.status, t.check))(trials(bench, "gemm")["gemm"]) == verdict
    assert torch.get_default_dtype() == torch.float32
    monkeypatch.undo()


def test_a_race_goes_on_without_those_that_fail(bench: Any) -> None:
    wrong = ("writes_zeros", "right_on_the_first_call_only", "writes_out_of_bounds", "mutates_an_input")
    # the right one comes last, so that it would have to answer for the others
    people = [racer(bench, name) for name in wrong] + [racer(bench, "gemm", "vendor"), racer(bench, "gemm")]
    found = races(bench, *people)
    assert [r.regime for r in found] == ["cold", "sustained"]
    for race in found:
        assert [p.role for p in race.participants] == [*["language"] * 4, "vendor", "language", "aa"]
        assert race.racers == [4, 5, 6]
        assert [len(row) for row in race.samples] == [30, 30, 30]
        verdicts = [(p.status, p.check) for p in race.participants]
        assert verdicts[4:] == [("ok", "")] * 3
        assert verdicts[:4] == [
            ("incorrect", "rms"),
            ("incorrect", "rms"),  # the second call of its two checks
            ("illegal_access", "canary"),
            ("mutated_input", "fingerprint"),
        ]


def test_a_race_of_none_says_why(bench: Any) -> None:
    found = races(bench, racer(bench, "writes_nothing"), racer(bench, "changes_a_flag"))
    assert [r.racers for r in found] == [[], []]
    assert [p.status for p in found[0].participants] == ["unwritten", "launch_error"]


def test_a_mutated_input_does_not_spoil_the_reference_of_others(bench: Any) -> None:
    found = trials(bench, "mutates_an_input", "gemm")
    assert found["gemm"].status == "ok", found["gemm"].reason


# -- forms that only a simulated device has on the host ---------------------------------------------------


class TwoStreams:
    """Work of another stream than the current one is done when somebody waits for the device."""

    def __init__(self) -> None:
        self.elsewhere: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.elsewhere:
            self.elsewhere.pop(0)()

    def delay(self, ns: float) -> None:
        """What is queued on the current stream from here on comes after what runs elsewhere meanwhile."""


def test_work_that_the_current_stream_does_not_wait_for_is_found_out() -> None:
    from dsl_bench.observe import observed

    device: Any = TwoStreams()
    c = torch.empty((4, 4), dtype=torch.bfloat16)
    elsewhere = Call(lambda: device.elsewhere.append(lambda: c.fill_(1.0)))
    with pytest.raises(KernelFault, match="another stream") as fault:
        observed(elsewhere, {"c": c}, device)
    assert (fault.value.status, fault.value.check) == ("unwritten", "stream")
    here = Call(lambda: c.fill_(1.0))
    assert observed(here, {"c": c}, device)["c"] is c
    nothing = Call(lambda: None)
    observed(nothing, {"c": c}, device)  # found out by its poison


def test_work_that_does_not_wait_for_the_current_stream_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsl_bench import observe

    device: Any = TwoStreams()
    c = torch.empty((4, 4), dtype=torch.bfloat16)
    genuine = observe.check.poison
    delayed: list[bool] = []

    def delay(ns: float) -> None:
        delayed.append(True)

    def poison(outputs: Any) -> None:
        if delayed:  # behind the delay: it takes place when the device is waited for
            delayed.clear()
            device.elsewhere.append(lambda: genuine(outputs))
        else:
            genuine(outputs)

    device.delay = delay
    monkeypatch.setattr(observe.check, "poison", poison)
    # the count of the current stream would come behind the poison as well
    monkeypatch.setattr(observe.check, "still_poisoned", lambda tensor: torch.tensor(tensor.numel()))
    monkeypatch.setattr(observe.check, "unwritten", lambda t: int((t.view(torch.int16) == 0x7FEB).sum()))
    with pytest.raises(KernelFault, match="another stream"):
        observe.observed(Call(lambda: c.fill_(1.0)), {"c": c}, device)


@pytest.mark.parametrize(("share", "holds"), [(0.9, True), (1.04, True), (1.06, False), (30.0, False)])
def test_nothing_is_faster_than_physics(share: float, holds: bool) -> None:
    from dsl_bench.bench import assert_plausible
    from dsl_bench.standing import PEAKS
    from dsl_bench.workloads.gemm import WORKLOAD

    rates = PEAKS["NVIDIA H200"]
    big = WORKLOAD.parse_case({"m": "8192", "n": "8192", "k": "8192"})
    thin = WORKLOAD.parse_case({"m": "1", "n": "8192", "k": "8192"})
    for case in (big, thin):
        least = max(WORKLOAD.flops(case) / rates[0], WORKLOAD.bytes(case) / rates[1]) * 1e9
        if holds:
            assert_plausible(WORKLOAD, case, least / share, rates)
            continue
        with pytest.raises(KernelFault) as fault:
            assert_plausible(WORKLOAD, case, least / share, rates)
        assert (fault.value.status, fault.value.check) == ("implausible", "physics")


# -- fences, and what is put back -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 11, 13)])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "int32", "uint8"])
def test_fences_stand_around_the_tensor(shape: tuple[int, ...], kind: str) -> None:
    from dsl_bench import fence

    fenced = fence.allocate("x", shape, getattr(torch, kind), "cpu")
    tensor = fenced.tensor
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    tensor.fill_(1)
    fence.assert_whole([fenced])
    size = tensor.element_size()
    assert fenced.before.data_ptr() + fence.HOST_BYTES == tensor.data_ptr()
    assert 0 <= fenced.after.data_ptr() - (tensor.data_ptr() + tensor.numel() * size) <= 1
    assert tensor.data_ptr() % 16 == 0
    for zone, at in ((fenced.before, -1), (fenced.after, 0), (fenced.after, -1)):
        zone[at] = 0
        with pytest.raises(KernelFault, match=r"2 bytes (before|after) x") as fault:
            fence.assert_whole([fenced])
        assert (fault.value.status, fault.value.check) == ("illegal_access", "canary")
        fence.assert_whole([fenced])  # mended


def test_what_lies_beyond_a_tensor_is_no_number() -> None:
    from dsl_bench import fence

    for kind in (torch.bfloat16, torch.float16, torch.float32):
        fenced = fence.allocate("x", (4,), kind, "cpu")
        for zone in (fenced.before, fenced.after):
            assert bool(torch.isnan(zone.view(kind)).all())


def test_the_guard_puts_back_what_it_finds_changed() -> None:
    import time

    from dsl_bench import timing
    from dsl_bench.guard import Guard

    guard = Guard()
    genuine = (time.perf_counter, timing.quick, torch.Tensor.sum, timing.median.__code__)
    time.perf_counter = lambda: 0.0  # type: ignore[assignment]
    timing.quick = None  # type: ignore[assignment]
    torch.Tensor.sum = None
    timing.median.__code__ = (lambda samples: 0.0).__code__
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    with pytest.raises(KernelFault, match="and 1 more") as fault:
        guard.inspect()
    assert fault.value.check == "tamper"
    assert (time.perf_counter, timing.quick, torch.Tensor.sum, timing.median.__code__) == genuine
    guard.inspect()


def test_a_vendor_library_may_set_flags_which_are_put_back() -> None:
    from dsl_bench.guard import Guard

    guard = Guard()
    held = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not held
    guard.inspect(vendor=True)
    assert torch.backends.cudnn.benchmark == held
