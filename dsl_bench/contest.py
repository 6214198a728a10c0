"""Who competes on which case with what: contenders, their candidates, and what earlier records settle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsl_bench.catalog import Catalog
from dsl_bench.jobs import Included, Planned
from dsl_bench.records import CaseRef, Choice, ConfigDict, Race, Record, Regime, Skip, Tuned
from dsl_bench.session import Session
from dsl_bench.strategies import Point

Slot = tuple[str, str]


@dataclass(frozen=True)
class Contender:
    """Who competes for one place in a race: a language with all its kernels, or one vendor kernel."""

    name: str
    backend: str
    role: str
    kernels: tuple[str, ...] = ()


@dataclass
class Memory:
    """What earlier records already settle."""

    tuned: dict[Slot, Tuned] = field(default_factory=dict)
    raced: set[tuple[str, Regime, str]] = field(default_factory=set)

    @staticmethod
    def of(records: Iterable[Record], catalog: Catalog, gpu: str, resumed: Iterable[Record] = ()) -> Memory:
        """Winners whose kernels are unchanged and whose GPU is this one; races of the resumed run."""
        hashes = catalog.hashes()
        memory = Memory()
        for record in (*records, *resumed):
            if isinstance(record, Tuned) and record.near and record.gpu == gpu:
                head = record.near[0]
                if hashes.get(head.kernel) == head.kernel_hash:
                    memory.tuned[record.case.name, record.contender] = record
        for record in resumed:
            if isinstance(record, Race):
                memory.raced.add((record.case.name, record.regime, record.process))
        return memory


def contenders(
    catalog: Catalog, workload: str, backends: Sequence[str] = (), kernels: Sequence[str] = ()
) -> list[Contender]:
    """The languages asked for (all by default) and every vendor baseline of the workload."""
    _, info = catalog.workload(workload)
    chosen = backends or [n for n, (_, b) in catalog.backends().items() if b.role == "language"]
    rows = []
    for name in chosen:
        _, backend = catalog.backend(name)
        if backend.role == "language":
            mine = tuple(k for k in kernels if k.startswith(f"{name}/"))
            rows.append(Contender(name, name, "language", mine))
    for kernel in info.baselines:
        rows.append(Contender(kernel, kernel.partition("/")[0], "vendor", (kernel,)))
    return rows


class Contest:
    """The plans of every contender on every case of one workload."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._plans: dict[Slot, list[Planned]] = {}

    def prepare(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], limit: int, memory: Memory
    ) -> list[Contender]:
        """Plan every contender's cases, the winners in ``memory`` included. Returns those whose backend can
        run here; the others are recorded as skipped."""
        known = [
            Included(choice.kernel, case, choice.config)
            for (case, _), tuned in memory.tuned.items()
            for choice in tuned.near
        ]
        able = [r for r in rivals if self._able(r, cases)]
        backends = sorted({r.backend for r in able})
        with ThreadPoolExecutor(max_workers=4) as threads:
            planned = list(threads.map(lambda b: self.session.plan(b, cases, limit, (), known), backends))
        for rows in planned:
            for row in rows:
                for rival in able:
                    if row.kernel.startswith(f"{rival.backend}/") and (
                        not rival.kernels or row.kernel in rival.kernels
                    ):
                        self._plans.setdefault((row.case.name, rival.name), []).append(row)
        return able

    def _able(self, rival: Contender, cases: Sequence[CaseRef]) -> bool:
        backends = self.session.catalog.backends()
        if rival.backend not in backends:
            failed = [d for d in self.session.catalog.failed if d.origin.name == rival.backend]
            reason, hint = (failed[0].reason, "") if failed else ("no such backend is installed", "")
        else:
            info = backends[rival.backend][1]
            target = info.targets["device"]
            if target.ready and not info.problems:
                return True
            reason, hint = target.reason or "; ".join(info.problems), target.hint
        status = "baseline_missing" if rival.role == "vendor" else "unavailable"
        for case in cases:
            kernel = rival.name if rival.role == "vendor" else ""
            self.session.sink.write(
                Skip(
                    self.session.run_id, case.workload, case.name, rival.backend, kernel, status, reason, hint
                )
            )
        return False

    def points(self, case: CaseRef, rival: Contender) -> list[Point]:
        """Every candidate of a contender on a case."""
        plans = self._plans.get((case.name, rival.name), [])
        return [Point(p.kernel, c) for p in plans for c in p.candidates]

    def refuse(self, case: CaseRef, rival: Contender) -> None:
        """Record that a contender has nothing to offer on a case, with its kernels' reasons."""
        plans = self._plans.get((case.name, rival.name), [])
        reason = "; ".join(sorted({f"{p.kernel}: {p.reason}" for p in plans if p.reason}))
        kernel = plans[0].kernel if len(plans) == 1 else ""
        self.session.sink.write(
            Skip(
                self.session.run_id,
                case.workload,
                case.name,
                rival.backend,
                kernel,
                "invalid_config",
                reason or "no kernel of this backend does this workload",
            )
        )

    def choice(self, point: Point, median: float = 0.0) -> Choice:
        """A point as it goes into records."""
        kernel_hash = self.session.catalog.hashes()[point.kernel]
        return Choice(point.kernel, kernel_hash, point.candidate.config, point.candidate.key, median)

    def pruned(self, case: CaseRef, rival: Contender) -> int:
        """How many configs the kernels themselves refused."""
        return sum(sum(p.pruned.values()) for p in self._plans.get((case.name, rival.name), []))

    def point_of(self, case: CaseRef, rival: Contender, choice: Choice) -> Point | None:
        """The candidate behind a recorded choice; None where it is no candidate any more."""
        wanted = _config_text(choice.config)
        for point in self.points(case, rival):
            if point.kernel == choice.kernel and _config_text(point.candidate.config) == wanted:
                return point
        return None


def _config_text(config: ConfigDict) -> str:
    return json.dumps(config, sort_keys=True)
