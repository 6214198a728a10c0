"""A case on the device: buffer sets, seeded draws, the float64 reference, and calls bound to them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dsl_bench import check, fence
from dsl_bench.jobs import Racer
from dsl_bench.kernel import Call
from dsl_bench.records import Accuracy
from dsl_bench.workload import Case, TensorSpec, Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}
#: buffer sets together cover this many times the L2, so that no call finds its inputs there
L2_TIMES = 4
MAX_SETS = 64
#: the draws of a check's value tensors: bind sees the first, the check and the clock the second
BEFORE_BIND, AFTER_BIND, AFTER_RACE = 1, 2, 3

Key = TypeVar("Key")
Held = TypeVar("Held")


def sets_needed(workload: Workload, case: Case, device: torch.device) -> int:
    """How many buffer sets keep the L2 cold in turn; one on a CPU."""
    if device.type != "cuda":
        return 1
    l2 = int(torch.cuda.get_device_properties(device).L2_cache_size)
    each = sum(s.nbytes for s in workload.specs(case))
    return max(2, min(MAX_SETS, -(-L2_TIMES * l2 // max(each, 1))))


@dataclass
class BufferSet:
    """One set of a case's tensors."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    fences: list[fence.Fenced]


class Arena:
    """A case's tensors, several sets of them, and the float64 reference of the first."""

    def __init__(self, workload: Workload, case: Case, device: torch.device, sets: int, seed: int) -> None:
        self.workload = workload
        self.case = case
        self.device = device
        self.seed = seed
        self._specs = workload.specs(case)
        self.sets = [self._allocate() for _ in range(sets)]
        self._references: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self._yardsticks: dict[tuple[int, str], Accuracy | None] = {}

    def _allocate(self) -> BufferSet:
        import numpy as np

        fences = [fence.allocate(s.name, s.shape, DTYPES[s.dtype], self.device) for s in self._specs]
        made = {f.name: f.tensor for f in fences}
        index = self.workload.index(self.case, np.random.default_rng(self.seed))
        for name, values in index.items():
            made[name].copy_(torch.from_numpy(values))
        outputs = {s.name: made.pop(s.name) for s in self._specs if s.role == "output"}
        return BufferSet(made, outputs, fences)

    def fences(self) -> list[fence.Fenced]:
        """Those of all buffer sets."""
        return [f for s in self.sets for f in s.fences]

    def _values(self) -> Iterator[tuple[int, TensorSpec]]:
        return ((i, s) for i, s in enumerate(self._specs) if s.role == "value")

    def draw(self, version: int, data: str, first_only: bool = False) -> None:
        """Fill the value tensors in place. Set 0 depends on seed, version and data alone."""
        for number, buffers in enumerate(self.sets[:1] if first_only else self.sets):
            generator = torch.Generator(self.device)
            generator.manual_seed((self.seed * 8 + version) * 2 * MAX_SETS + number)
            for _, spec in self._values():
                # through .data, which does not count as a change: nothing shows a kernel that it should look
                check.draw(buffers.inputs[spec.name].data, data, generator)

    def reference(self, version: int, data: str) -> dict[str, torch.Tensor]:
        """Float64 outputs for set 0 as it was drawn last with ``version`` and ``data`` (which must be so)."""
        key = (version, data)
        if key not in self._references:
            made = self.workload.reference(self.case, self.sets[0].inputs)
            self._references = {**_last(self._references), key: made}
        return self._references[key]

    def yardstick(self, version: int, data: str) -> Accuracy | None:
        """The accuracy of the workload's sound low-precision algorithm on the same values; None where outputs
        are held to rounding, or the workload has no such algorithm."""
        if self.workload.bound.yardstick == "rounding":
            return None
        key = (version, data)
        if key not in self._yardsticks:
            reference, inputs = self.reference(version, data), self.sets[0].inputs
            sound = self.workload.yardstick(self.case, inputs)
            made = check.measure(reference, sound, data) if sound is not None else None
            self._yardsticks = {**_last(self._yardsticks), key: made}
        return self._yardsticks[key]


def _last(held: dict[Key, Held]) -> dict[Key, Held]:
    """The newest entry alone: with the next one, the checks before and after the clock each find theirs."""
    return dict(list(held.items())[-1:])


@dataclass
class Bound:
    """A racer whose calls are bound to every buffer set of an arena."""

    racer: Racer
    calls: list[Call]
    index: int

    def runs(self) -> list[Callable[[], object]]:
        """What is timed."""
        return [c.run for c in self.calls]


@dataclass
class Stopwatch:
    """Seconds by activity: what ``make bench-harness`` reads."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to ``name``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
