"""Timers and races on a simulated device: order, proof, regimes, chunks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl_bench import nvml, race, stream, timing
from dsl_bench.errors import KernelFault, TimerError
from dsl_bench.nvml import Reading, Sampler

LONG, SHORT = 500_000.0, 6_000.0

Call = Callable[[], None]


class SimEvent:
    """Passed once the simulated host's clock has reached ``at`` (seconds)."""

    at = float("nan")


class SimSampler(Sampler):
    """A sampler whose readings a test supplies."""

    def __init__(self, readings: Sequence[Reading] = ()) -> None:
        super().__init__("")
        self.readings = list(readings)
        self.note = ""

    def __enter__(self) -> Sampler:
        return self


class SimDevice:
    """``host`` is the host's clock in seconds, ``free`` when the stream will be idle.

    ``hiccup`` maps the number of a launch to seconds by which the host then stalls."""

    def __init__(self, seed: int = 0) -> None:
        self.host = 0.0
        self.free = 0.0
        self.clock = 1.0
        self.launches = 0
        self.hiccups: dict[int, float] = {}
        self.log: list[str] = []
        self.flushes = 0
        self.idled: list[float] = []
        self.readings: list[Reading] = []
        self.capturing: list[float] | None = None
        self.rng = random.Random(seed)
        self.drift: Callable[[float], float] = lambda now: 1.0

    def launch(self, name: str, ns: float, host_s: float = 5e-6) -> None:
        """Queue a kernel of ``ns``; the host spends ``host_s`` on it."""
        self.host += host_s + self.hiccups.get(self.launches, 0.0)
        self.launches += 1
        if self.capturing is not None:
            self.capturing.append(ns)
            return
        self.log.append(name)
        begin = max(self.free, self.host + 2e-6)
        self.free = begin + ns * 1e-9 * self.drift(begin)

    def call(self, name: str, ns: float, host_s: float = 5e-6, noise: float = 0.0) -> Call:
        """A kernel to time."""
        return lambda: self.launch(name, ns * (1 + noise * self.rng.gauss(0, 1)), host_s)

    # -- what the timers ask

    def now(self) -> float:
        return self.host

    def idle(self, seconds: float) -> None:
        self.idled.append(seconds)
        self.host += seconds

    def event(self) -> SimEvent:
        return SimEvent()

    def record(self, event: SimEvent) -> None:
        self.host += 1e-6
        event.at = max(self.free, self.host)

    def done(self, event: SimEvent) -> bool:
        return event.at <= self.host

    def wait(self, event: SimEvent) -> None:
        self.host = max(self.host, event.at)

    def elapsed_ns(self, start: SimEvent, end: SimEvent) -> float:
        assert end.at <= self.host, "read before it was passed"
        return (end.at - start.at) * 1e9

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def delay(self, ns: float) -> None:
        self.launch("delay", max(ns, 1000.0))

    def flush_l2(self) -> None:
        self.flushes += 1
        self.launch("flush", 60_000.0)

    def capture(self, calls: Sequence[Call]) -> Call:
        self.capturing = []
        for call in calls:
            call()
        held, self.capturing = self.capturing, None
        return lambda: self.launch("graph", sum(held))

    def sampler(self) -> Sampler:
        return SimSampler(self.readings)


def ratio_of(result: race.RaceResult) -> float:
    a, b = (timing.median(row) for row in result.samples)
    return a / b


# -- order ----------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(0, 1000))
def test_every_round_holds_every_participant_once(count: int, seed: int) -> None:
    for order in islice(stream.orders(count, random.Random(seed)), 20):
        assert sorted(order) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_within_rounds_everyone_follows_everyone_equally_often(count: int) -> None:
    block = count * (1 + count % 2)
    followed = Counter(
        pair
        for order in islice(stream.orders(count, random.Random(1)), 3 * block)
        for pair in pairwise(order)
    )
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) == 1


def test_orders_differ_between_blocks_and_repeat_for_a_seed() -> None:
    first = list(islice(stream.orders(4, random.Random(3)), 40))
    assert first == list(islice(stream.orders(4, random.Random(3)), 40))
    assert len({tuple(o) for o in first}) > 8


# -- what a call costs, and graphs ------------------------------------------------------------------------


def test_cost_tells_device_time_from_host_time() -> None:
    sim = SimDevice()
    got = stream.cost(sim, [sim.call("k", SHORT, host_s=100e-6)])
    assert got.device_ns == pytest.approx(SHORT, rel=0.01)
    assert got.host_ns == pytest.approx(100e3, rel=0.01)


def test_a_call_that_waits_for_the_device_is_refused() -> None:
    sim = SimDevice()

    def call() -> None:
        sim.launch("k", LONG)
        sim.synchronize()

    with pytest.raises(TimerError, match="waits for the device"):
        stream.cost(sim, [call])


def test_one_short_or_host_bound_participant_puts_all_into_graphs() -> None:
    slow, short, hosted = stream.Cost(1e6, 5e3), stream.Cost(1e4, 5e3), stream.Cost(1e6, 6e5)
    assert not stream.needs_graph([slow, slow])
    assert stream.needs_graph([slow, short])
    assert stream.needs_graph([slow, hosted])


@given(st.floats(1e3, 1e6), st.integers(1, 64))
def test_graphs_are_long_enough_and_go_through_all_sets(fastest: float, sets: int) -> None:
    calls = stream.calls_per_graph(fastest, sets)
    assert calls * fastest >= stream.SHORT_NS or calls == stream.MAX_CALLS
    plan = stream.capture_plan(calls, sets)
    assert len(plan) >= stream.CAPTURES
    assert all(len(p) == calls for p in plan)
    if len(plan) < stream.MAX_CAPTURES:
        assert {s for p in plan for s in p} == set(range(sets))
    following = [s for p in plan for s in p]
    assert all(b == (a + 1) % sets for a, b in pairwise(following))


def test_a_graph_without_its_kernel_is_found_out() -> None:
    sim = SimDevice()

    def elsewhere() -> None:
        if sim.capturing is None:
            sim.launch("k", SHORT)

    with pytest.raises(KernelFault, match="does not hold the kernel") as caught:
        timing.quick([elsewhere], 0.01, device=sim)
    assert caught.value.status == "implausible"


def test_the_caller_proves_each_capture_and_can_refuse() -> None:
    sim = SimDevice()
    seen: list[tuple[int, Sequence[int]]] = []

    def prove(racer: int, sets: Sequence[int], replay: Callable[[], object]) -> None:
        before = sim.launches
        replay()
        assert sim.launches == before + 1
        seen.append((racer, sets))

    racers = [[sim.call(f"{i}", SHORT) for _ in range(5)] for i in range(2)]
    result = timing.race_sustained(racers, seconds=0.05, warm=0.0, prove=prove, device=sim)
    assert result.proven
    assert result.timer == "graph+events"
    assert Counter(racer for racer, _ in seen) == {0: stream.CAPTURES, 1: stream.CAPTURES}
    assert {s for _, sets in seen for s in sets} == set(range(5))

    def refuse(racer: int, sets: Sequence[int], replay: Callable[[], object]) -> None:
        raise KernelFault("unwritten", "stale", "capture")

    with pytest.raises(KernelFault, match="stale"):
        timing.race_sustained(racers, seconds=0.05, warm=0.0, prove=refuse, device=sim)


# -- quick ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ns", [3_000.0, SHORT, LONG, 5e6])
def test_quick_gives_the_median_of_a_call(ns: float) -> None:
    sim = SimDevice()
    median, count = timing.quick([sim.call("k", ns, noise=0.01) for _ in range(3)], 0.05, device=sim)
    assert median == pytest.approx(ns, rel=0.02)
    assert count >= timing.QUICK_LEAST


def test_quick_does_not_time_the_host() -> None:
    sim = SimDevice()
    median, _ = timing.quick([sim.call("k", 300_000.0, host_s=400e-6)], 0.02, device=sim)
    assert median == pytest.approx(300_000.0, rel=0.01)


# -- sustained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ns", [SHORT, 60_000.0, LONG])
def test_sustained_recovers_a_ratio(ns: float) -> None:
    sim = SimDevice()
    racers = [[sim.call(n, ns * f, noise=0.003) for _ in range(4)] for n, f in (("a", 1.01), ("b", 1.0))]
    result = timing.race_sustained(racers, seconds=0.5, warm=0.1, device=sim)
    # a capture keeps the noise it was made with, as it does on a device
    assert ratio_of(result) == pytest.approx(1.01, abs=0.001 if ns == LONG else 0.004)
    assert len(result.samples[0]) == len(result.samples[1]) <= race.KEPT_ROUNDS
    assert result.gaps == 0


def test_sustained_is_one_unbroken_stream_that_advances_the_sets() -> None:
    sim = SimDevice()
    sets = 3
    racers = [[sim.call(f"{s}", LONG) for s in range(sets)] for _ in range(2)]
    busy_from = sim.launches
    timing.race_sustained(racers, seconds=0.3, warm=0.05, device=sim)
    order = [int(n) for n in sim.log[busy_from:] if n.isdigit()][-200:]
    assert all(b == (a + 1) % sets for a, b in pairwise(order))


def test_a_drifting_clock_cancels() -> None:
    sim = SimDevice()
    sim.drift = lambda now: 1.0 + 0.05 * now
    racers = [[sim.call("a", LONG)], [sim.call("b", LONG)]]
    result = timing.race_sustained(racers, seconds=1.0, warm=0.2, device=sim)
    assert ratio_of(result) == pytest.approx(1.0, abs=0.001)


def test_warming_ends_when_the_clock_settles_or_at_its_limit() -> None:
    settled = SimDevice()
    result = timing.race_sustained([[settled.call("a", LONG)]] * 2, seconds=0.1, device=settled)
    assert 0.25 < result.warm_s < 0.5
    moving = SimDevice()
    moving.drift = lambda now: 1.0 + 0.2 * now
    result = timing.race_sustained([[moving.call("a", LONG)]] * 2, seconds=0.1, device=moving)
    assert race.WARM_S <= result.warm_s < race.WARM_S + 0.1


def test_a_batch_behind_a_stalled_host_does_not_count() -> None:
    sim = SimDevice()
    racers = [[sim.call("a", LONG)], [sim.call("b", LONG)]]
    sim.hiccups = {600: 0.2}
    result = timing.race_sustained(racers, seconds=0.5, warm=0.1, device=sim)
    assert result.gaps == 1
    assert max(max(row) for row in result.samples) < LONG * 1.01


def test_a_host_that_never_keeps_up_is_an_error() -> None:
    sim = SimDevice()
    racers = [[sim.call("a", LONG)], [sim.call("b", LONG)]]
    sim.hiccups = dict.fromkeys(range(200, 100000, 20), 0.05)
    with pytest.raises(TimerError, match="fell behind"):
        timing.race_sustained(racers, seconds=1.0, warm=0.05, device=sim)


def test_rounds_under_slow_down_are_dropped_and_counted() -> None:
    sim = SimDevice()
    slow, capped = 0x40, 0x04
    sim.readings = [
        nvml.Reading(0.02 * k, 1500, 690.0, slow if 0.6 <= 0.02 * k <= 0.7 else capped) for k in range(500)
    ]
    result = timing.race_sustained([[sim.call("a", LONG)]] * 2, seconds=1.0, warm=0.1, device=sim)
    assert 0 < result.dropped < 300
    assert (result.clock_mhz, result.power_w) == (1500, 690.0)
    assert set(result.throttle) == {"power cap", "hardware thermal slow-down"}
    sim.readings = [nvml.Reading(0.02 * k, 1500, 690.0, slow) for k in range(5000)]
    with pytest.raises(TimerError, match="hardware thermal slow-down"):
        timing.race_sustained([[sim.call("a", LONG)]] * 2, seconds=0.2, warm=0.1, device=sim)


# -- cold ---------------------------------------------------------------------------------------------------


def test_cold_samples_follow_a_gap_a_flush_and_a_delay() -> None:
    sim = SimDevice()
    racers = [[sim.call("a", LONG * 4)], [sim.call("b", LONG)]]
    result = timing.race_cold(racers, seconds=0.2, device=sim)
    assert timing.median(result.samples[0]) == pytest.approx(LONG * 4, rel=0.01)
    assert min(sim.idled) == max(sim.idled) == pytest.approx(3 * LONG * 4 * 1e-9, rel=0.01)
    timed = [k for k, name in enumerate(sim.log) if name in "ab"][-20:]
    assert all(sim.log[k - 2 : k] == ["flush", "delay"] for k in timed)
    assert result.null_ns == 0.0
    assert result.timer == "delay+events"


def test_cold_short_kernels_come_with_a_null_kernel() -> None:
    sim = SimDevice()
    result = timing.race_cold([[sim.call("a", SHORT)], [sim.call("b", SHORT)]], seconds=0.1, device=sim)
    assert result.null_ns == pytest.approx(1000.0, rel=0.01)
    assert set(sim.idled) == {race.GAP_S}


def test_a_slow_launch_is_never_timed() -> None:
    sim = SimDevice()
    racers = [[sim.call("a", SHORT, host_s=900e-6)], [sim.call("b", SHORT)]]
    result = timing.race_cold(racers, seconds=0.1, device=sim)
    assert timing.median(result.samples[0]) == pytest.approx(SHORT, rel=0.01)
    assert result.retries > 0


def test_a_rare_stall_is_taken_again_and_leaves_the_delay_alone() -> None:
    sim = SimDevice()
    cold = stream.ColdTimer(sim, 0.002)
    call = sim.call("a", SHORT)
    for _ in range(30):
        cold.sample(call)
    sim.hiccups = {sim.launches + 2: 0.0003}
    assert cold.sample(call) == pytest.approx(SHORT, rel=0.01)
    assert cold.retries >= 1
    assert cold._delay == stream.FIRST_DELAY_NS


def test_a_launch_that_no_delay_outlasts_is_an_error() -> None:
    sim = SimDevice()
    with pytest.raises(TimerError, match="delay of 50 ms"):
        stream.ColdTimer(sim, 0.002).sample(sim.call("a", SHORT, host_s=0.2))


# -- own clock, chunks, sampler ---------------------------------------------------------------------------


@pytest.mark.parametrize("ns", [SHORT, LONG])
def test_own_clock_blocks_recover_a_ratio(ns: float) -> None:
    sim = SimDevice()
    racers = [[sim.call("a", ns * 1.02, noise=0.01)], [sim.call("b", ns, noise=0.01)]]
    result = timing.own_clock(racers, seconds=2.0, warm=0.3, block_s=0.1, device=sim)
    assert ratio_of(result) == pytest.approx(1.02, abs=0.003)
    assert 5 <= len(result.samples[0]) <= 10


@given(st.integers(1, 2000), st.integers(1, 300))
def test_chunks_cover_every_round_once(count: int, most: int) -> None:
    rounds = [[float(k + 1), 2.0 * (k + 1)] for k in range(count)]
    samples, size = race.chunked(rounds, most)
    assert len(samples) == 2
    assert len(samples[0]) <= most
    assert len(samples[0]) == max(1, count // size)
    assert samples[0] == sorted(samples[0])
    assert (size == 1) == (count <= most)


def test_sampler_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise nvml.NvmlError("NVML is not there")

    monkeypatch.setattr(nvml, "_library", missing)
    with nvml.Sampler("GPU-0") as sampler:
        pass
    assert "NVML is not there" in sampler.note
    assert sampler.window(0.0, 1e9) == nvml.Summary()


def test_sampler_reads_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Answers each query with a fixed number."""

        def __getattr__(self, name: str) -> Callable[..., int]:
            def answer(*arguments: Any) -> int:
                out = arguments[-1]._obj if hasattr(arguments[-1], "_obj") else None
                match name:
                    case "nvmlDeviceGetClockInfo":
                        out.value = 1470
                    case "nvmlDeviceGetFieldValues":
                        out.value.ui = 692_000
                    case "nvmlDeviceGetCurrentClocksThrottleReasons":
                        out.value = 0x4
                    case "nvmlDeviceGetComputeRunningProcesses_v3":
                        arguments[1]._obj.value = 0
                return 0

            return answer

    monkeypatch.setattr(nvml, "_library", Library)
    with nvml.Sampler("GPU-0", period=0.001) as sampler:
        while not sampler.readings:
            pass
    assert sampler.window(0.0, float("inf")) == nvml.Summary(1470, 692.0, ("power cap",), False)


def test_foreign_processes_inside_and_outside_of_a_container() -> None:
    def foreign(*pids: int, mine: int) -> list[str]:
        return nvml.foreign_processes(cast(nvml.Gpu, SimpleNamespace(processes=list(pids))), mine)

    assert foreign(10, 20, mine=10) == ["pid 20"]
    assert foreign(10, 20, mine=77) == ["1 of the pids 10, 20"]
    assert foreign(10, mine=77) == []


def test_a_race_shows_signs_of_life() -> None:
    sim = SimDevice()
    beats: list[int] = []
    result = timing.race_cold(
        [[sim.call("a", LONG)], [sim.call("b", LONG)]], seconds=0.1, device=sim, beat=lambda: beats.append(1)
    )
    assert len(beats) == 2 * len(result.samples[0])
    beats.clear()
    timing.race_sustained(
        [[sim.call("a", LONG)]] * 2, seconds=0.2, warm=0.1, device=sim, beat=lambda: beats.append(1)
    )
    assert beats
