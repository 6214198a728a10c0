"""Who competes on which case with what: contenders, their candidates, and what earlier records settle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsl_bench.catalog import Catalog
from dsl_bench.jobs import Included, Planned
from dsl_bench.records import (
    CaseRef,
    Choice,
    Compiled,
    Pruned,
    PrunedKernel,
    Race,
    Record,
    Regime,
    RunHeader,
    Skip,
    Trial,
    Tuned,
)
from dsl_bench.session import Session
from dsl_bench.strategies import Label, Point, config_text

Slot = tuple[str, str]


@dataclass(frozen=True)
class Contender:
    """Who competes for one place in a race: a language with all its kernels, or one vendor kernel."""

    name: str
    backend: str
    role: str
    kernels: tuple[str, ...] = ()


TrialKey = tuple[str, str, str, str, float]


@dataclass
class Memory:
    """What earlier records already settle. ``stale`` holds winners that were found under other conditions,
    each with what differs; ``trials`` those of the resumed run."""

    tuned: dict[Slot, Tuned] = field(default_factory=dict)
    stale: dict[Slot, tuple[Tuned, str]] = field(default_factory=dict)
    raced: set[tuple[str, Regime, str]] = field(default_factory=set)
    trials: dict[TrialKey, Trial] = field(default_factory=dict)
    pruned: set[Slot] = field(default_factory=set)

    @staticmethod
    def of(
        records: Iterable[Record],
        catalog: Catalog,
        gpu: str,
        resumed: Iterable[Record] = (),
        driver: str = "",
    ) -> Memory:
        """Winners that still hold here (of several the latest search's, in whatever order they are read), and
        those that need another look; the resumed run's races and trials."""
        known, earlier = list(records), list(resumed)
        past = _Past([*known, *earlier], catalog, gpu, driver)
        memory = Memory()
        searches = [r for r in known if isinstance(r, Tuned)] + [r for r in earlier if isinstance(r, Tuned)]
        for tuned in sorted(searches, key=past.started):
            if tuned.near:
                slot = (tuned.case.name, tuned.contender)
                differs = past.differences(tuned)
                if not differs:
                    memory.tuned[slot] = tuned
                elif past.better(tuned, memory.stale.get(slot)):
                    memory.stale[slot] = (tuned, "; ".join(differs))
        for record in earlier:
            if isinstance(record, Race):
                memory.raced.add((record.case.name, record.regime, record.process))
            elif isinstance(record, Trial) and past.holds(record):
                memory.trials[trial_key(record)] = record
            elif isinstance(record, Pruned):
                memory.pruned.add((record.case.name, record.contender))
        memory.stale = {slot: held for slot, held in memory.stale.items() if slot not in memory.tuned}
        return memory

    def known(self) -> list[Included]:
        """The configs of every recorded winner and near-tie, to be planned whatever else is."""
        held = [*self.tuned.values(), *(tuned for tuned, _ in self.stale.values())]
        return [Included(c.kernel, t.case.name, c.config) for t in held for c in t.near]


def trial_key(trial: Trial) -> TrialKey:
    """What makes a trial the same one in a resumed run."""
    text = config_text(trial.config)
    return trial.case.name, trial.kernel, trial.key or trial.kernel_hash, text, round(trial.effort, 6)


class _Past:
    """Tells under which conditions records were made, and how those differ from the ones here."""

    def __init__(self, found: Sequence[Record], catalog: Catalog, gpu: str, driver: str) -> None:
        self._hashes = catalog.hashes()
        self._toolchains = {name: info.toolchain for name, (_, info) in catalog.backends().items()}
        self._gpu, self._driver = gpu, driver
        headers = [r for r in found if isinstance(r, RunHeader)]
        self._drivers = {h.run_id: str(h.environment.get("driver", "")) for h in headers}
        self._gpus = {h.run_id: str(h.environment.get("gpu", "")) for h in headers}
        self._started = {h.run_id: h.started for h in headers}
        self._built = {r.key: r.toolchain for r in found if isinstance(r, Compiled) and r.toolchain}

    def started(self, tuned: Tuned) -> str:
        """When the run of a search began, as text that sorts; empty where nobody wrote it down."""
        return self._started.get(tuned.run_id, "")

    def differences(self, tuned: Tuned) -> list[str]:
        """What is not as it was when the winner was found, a line each. What nobody wrote down is not a
        difference."""
        head = tuned.near[0]
        backend = head.kernel.partition("/")[0]
        pairs = [
            ("GPU", tuned.gpu, self._gpu),
            ("driver", tuned.driver or self._drivers.get(tuned.run_id, ""), self._driver),
            (
                "toolchain",
                tuned.toolchain or self._built.get(head.key, ""),
                self._toolchains.get(backend, ""),
            ),
        ]
        found = [f"{what} {then}, here {now}" for what, then, now in pairs if then and now and then != now]
        source = self._hashes.get(head.kernel)
        if source is None:
            found.append(f"{head.kernel} is not installed here")
        elif source != head.kernel_hash:
            found.append(f"source of {head.kernel} {head.kernel_hash}, here {source}")
        return found

    def better(self, tuned: Tuned, held: tuple[Tuned, str] | None) -> bool:
        """Whether a stale winner is the one to look at again: of this GPU rather than another, then the
        later one."""
        return held is None or tuned.gpu == self._gpu or held[0].gpu != self._gpu

    def holds(self, trial: Trial) -> bool:
        """Whether a trial of the resumed run need not be done again. What a hang or a death did to a config
        stands; a trial cut short by the end of the run was never written."""
        where = self._gpus.get(trial.run_id, self._gpu)
        return self._hashes.get(trial.kernel) == trial.kernel_hash and where == self._gpu


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
        self._points: dict[Slot, dict[Label, Point]] = {}

    def prepare(
        self, cases: Sequence[CaseRef], rivals: Sequence[Contender], limit: int, memory: Memory
    ) -> list[Contender]:
        """Plan every contender's cases, the winners in ``memory`` included. Returns those whose backend can
        run here; the others are recorded as skipped."""
        known = memory.known()
        able = [r for r in rivals if self._able(r, cases)]
        backends = sorted({r.backend for r in able})
        searched = [r for r in able if any((c.name, r.name) not in memory.tuned for c in cases)]
        self.session.preload(sorted({r.backend for r in searched}))
        with ThreadPoolExecutor(max_workers=4) as threads:
            try:
                planned = list(threads.map(lambda b: self.session.plan(b, cases, limit, (), known), backends))
            except BaseException:
                self.session.stop.set()  # or Ctrl-C would wait for a plan that hangs
                raise
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
            if target.ready and (info.kernels or not info.problems):
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
        return list(self._table(case, rival).values())

    def _table(self, case: CaseRef, rival: Contender) -> dict[Label, Point]:
        slot = (case.name, rival.name)
        if slot not in self._points:
            made = [Point(p.kernel, c) for p in self._plans.get(slot, []) for c in p.candidates]
            self._points[slot] = {p.label: p for p in made}
        return self._points[slot]

    def refuse(self, case: CaseRef, rival: Contender) -> None:
        """Record that a contender has nothing to offer on a case, with its kernels' reasons."""
        plans = self._plans.get((case.name, rival.name), [])
        if any(p.fault for p in plans):
            return  # recorded as a failure when it was planned
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

    def record_pruned(self, case: CaseRef, rival: Contender) -> None:
        """One record of all that the kernels refused on a case, if anything."""
        known = self.session.catalog.kernels()
        kernels = [
            PrunedKernel(
                p.kernel,
                known[p.kernel].hash,
                known[p.kernel].space,
                list(p.pruned),
                list(p.pruned.values()),
                p.codes,
            )
            for p in self._plans.get((case.name, rival.name), [])
            if p.pruned and p.kernel in known
        ]
        if kernels:
            self.session.sink.write(Pruned(self.session.run_id, case, rival.name, kernels))

    def point_of(self, case: CaseRef, rival: Contender, choice: Choice) -> Point | None:
        """The candidate behind a recorded choice; None where it is no candidate any more."""
        return self._table(case, rival).get((choice.kernel, config_text(choice.config)))
