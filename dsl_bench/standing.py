"""Which recorded races count for a row, and the ratios they give. Measures and stores nothing.

Of one kernel, config and set of baselines, all races count that share the newest one's identity, each a
process of its own. The newest is the newest whose kernel hash equals the tree's; only where there is none is
an older one shown, marked stale. Never the best of several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dsl_bench import stats
from dsl_bench.records import REGIMES, CaseRef, Failure, Record, RunHeader, Skip
from dsl_bench.stats import Estimate
from dsl_bench.store import Entry

#: fixed rates for ``sol``: dense fp16/bf16 FLOP/s at the maximum clock (4096 a clock and SM), and the bytes/s
#: that a plain read was measured to reach
PEAKS = {"NVIDIA H200": (132 * 4096 * 1980e6, 4.43e12)}
#: a share of them that no correct measurement exceeds
IMPLAUSIBLE = 1.05

Known = Mapping[tuple[str, str], CaseRef]


@dataclass
class Slot:
    """All that is known of one language on one case in one regime on one GPU, oldest first."""

    case: CaseRef
    regime: str
    backend: str
    gpu: str
    entries: list[Entry] = field(default_factory=list)
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


class Book:
    """The races, failures and refusals of some results, looked up by race and by slot."""

    def __init__(self, entries: Sequence[Entry], found: Sequence[Record], known: Known) -> None:
        self.races: dict[int, list[Entry]] = {}
        for entry in entries:
            self.races.setdefault(entry.race, []).append(entry)
        self.order = _run_order(entries, found)
        self._floors: dict[int, float | None] = {}
        self._known = known
        self._gpus = {r.run_id: str(r.environment.get("gpu", "")) for r in found if isinstance(r, RunHeader)}
        self._entries = [e for e in entries if e.role == "language"]
        self._fates = self._fates_of(found, {e.backend for e in entries if e.role == "vendor"})

    def _fates_of(self, found: Sequence[Record], vendors: set[str]) -> list[Skip | Failure]:
        """What languages failed or refused on a GPU; what a machine without one could not do says nothing."""
        fates = [r for r in found if isinstance(r, Skip | Failure) and self._gpus.get(r.run_id) and r.case]
        vendors |= {r.backend for r in fates if r.status == "baseline_missing"}
        return [r for r in fates if r.backend and r.backend not in vendors]

    def vendors(self, race: int) -> dict[str, Entry]:
        """The verified baselines of a race by kernel id, in the workload's order: its default comes first."""
        return {e.kernel: e for e in self.races[race] if e.role == "vendor" and e.samples.size}

    def floor(self, race: int) -> float | None:
        """What the race can tell apart, from its two copies of one baseline; None where it held none."""
        if race not in self._floors:
            ran = [e for e in self.races[race] if e.samples.size]
            twin = next((e for e in ran if e.role == "aa"), None)
            original = next((e for e in ran if twin and e.role != "aa" and e.kernel == twin.kernel), None)
            both = twin is not None and original is not None
            self._floors[race] = (
                stats.aa_floor(twin.samples, original.samples) if twin and original and both else None
            )
        return self._floors[race]

    def slots(self) -> list[Slot]:
        """Every language on every case and regime in which any language raced or failed, by GPU."""
        refs = {(e.workload, e.case): _case_of(e) for e in self._entries} | dict(self._known)
        table: dict[tuple[str, ...], Slot] = {}
        languages: dict[tuple[str, str], set[str]] = {}
        held: dict[tuple[str, ...], None] = {}
        for gpu, workload, case, regime, backend in self._keys():
            if (workload, case) in refs:
                languages.setdefault((gpu, workload), set()).add(backend)
                held[gpu, workload, case, regime] = None
        for gpu, workload, case, regime in held:
            for backend in sorted(languages[gpu, workload]):
                slot = Slot(refs[workload, case], regime, backend, gpu)
                table[gpu, workload, case, regime, backend] = slot
        self._fill(table)
        return list(table.values())

    def _keys(self) -> Iterable[tuple[str, str, str, str, str]]:
        for e in self._entries:
            yield e.gpu, e.workload, e.case, e.regime, e.backend
        for r in self._fates:
            for regime in self._regimes(r):
                yield self._gpus[r.run_id], r.workload, r.case, regime, r.backend

    def _regimes(self, fate: Skip | Failure) -> Sequence[str]:
        """The regimes a failure stands for: its own, or all in which the case was raced."""
        if fate.regime:
            return [fate.regime]
        where = (self._gpus[fate.run_id], fate.workload, fate.case)
        return sorted({e.regime for e in self._entries if (e.gpu, e.workload, e.case) == where}) or REGIMES

    def _fill(self, table: Mapping[tuple[str, ...], Slot]) -> None:
        for e in self._entries:
            table[e.gpu, e.workload, e.case, e.regime, e.backend].entries.append(e)
        for r in self._fates:
            for regime in self._regimes(r):
                slot = table.get((self._gpus[r.run_id], r.workload, r.case, regime, r.backend))
                if slot and isinstance(r, Failure):
                    slot.failures.append((self.order[r.run_id], r))
                elif slot and isinstance(r, Skip):
                    slot.skips.append(r)
        for slot in table.values():
            slot.failures.sort(key=lambda pair: pair[0])


def _run_order(entries: Sequence[Entry], found: Sequence[Record]) -> dict[str, int]:
    """Run ids numbered by when they started."""
    started = {e.run_id: e.started for e in reversed(entries)}
    started |= {r.run_id: r.started for r in found if isinstance(r, RunHeader)}
    return {run: n for n, run in enumerate(sorted(started, key=lambda r: (started[r], r)))}


def _case_of(entry: Entry) -> CaseRef:
    return CaseRef(entry.workload, entry.case, dict(entry.params), entry.dtype, tuple(entry.groups))


@dataclass
class Standing:
    """What a slot comes to: the races that count, or the status and reason why none does."""

    entries: list[Entry]
    stale: bool = False
    status: str = "ok"
    reason: str = ""


def stand(slot: Slot, book: Book, hashes: Mapping[str, str] | None) -> Standing:
    """The standing of a slot; ``hashes`` are the tree's by kernel id (None: nothing is called stale)."""
    current = [e for e in slot.entries if hashes is None or hashes.get(e.kernel) == e.kernel_hash]
    pool = current or slot.entries
    last_run = book.order[pool[-1].run_id] if pool else -1
    if slot.failures and slot.failures[-1][0] >= last_run:
        failure = slot.failures[-1][1]
        return Standing([], status=failure.status, reason=f"{failure.where}: {failure.reason}")
    if not pool:
        fate = slot.skips[-1] if slot.skips else None
        return Standing(
            [], status=fate.status if fate else "missing", reason=fate.reason if fate else "not raced"
        )
    newest = pool[-1]
    bad = [e for e in pool if e.run_id == newest.run_id and e.status != "ok"]
    if bad:
        return Standing(bad[-1:], not current, bad[-1].status, bad[-1].reason)
    wanted = _identity(newest, book)
    counted = {e.race: e for e in pool if e.samples.size and _identity(e, book) == wanted}
    return Standing(list(counted.values()), not current)


def _identity(entry: Entry, book: Book) -> tuple[Any, ...]:
    """Races with equal identities measured the same thing and may be combined."""
    rivals = sorted((v.kernel, v.key, v.version) for v in book.vendors(entry.race).values())
    config = sorted(entry.config.items())
    return entry.kernel, entry.kernel_hash, entry.key, config, entry.version, entry.data, rivals


class Numbers:
    """The ratios of a standing with samples."""

    def __init__(self, standing: Standing, book: Book) -> None:
        self.entries = standing.entries
        self._book = book

    @cached_property
    def rivals(self) -> list[dict[str, Entry]]:
        """The verified baselines of each race (equal identities have equal baselines)."""
        return [self._book.vendors(e.race) for e in self.entries]

    @cached_property
    def baseline(self) -> str | None:
        """The fastest baseline, picked on the first third of every race's rounds."""
        names = list(self.rivals[0])
        if not names:
            return None
        scores = np.zeros(len(names))
        for vendors in self.rivals:
            first = stats.split(np.stack([vendors[n].samples for n in names]))[0].astype(np.float64)
            # relative to the round's mean, so that a drifting clock does not choose
            scores += np.median(first / first.mean(axis=0, keepdims=True), axis=1)
        return names[int(np.argmin(scores))]

    @cached_property
    def estimate(self) -> Estimate | None:
        """Our speed as a fraction of the baseline's, over the rounds that did not pick it."""
        if self.baseline is None:
            return None
        pairs = [
            (stats.split(vendors[self.baseline].samples)[1], stats.split(entry.samples)[1])
            for entry, vendors in zip(self.entries, self.rivals, strict=True)
        ]
        return stats.hierarchical(pairs)

    @cached_property
    def of_default(self) -> float | None:
        """The fraction of the baseline that users get by default, where that one was verified."""
        ratios = []
        for entry in self.entries:
            default = next((e for e in self._book.races[entry.race] if e.role == "vendor"), None)
            if default is None or not default.samples.size:
                return None
            ratios.append(float(np.median(default.samples / entry.samples)))
        return float(np.mean(ratios))

    @cached_property
    def floor(self) -> float | None:
        """The greatest A/A floor of the races."""
        floors = (self._book.floor(e.race) for e in self.entries)
        return max((f for f in floors if f is not None), default=None)

    @property
    def verdict(self) -> str | None:
        """The verdict on the estimate, within its band."""
        if self.estimate is None:
            return None
        width = stats.band(self.floor or 0.0, self.estimate.spread)
        return stats.verdict(self.estimate.lo, self.estimate.hi, width)

    def mean(self, name: str) -> float:
        """The mean over the races of one of an entry's numbers."""
        return float(np.mean([float(getattr(e, name)) for e in self.entries]))

    def sol(self, seconds: float) -> float | None:
        """The share of the GPU's fixed rates, of arithmetic or memory, whichever the case needs longer."""
        entry = self.entries[-1]
        if entry.gpu not in PEAKS or not math.isfinite(seconds):
            return None
        flops, width = PEAKS[entry.gpu]
        return max(entry.flops / flops, entry.bytes / width) / seconds
