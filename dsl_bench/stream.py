"""Streams of calls on one device: what a call costs, graphs that are proven to hold it, random orders, and
the proof that the device never ran dry.

The parts that :mod:`dsl_bench.race` is made of. They know a device only as a :class:`dsl_bench.gpu.Device`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsl_bench.errors import KernelFault, TimerError
from dsl_bench.gpu import Device, Runner

#: shorter samples are made of several calls in a captured graph
SHORT_NS = 200_000.0
#: captures of each participant: two captures of one call differ by 0.2-0.3 %
CAPTURES = 4
MAX_CAPTURES = 16
MAX_CALLS = 256
#: work queued ahead, in two halves
BATCH_S = 0.025
#: events of a batch: two batches of two-kernel calls fit into a launch queue of 1024
BATCH_SAMPLES = 128
#: no kernel ends sooner; what reads as less did not run on this stream
LEAST_NS = 300.0
FIRST_DELAY_NS, MAX_DELAY_NS = 100_000.0, 50_000_000.0

#: ``prove(racer, buffer sets, replay)``: poison those sets' outputs, replay, and raise KernelFault where an
#: output is as it was
Prove = Callable[[int, Sequence[int], Runner], None]


@dataclass(frozen=True)
class Cost:
    """What one call takes: of the device, back to back, and of the host."""

    device_ns: float
    host_ns: float


@dataclass(frozen=True)
class Unit:
    """A participant as the stream sees it: interchangeable variants, each of ``calls`` calls."""

    variants: Sequence[Runner]
    calls: int = 1


def cost(device: Device, calls: Sequence[Runner]) -> Cost:
    """Device and host time of a call, after one warm-up call on every buffer set.

    The calls are queued behind a delay, so that the device time is free of the host's. Raises TimerError for
    a call that waits for the device (it can be timed neither in a stream nor in a graph)."""
    for call in calls:
        call()
    device.synchronize()
    count = max(4, min(16, len(calls)))
    start, end = device.event(), device.event()
    delay = 1e6
    while delay < 1e9:
        device.delay(delay)
        device.record(start)
        began = device.now()
        for k in range(count):
            calls[k % len(calls)]()
        host = (device.now() - began) * 1e9 / count
        device.record(end)
        queued_in_time = not device.done(start)
        device.wait(end)
        if queued_in_time:
            return Cost(device.elapsed_ns(start, end) / count, host)
        delay *= 4
    raise TimerError("a call waits for the device, so its launches cannot be queued ahead")


def needs_graph(costs: Sequence[Cost]) -> bool:
    """Whether these participants are timed in captured graphs: all of them or none."""
    fastest = min(c.device_ns for c in costs)
    return fastest < SHORT_NS or any(c.host_ns > fastest / 2 for c in costs)


def calls_per_graph(fastest_ns: float, sets: int) -> int:
    """Calls in a graph of at least SHORT_NS; whole turns through the buffer sets where they fit."""
    calls = max(1, math.ceil(SHORT_NS / max(fastest_ns, 1.0)))
    if calls >= sets:
        calls = math.ceil(calls / sets) * sets
    return min(calls, MAX_CALLS)


def capture_plan(calls: int, sets: int) -> list[list[int]]:
    """The buffer sets that each capture goes through; each goes on where the one before it stopped."""
    captures = max(CAPTURES, min(MAX_CAPTURES, math.ceil(sets / calls)))
    return [[(c * calls + k) % sets for k in range(calls)] for c in range(captures)]


def units(
    device: Device, racers: Sequence[Sequence[Runner]], costs: Sequence[Cost], prove: Prove | None = None
) -> list[Unit]:
    """The racers as units of one stream: single calls, or graphs after proof that they hold the kernel."""
    if not needs_graph(costs):
        return [Unit(list(calls)) for calls in racers]
    calls = calls_per_graph(min(c.device_ns for c in costs), min(len(r) for r in racers))
    made = []
    for number, (runners, each) in enumerate(zip(racers, costs, strict=True)):
        variants = []
        for sets in capture_plan(calls, len(runners)):
            replay = device.capture([runners[s] for s in sets])
            _plausible(device, replay, calls, each)
            if prove is not None:
                prove(number, sorted(set(sets)), replay)
            variants.append(replay)
        made.append(Unit(variants, calls))
    return made


def _plausible(device: Device, replay: Runner, calls: int, each: Cost) -> None:
    """That a replay takes about the time of its calls: an empty graph takes none."""
    start, end = device.event(), device.event()
    replay()
    device.record(start)
    replay()
    device.record(end)
    device.wait(end)
    per_call = device.elapsed_ns(start, end) / calls
    if per_call < max(LEAST_NS, each.device_ns / 4):
        reason = f"a captured call takes {per_call:.0f} ns, a call alone {each.device_ns:.0f} ns"
        raise KernelFault("implausible", f"the CUDA graph does not hold the kernel: {reason}", "capture")


def orders(count: int, rng: random.Random) -> Iterator[list[int]]:
    """Rounds without end: random orders in which, over each block, every participant follows every other
    equally often (Williams' design with random labels, its rows shuffled)."""
    steps = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(count)]
    rows = [[(first + step) % count for step in steps] for first in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    while True:
        labels = rng.sample(range(count), count)
        for row in rng.sample(rows, len(rows)):
            yield [labels[k] for k in row]


class _Batch:
    """Samples that are queued together, with an event after each."""

    def __init__(self, device: Device, size: int) -> None:
        self.events = [device.event() for _ in range(size + 1)]
        self.order: list[int] = []
        self.queued_in_time = False
        self.start = 0.0

    @property
    def last(self) -> Any:
        """The event after its last sample."""
        return self.events[len(self.order)]


@dataclass(frozen=True)
class Span:
    """A batch that has run: ``samples`` in order, each the participant and the ns of one of its calls;
    ``counts`` says that the device did not run dry; ``start`` and ``end`` are times of the host (seconds)."""

    samples: list[tuple[int, float]]
    counts: bool
    start: float
    end: float


class Stream:
    """One unbroken stream: ``sequence`` says whose turn it is. While a batch runs, the next one is queued.

    A batch counts only if it was queued before its predecessor had ended: then nothing but the participants
    ran, back to back, from its first event to its last."""

    def __init__(self, device: Device, units: Sequence[Unit], sequence: Iterator[int], batch: int) -> None:
        self._device = device
        self._units = units
        self._sequence = sequence
        self._size = batch
        self._free = [_Batch(device, batch), _Batch(device, batch)]
        self._turn = 0

    def _queue(self) -> _Batch:
        device, batch = self._device, self._free.pop()
        batch.order = list(itertools.islice(self._sequence, self._size))
        batch.start = device.now()
        device.record(batch.events[0])
        for at, i in enumerate(batch.order):
            variants = self._units[i].variants
            variants[self._turn % len(variants)]()
            device.record(batch.events[at + 1])
            self._turn += 1
        return batch

    def _read(self, batch: _Batch) -> list[tuple[int, float]]:
        elapsed, events = self._device.elapsed_ns, batch.events
        return [
            (i, elapsed(events[at], events[at + 1]) / self._units[i].calls)
            for at, i in enumerate(batch.order)
        ]

    def spans(self) -> Generator[Span, None, None]:
        """The batches as they end. Close it to end the stream; what is still queued then runs unread."""
        device = self._device
        running = self._queue()
        try:
            while True:
                following = self._queue()
                following.queued_in_time = not device.done(running.last)
                device.wait(running.last)
                span = Span(self._read(running), running.queued_in_time, running.start, device.now())
                self._free.append(running)
                yield span
                following.start = span.end
                running = following
        finally:
            device.synchronize()


def batch_of(sample_ns: float, multiple: int = 1) -> int:
    """Samples in a batch: about BATCH_S of work, in whole multiples, at least one multiple."""
    size = min(BATCH_SAMPLES, round(BATCH_S * 1e9 / max(sample_ns, 1.0)))
    return max(1, size // multiple) * multiple


class ColdTimer:
    """Takes single cold samples: an idle gap, an L2 flush, a delay that outlasts the launch, one call."""

    def __init__(self, device: Device, gap_s: float) -> None:
        self._device = device
        self._gap = gap_s
        self._delay = FIRST_DELAY_NS
        self._start, self._end = device.event(), device.event()
        self.taken = 0
        self.retries = 0

    def sample(self, call: Runner) -> float:
        """One cold call, ns. A launch that was not queued before its delay ended is taken again behind a
        delay twice as long; where that happens often, all delays grow. TimerError beyond MAX_DELAY_NS."""
        delay = self._delay
        while True:
            elapsed = self._try(call, delay)
            if elapsed is not None:
                break
            self.retries += 1
            delay *= 2
            if delay > MAX_DELAY_NS:
                raise TimerError(f"a launch takes longer than a delay of {MAX_DELAY_NS / 1e6:.0f} ms")
        self.taken += 1
        if self.retries * 10 > self.taken:
            self._delay = delay
        return elapsed

    def _try(self, call: Runner, delay: float) -> float | None:
        device = self._device
        device.synchronize()
        device.idle(self._gap)
        device.flush_l2()
        device.delay(delay)
        device.record(self._start)
        call()
        device.record(self._end)
        queued_in_time = not device.done(self._start)
        device.wait(self._end)
        return device.elapsed_ns(self._start, self._end) if queued_in_time else None
