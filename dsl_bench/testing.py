"""The conformance kit: what the author of a plugin runs, as classes of pytest tests to inherit from.

    from dsl_bench.testing import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"                 # as the entry point names it …
        plugins = ("mine.py",)           # … or in a file

Everything goes the way a user's run goes: through worker processes, on the targets this machine has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dsl_bench import api, catalog, conformance, jobs, registry
from dsl_bench.catalog import Catalog
from dsl_bench.records import Compiled, Failure, Interpreted, Record, Skip, Trial
from dsl_bench.session import DEVICE_SECONDS, Settings
from dsl_bench.workload import Workload

__all__ = ["BackendConformance", "KernelConformance", "WorkloadConformance"]


@cache
def _load(plugins: tuple[str, ...]) -> Catalog:
    return catalog.load(plugins)


@cache
def _smoke(
    backend: str, kernels: tuple[str, ...], plugins: tuple[str, ...], target: Any, deadline: float
) -> list[Record]:
    """The records of a run of the smoke cases, in a folder that does not outlive it."""
    with tempfile.TemporaryDirectory() as folder:
        request = api.Request(
            groups=("smoke",),
            backends=(backend,),
            kernels=kernels,
            plugins=plugins,
            target=target,
            out=Path(folder) / "smoke.jsonl",
            race=False,
            settings=Settings(trials=4, trial_seconds=0.001, deadline=deadline),
        )
        return api.run(request, catalog=_load(plugins)).records


def _broken(records: Sequence[Record]) -> list[str]:
    """What went wrong, a line each."""
    wrong = [f"{r.where}: {r.status}: {r.reason}" for r in records if isinstance(r, Failure)]
    wrong += [
        f"{r.kernel}: {r.status}: {r.reason}"
        for r in records
        if isinstance(r, Compiled | Interpreted | Trial) and r.status not in ("ok", "unavailable")
    ]
    return wrong


class _Plugins:
    #: files to load as well; installed plugins are found by themselves
    plugins: Sequence[str] = ()

    def catalog(self) -> Catalog:
        """What is installed, with the plugins' files."""
        return _load(tuple(self.plugins))


class _Smoke(_Plugins):
    """A smoke run on every target that the backend is ready for."""

    backend: str = ""
    kernels: Sequence[str] = ()
    #: the longest silence of the device worker, s: more for a language that compiles when it binds
    deadline: float = DEVICE_SECONDS

    def _name(self) -> str:
        return self.backend or self.kernels[0].partition("/")[0]

    def _ready(self) -> list[str]:
        return [name for name, t in self.catalog().backend(self._name())[1].targets.items() if t.ready]

    def test_a_smoke_case_holds_on_every_target_that_is_ready(self) -> None:
        """Compiled, interpreted or run on the device, checked against float64: nothing fails, and something
        holds."""
        for target in self._ready():
            found = _smoke(self._name(), tuple(self.kernels), tuple(self.plugins), target, self.deadline)
            assert _broken(found) == []
            kind: Any = {"compile": Compiled, "interpret": Interpreted, "device": Trial}[target]
            held = [r for r in found if isinstance(r, kind) and r.status == "ok"]
            refused = [r for r in found if isinstance(r, Skip)]
            assert held or refused, f"{target}: neither a result nor a refusal"
            if target == "compile":
                self._facts(held)

    def _facts(self, held: Sequence[Compiled]) -> None:
        for record in held:
            facts = record.facts
            assert record.toolchain, f"{record.kernel}: no toolchain is recorded"
            assert facts is None or facts.registers != 0, f"{record.kernel}: a cubin without registers"


class BackendConformance(_Smoke):
    """Inherit, and set ``backend``, and ``plugins`` where it is a file."""

    def test_it_is_found_and_loads(self) -> None:
        """One state, ready, and nothing else of this name."""
        origin, info = self.catalog().backend(self.backend)
        assert info.name == self.backend and origin.kind in ("backend", "file")
        assert info.role in ("language", "vendor")
        assert info.problems == []

    def test_probe_is_honest(self) -> None:
        """Every target is ready, or says why not."""
        _, info = self.catalog().backend(self.backend)
        assert set(info.targets) == {"device", "interpret", "compile"}
        for name, target in info.targets.items():
            assert target.ready or target.reason, f"{name} is not ready and gives no reason"

    def test_kernels_are_its_own_and_their_spaces_enumerate(self) -> None:
        """Ids begin with the backend's name, workloads exist, every axis has values and none twice."""
        found = self.catalog()
        for kernel in found.backend(self.backend)[1].kernels:
            assert kernel.id.startswith(f"{self.backend}/")
            assert kernel.workload in found.workloads(), f"{kernel.id}: no workload {kernel.workload}"
            for axis, values in kernel.space.items():
                assert values and len(values) == len({repr(v) for v in values}), f"{kernel.id}: axis {axis}"

    def test_versions_are_told(self) -> None:
        """A result without a version is worth nothing."""
        _, info = self.catalog().backend(self.backend)
        assert info.versions if info.kernels else True


class KernelConformance(_Smoke):
    """Inherit, and set ``kernels`` (ids), and ``plugins`` where they are in a file."""

    def test_it_is_found(self) -> None:
        """The ids are there, under a backend that exists."""
        known = self.catalog().kernels()
        for name in self.kernels:
            assert name in known, f"no kernel {name}; there are {', '.join(sorted(known))}"


class WorkloadConformance(_Plugins):
    """Inherit, and set ``workload``, and ``plugins`` where it is in a file. Needs torch."""

    workload: str = ""

    def _loaded(self) -> Workload:
        origin, _ = self.catalog().workload(self.workload)
        return registry.Shelf().workload(jobs.Origin(origin.kind, origin.name, origin.value, origin.dist))

    def test_cases_are_named_once_and_grouped(self) -> None:
        """Names are unique, dtypes known, and there is a smoke case for interpreters."""
        assert conformance.naming_faults(self._loaded()) == []

    def test_work_is_counted(self) -> None:
        """FLOPs and bytes are positive numbers."""
        loaded = self._loaded()
        assert {c.name: f for c in loaded.cases() if (f := conformance.work_faults(loaded, c))} == {}

    def test_the_reference_fills_every_output_in_float64(self) -> None:
        """On the smoke cases: shapes as the specs say, finite, float64."""
        loaded = self._loaded()
        smoke = conformance.smoke_cases(loaded)
        assert {c.name: f for c in smoke if (f := conformance.reference_faults(loaded, c))} == {}

    def test_baselines_name_a_backend(self) -> None:
        """``<backend>/<name>``, so that a missing one can be named with its backend."""
        assert all("/" in name for name in self._loaded().baselines)
