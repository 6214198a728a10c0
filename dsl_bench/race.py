"""Races: several callables timed in turns on one device, in one of two regimes.

``race_sustained`` alternates call by call in one unbroken stream; ``race_cold`` times single calls after an
idle gap and an L2 flush. Both choose their order at random and prove what they claim: that every call was
queued before the device could run dry, else the sample is thrown away, and where that does not help, the
timer fails. Owns no meaning and no storage; see docs/measuring.md.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dsl_bench.errors import TimerError
from dsl_bench.gpu import Device, Runner, cuda
from dsl_bench.nvml import Sampler
from dsl_bench.stream import (
    ColdTimer,
    Cost,
    Prove,
    Span,
    Stream,
    batch_of,
    cost,
    needs_graph,
    orders,
    units,
)

#: rounds a result keeps; longer races become medians of consecutive chunks
KEPT_ROUNDS = 200
WARM_S = 1.5
SETTLE_WINDOW_S, SETTLED = 0.1, 0.003
#: of the batches, how many may have let the device run dry
MAX_GAPS = 0.2
#: the least idle gap before a cold call; below NULL_BELOW_NS an empty kernel is timed as well
GAP_S = 0.002
NULL_BELOW_NS = 50_000.0
#: of an own-clock block, the share in which the clock may still move
LEAD_IN = 0.25

Rows = list[list[float]]


@dataclass
class RaceResult:
    """``samples[i][r]``: ns of one call of racer ``i`` in round ``r`` (each the mean of ``calls`` calls, each
    row the medians of ``chunk`` consecutive rounds). ``host_us`` is the host's time to launch one call,
    uncaptured. ``gaps`` counts batches dropped because the device ran dry, ``dropped`` rounds dropped for
    slow-down, ``retries`` cold launches taken again; ``proven``: the captured graphs passed the
    caller's proof; ``null_ns`` is an empty kernel timed in the same way (0: not timed)."""

    samples: list[list[int]]
    timer: str
    calls: int = 1
    chunk: int = 1
    host_us: list[float] = field(default_factory=list)
    clock_mhz: float = 0.0
    power_w: float = 0.0
    throttle: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    dropped: int = 0
    gaps: int = 0
    retries: int = 0
    null_ns: float = 0.0
    warm_s: float = 0.0
    proven: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """ns of one call of each racer."""
        return [float(statistics.median(row)) for row in self.samples]


class _Settling:
    """Says when the clock has settled: the samples of three windows in turn have the same median."""

    def __init__(self, limit_s: float) -> None:
        self._limit = limit_s
        self._window: list[float] = []
        self._medians: list[float] = []
        self._spent = 0.0
        self.total = 0.0

    def over(self, span: Span) -> bool:
        """Take a batch; whether warming is over with it."""
        self._window += [ns for _, ns in span.samples]
        self._spent += span.end - span.start
        self.total += span.end - span.start
        if self._spent >= SETTLE_WINDOW_S:
            self._medians.append(statistics.fmean(self._window))
            self._window, self._spent = [], 0.0
        if self.total >= self._limit:
            return True
        last = self._medians[-3:]
        return len(last) == 3 and max(last) - min(last) <= SETTLED * min(last)


def race_sustained(
    racers: Sequence[Sequence[Runner]],
    *,
    seconds: float,
    seed: int = 0,
    min_rounds: int = 30,
    max_rounds: int = 20_000,
    warm: float = WARM_S,
    prove: Prove | None = None,
    device: Device | None = None,
    beat: Callable[[], None] = lambda: None,
) -> RaceResult:
    """Times in the sustained regime: call by call in one unbroken stream, in random order, on advancing
    buffer sets, after up to ``warm`` seconds in which the clock settles.

    ``racers[i][s]`` enqueues racer ``i`` on buffer set ``s``. Runs for ``seconds`` and at least
    ``min_rounds``, at most ``max_rounds``; ``beat`` is called now and then: the race is alive. Raises
    TimerError where the host cannot keep ahead of the device or every round was under slow-down, and
    KernelFault for a call that cannot be captured."""
    gpu = device or cuda()
    count = len(racers)
    costs = [cost(gpu, calls) for calls in racers]
    participants = units(gpu, racers, costs, prove)
    calls = participants[0].calls
    sequence = itertools.chain.from_iterable(orders(count, random.Random(seed)))
    sample_ns = calls * statistics.fmean(c.device_ns for c in costs)
    stream = Stream(gpu, participants, sequence, batch_of(sample_ns, count))
    settling = _Settling(warm)
    with gpu.sampler() as sampler, _no_gc(), contextlib.closing(stream.spans()) as flow:
        for span in flow:
            beat()
            if settling.over(span):
                break
        kept, gaps = _measure(flow, seconds, min_rounds * count, max_rounds * count, beat)
    clean = [span for span in kept if not sampler.window(span.start, span.end).slowed]
    rounds = [row for span in clean for row in _rounds(span, count)]
    if not rounds:
        why = ", ".join(sampler.window(kept[0].start, kept[-1].end).throttle)
        raise TimerError(f"every round ran under slow-down ({why})")
    timer = "graph+events" if needs_graph(costs) else "events"
    result = _result(rounds, timer, calls, costs)
    result.dropped = sum(len(span.samples) for span in kept) // count - len(rounds)
    result.gaps, result.warm_s, result.proven = gaps, settling.total, prove is not None
    return _with_clocks(result, sampler, kept[0].start, kept[-1].end)


def _measure(
    flow: Iterator[Span],
    seconds: float,
    least: int,
    most: int,
    beat: Callable[[], None] = lambda: None,
) -> tuple[list[Span], int]:
    """Batches that count, for ``seconds`` and ``least`` samples, up to ``most``; how many did not count."""
    kept: list[Span] = []
    samples = gaps = 0
    spent = 0.0
    for span in flow:
        beat()
        spent += span.end - span.start
        if span.counts:
            kept.append(span)
            samples += len(span.samples)
        else:
            gaps += 1
            if gaps > 10 and gaps > MAX_GAPS * (gaps + len(kept)):
                raise TimerError(f"the host fell behind the device in {gaps} of {gaps + len(kept)} batches")
        if samples >= most or (spent >= seconds and samples >= least):
            break
    return kept, gaps


def _rounds(span: Span, count: int) -> Rows:
    """``[round][participant]`` of a batch of whole rounds."""
    rows = []
    for at in range(0, len(span.samples), count):
        row = [0.0] * count
        for i, ns in span.samples[at : at + count]:
            row[i] = ns
        rows.append(row)
    return rows


def race_cold(
    racers: Sequence[Sequence[Runner]],
    *,
    seconds: float,
    seed: int = 0,
    min_rounds: int = 15,
    max_rounds: int = KEPT_ROUNDS,
    device: Device | None = None,
    beat: Callable[[], None] = lambda: None,
) -> RaceResult:
    """Times in the cold regime: an idle gap of max(2 ms, 3 calls), the L2 flushed by a write and a read of
    twice its size, a delay on the device that outlasts the launch, event, one call, event; random order.

    Runs for ``seconds`` and at least ``min_rounds``, at most ``max_rounds``; ``beat`` is called after each
    sample: long calls with their gaps take many seconds. Raises TimerError where no delay outlasts a
    launch."""
    gpu = device or cuda()
    costs = [cost(gpu, calls) for calls in racers]
    cold = ColdTimer(gpu, max(GAP_S, 3e-9 * max(c.device_ns for c in costs)))
    turns = orders(len(racers), random.Random(seed))
    rounds: Rows = []
    with gpu.sampler() as sampler, _no_gc():
        for calls in racers:
            cold.sample(calls[0])
        began = gpu.now()
        while len(rounds) < max_rounds and (len(rounds) < min_rounds or gpu.now() - began < seconds):
            row = [0.0] * len(racers)
            for i in next(turns):
                row[i] = cold.sample(racers[i][len(rounds) % len(racers[i])])
                beat()
            rounds.append(row)
        null = 0.0
        if min(statistics.median(column) for column in zip(*rounds, strict=True)) < NULL_BELOW_NS:
            null = statistics.median(cold.sample(lambda: gpu.delay(0.0)) for _ in range(15))
        ended = gpu.now()
    result = _result(rounds, "delay+events", 1, costs)
    result.null_ns, result.retries = null, cold.retries
    return _with_clocks(result, sampler, began, ended)


def own_clock(
    racers: Sequence[Sequence[Runner]],
    *,
    seconds: float,
    seed: int = 0,
    block_s: float = 0.2,
    warm: float = WARM_S,
    prove: Prove | None = None,
    device: Device | None = None,
) -> RaceResult:
    """Like :func:`race_sustained`, but each participant keeps the device for blocks of ``block_s`` in random
    order without gaps, and so earns its own clock. A wider figure: few rounds, each the mean of a block after
    its first quarter."""
    gpu = device or cuda()
    count = len(racers)
    costs = [cost(gpu, calls) for calls in racers]
    participants = units(gpu, racers, costs, prove)
    calls = participants[0].calls
    lengths = [max(4, round(block_s * 1e9 / (c.device_ns * calls))) for c in costs]
    turns = orders(count, random.Random(seed))
    sequence = (i for order in turns for i in order for _ in range(lengths[i]))
    stream = Stream(gpu, participants, sequence, batch_of(calls * max(c.device_ns for c in costs)))
    blocks: list[_Block] = []
    spent = 0.0
    with gpu.sampler() as sampler, _no_gc(), contextlib.closing(stream.spans()) as flow:
        began = gpu.now()
        for span in flow:
            spent += span.end - span.start
            _into_blocks(blocks, span, lengths)
            settled = sum(b.start >= began + warm for b in blocks)
            if spent >= warm + seconds and settled > 2 * count:
                break
        ended = gpu.now()
    whole = [blocks[at : at + count] for at in range(0, len(blocks) - count, count)]
    good = [r for r in whole if r[0].start >= began + warm and all(b.counts for b in r)]
    rounds = [[b.mean for b in sorted(r, key=lambda b: b.racer)] for r in good]
    if not rounds:
        raise TimerError(f"no round of {block_s * 1e3:.0f} ms blocks was without a gap in {seconds:g} s")
    result = _result(rounds, "blocks", calls * min(lengths), costs)
    result.warm_s, result.proven = warm, prove is not None
    return _with_clocks(result, sampler, began + warm, ended)


@dataclass
class _Block:
    """A participant's turn of many calls."""

    racer: int
    left: int
    start: float
    end: float = 0.0
    counts: bool = True
    samples: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean ns of its calls, without the first quarter."""
        return statistics.fmean(self.samples[int(LEAD_IN * len(self.samples)) :])


def _into_blocks(blocks: list[_Block], span: Span, lengths: Sequence[int]) -> None:
    for i, ns in span.samples:
        if not blocks or not blocks[-1].left:
            blocks.append(_Block(i, lengths[i], span.start))
        block = blocks[-1]
        block.samples.append(ns)
        block.left -= 1
        block.counts = block.counts and span.counts
        block.end = span.end


def chunked(rounds: Sequence[Sequence[float]], most: int = KEPT_ROUNDS) -> tuple[list[list[int]], int]:
    """``rounds[r][i]`` as ``samples[i][r]`` in whole ns: where there are more than ``most`` rounds, medians
    of consecutive chunks of equal size, and that size. A rest too small for a chunk joins the last one."""
    size = -(-len(rounds) // most)
    starts = list(range(0, len(rounds) - size + 1, size))
    spans = list(zip(starts, [*starts[1:], len(rounds)], strict=True))
    columns = zip(*rounds, strict=True)
    return [[round(statistics.median(column[a:b])) for a, b in spans] for column in columns], size


def _result(rounds: Rows, timer: str, calls: int, costs: Sequence[Cost]) -> RaceResult:
    samples, chunk = chunked(rounds)
    return RaceResult(samples, timer, calls, chunk, [c.host_ns / 1e3 for c in costs])


def _with_clocks(result: RaceResult, sampler: Sampler, start: float, end: float) -> RaceResult:
    seen = sampler.window(start, end)
    result.clock_mhz, result.power_w, result.throttle = seen.clock_mhz, seen.power_w, list(seen.throttle)
    result.foreign = list(sampler.foreign)
    result.notes += [sampler.note] if sampler.note else []
    return result


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Python's collector stays off: its pauses would let the device run dry."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
