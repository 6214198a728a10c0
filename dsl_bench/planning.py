"""Which configs can do a case, in what order, and why the others cannot. Runs in a describe worker."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dsl_bench import costmodel, jobs, pruning, registry
from dsl_bench.artifacts import from_ref
from dsl_bench.kernel import Config, Kernel
from dsl_bench.records import CaseRef
from dsl_bench.workload import Case, Workload

#: reasons that one kernel and case keep apart; a reason with numbers in it can have thousands of forms
MOST_REASONS = 400
MORE_REASONS = "other reasons"


@dataclass
class _Refusals:
    """Reasons with their counts, and for every point of the space the number of its reason."""

    counts: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    by_config: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, why: str) -> None:
        """Config ``name`` is refused because of ``why``."""
        if why not in self.numbers and len(self.numbers) >= MOST_REASONS:
            why = MORE_REASONS
        number = self.numbers.setdefault(why, len(self.numbers) + 1)
        self.counts[why] = self.counts.get(why, 0) + 1
        self.by_config[name] = number

    def codes(self, kernel: Kernel) -> str:
        """The numbers in the order of the kernel's space, packed."""
        if not self.counts:
            return ""
        return pruning.pack([self.by_config.get(_name(config), 0) for config in kernel.configs()])


def _name(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def plan_case(
    kernel: Kernel, source: str, ref: CaseRef, toolchain: str, job: jobs.PlanJob, workload: Workload | None
) -> jobs.Planned:
    """One kernel on one case: default first, then seeds, then the rest of the space."""
    reason = registry.unmet(kernel.needs, job.arch)
    if reason:
        return jobs.Planned(kernel.id, ref, [], reason)
    case = from_ref(ref)
    guess = _guesser(kernel, case, workload)
    candidates: dict[str, jobs.Candidate] = {}
    refusals = _Refusals()
    for rank, config in _ranked(kernel, case, job):
        if rank == 2 and 0 <= job.limit <= len(candidates):
            break
        name = _name(config)
        if name in candidates or name in refusals.by_config:
            continue
        why = kernel.valid(case, config)
        if why is not None:
            refusals.add(name, why)
            if job.prune:
                continue
        made = _candidate(kernel, source, case, config, toolchain, job)
        if made is not None:
            rank = rank if why is None else 3
            estimate = guess(config, made.static) if why is None else 0.0
            candidates[name] = jobs.Candidate(config, made.key, made.static, rank, estimate, why or "")
    counts = refusals.counts
    reason = "" if candidates else max(counts, key=lambda k: counts[k], default="the space is empty")
    return jobs.Planned(
        kernel.id, ref, list(candidates.values()), reason, counts, codes=refusals.codes(kernel)
    )


def _candidate(
    kernel: Kernel, source: str, case: Case, config: dict[str, Any], toolchain: str, job: jobs.PlanJob
) -> jobs.Candidate | None:
    """The candidate with its artifact's key; None for a refused one that cannot even be specialised."""
    try:
        static = dict(kernel.static(case, config))
    except Exception:
        if job.prune:
            raise
        return None
    text = json.dumps(static, sort_keys=True).encode()
    return jobs.Candidate(config, registry.artifact_key(source, text, toolchain, job.arch), static)


def _guesser(
    kernel: Kernel, case: Case, workload: Workload | None
) -> Callable[[dict[str, Any], dict[str, Any]], float]:
    """(config, static) → estimated µs, 0 where nothing is known."""
    own = kernel.cost
    if own is not None:
        return lambda config, static: float(own(case, config))
    if workload is None:
        return lambda config, static: 0.0
    try:
        shapes = [s.shape for s in workload.specs(case) if s.role == "output"]
        work = costmodel.Work(workload.flops(case), workload.bytes(case), costmodel.shape_of(shapes))
    except NotImplementedError:  # a workload that does not say what it costs
        return lambda config, static: 0.0
    return lambda config, static: costmodel.estimate(work, {**static, **config})


def _of_space(kernel: Kernel, source: str, config: Config) -> dict[str, Any]:
    """``config`` as a dict; ValueError where it does not give what the space names."""
    if set(config) != set(kernel.space):
        given, wanted = (" ".join(sorted(names)) or "nothing" for names in (config, kernel.space))
        raise ValueError(f"{source}(case) gives {given}; the space has {wanted}")
    return dict(config)


def _ranked(kernel: Kernel, case: Case, job: jobs.PlanJob) -> Iterator[tuple[int, dict[str, Any]]]:
    yield 0, _of_space(kernel, "default", kernel.default(case))
    for config in kernel.seeds(case):
        yield 1, _of_space(kernel, "seeds", config)
    for wanted in job.include:
        if (wanted.kernel, wanted.case) == (kernel.id, case.name):
            yield 1, dict(wanted.config)
    if job.limit:
        rest = list(kernel.configs())
        if job.limit > 0:
            random.Random(job.seed).shuffle(rest)
        for config in rest:
            yield 2, config
