"""What a run spent and what stopped it: tallies while it goes on, a ledger and a few lines at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dsl_bench.records import Ledger, Record, Spent, Trial, Tuned

#: programs that turn code into machine code; a host compiler that builds a launcher is none
ASSEMBLERS = ("ptxas", "nvcc", "cicc", "nvrtc", "tileiras")


@dataclass
class Tally:
    """One backend's counts, as in :class:`dsl_bench.records.Spent`."""

    pruned: int = 0
    compiled: int = 0
    compile_seconds: float = 0.0
    gpu_seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def tried(self) -> int:
        """How many configs."""
        return len(self._seen)

    def book(self, trial: Trial) -> None:
        """Add a trial; timing a config again is not a further one."""
        self.gpu_seconds += trial.seconds
        self._seen.add((trial.case.name, trial.kernel, *sorted(trial.config.items())))
        if trial.status != "ok":
            self.failures[trial.status] += 1


class Purse:
    """Tallies by backend, and how many searches ended by which bound."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self.bounds: Counter[str] = Counter()

    def of(self, backend: str) -> Tally:
        """The tally of a backend."""
        return self.tallies.setdefault(backend, Tally())

    def spent(self) -> dict[str, Spent]:
        """As it goes into a record."""
        return {
            name: Spent(t.tried, t.pruned, t.compiled, t.compile_seconds, t.gpu_seconds, dict(t.failures))
            for name, t in sorted(self.tallies.items())
        }


def lines(found: Iterable[Record]) -> list[str]:
    """The end of a run in words, from its records: who spent what, which bound ended it, whether the device
    worker compiled anything. Empty where nothing was searched."""
    records = list(found)
    ledger = next((r for r in reversed(records) if isinstance(r, Ledger)), None)
    if ledger is None or not any(s.tried for s in ledger.spent.values()):
        return []
    rows = [_spent_line(name, s) for name, s in ledger.spent.items() if s.tried or s.pruned]
    if ledger.bounds:
        ended = ", ".join(f"{count} by {bound}" for bound, count in sorted(ledger.bounds.items()))
        rows.append(f"searches ended: {ended}")
    rows.append(_artifact_line(ledger))
    rows += [f"{r.contender} on {r.case.name}: {r.revisits}" for r in _revisited(records)]
    return rows


def _revisited(records: Iterable[Record]) -> list[Tuned]:
    return [r for r in records if isinstance(r, Tuned) and r.revisits]


def _spent_line(name: str, spent: Spent) -> str:
    failed = sum(spent.failures.values())
    why = f" ({_counts(spent.failures)})" if failed else ""
    return (
        f"{name}: {spent.tried} configs tried, {failed} failed{why}, {spent.pruned} pruned; "
        f"{spent.compiled} compiled in {spent.compile_seconds:.1f} s of CPU, {spent.gpu_seconds:.1f} s of GPU"
    )


def _artifact_line(ledger: Ledger) -> str:
    asked = ledger.hits + ledger.misses + ledger.cached
    rate = f"{(ledger.hits + ledger.cached) / asked:.0%}" if asked else "none"
    found = {n: c for n, c in ledger.device_started.items() if n.startswith(ASSEMBLERS)}
    verdict = f"ran {_counts(found)} itself" if found else "compiled none itself"
    return (
        f"artifacts: {asked} asked for, {ledger.misses} compiled, {rate} found; "
        f"the device worker loaded {ledger.loaded} and {verdict}"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
