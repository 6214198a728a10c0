"""The workload contract: what is computed, on which cases, and what counts as its cost.

A workload owns its cases, its tensors, its float64 reference and its FLOPs and bytes. It owns no
tolerance (:mod:`dsl_bench.check` does) and no ratio (:mod:`dsl_bench.report` does). A workload module
may be imported without torch: torch is imported inside the methods that touch tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dsl_bench.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Param = int | str
DTYPES = ("bf16", "fp16")
DATA_KINDS = ("normal", "uniform", "zeros", "outliers")


@dataclass(frozen=True)
class Case:
    """One size of a workload.

    ``name`` is stable and unique within the workload (``4096x4096x4096-bf16``); ``params`` holds plain
    integers and strings; ``groups`` are the named selections the case belongs to.
    """

    workload: str
    name: str
    params: Mapping[str, Param]
    dtype: str
    groups: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> int:
        """The integer parameter ``key``."""
        return int(self.params[key])


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a case: ``role`` is ``value`` (redrawn by the harness), ``index`` (lengths, page
    tables: fixed, visible to ``bind``) or ``output`` (poisoned with NaN, then filled by the kernel).
    ``dtype`` is ``bf16``, ``fp16``, ``fp32`` or ``int32``; the layout is contiguous, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Literal["value", "index", "output"]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        size = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4}[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Bound:
    """The accuracy a workload's outputs are held to.

    ``rms`` is the greatest RMS error as a multiple of the RMS error of the yardstick, ``worst`` the
    greatest single error as a multiple of the yardstick's worst. The yardstick is either
    ``rounding`` (the float64 reference rounded to the output type) or ``vendor``: a sound algorithm in low
    precision (:meth:`Workload.yardstick`) and, in a race, the fastest vendor kernel.
    """

    yardstick: Literal["rounding", "vendor"] = "rounding"
    rms: float = 1.1
    worst: float = 4.0


class Workload:
    """Base class of all workloads. Subclasses set ``name`` and ``baselines`` and fill in the methods."""

    name: str = ""
    #: kernel ids of the vendor baselines; the first is what users get by default
    baselines: tuple[str, ...] = ()
    #: the parameters a user may give, in the order in which a case is named
    param_names: tuple[str, ...] = ()
    #: unit of throughput shown for this workload
    metric: Literal["tflops", "gbps"] = "tflops"

    #: what outputs are held to
    bound: Bound = Bound()

    def cases(self) -> Sequence[Case]:
        """All named cases, each with its groups."""
        raise NotImplementedError(f"{type(self).__name__} does not define cases()")

    def parse_case(self, given: Mapping[str, str]) -> Case:
        """A case from the user's own sizes (``{"m": "4096", …, "dtype": "bf16"}``); raises UsageError."""
        raise NotImplementedError(f"{type(self).__name__} does not define parse_case()")

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        """Every tensor of the case, in the order in which kernels name them."""
        raise NotImplementedError(f"{type(self).__name__} does not define specs()")

    def index(self, case: Case, rng: np.random.Generator) -> dict[str, Any]:
        """Values (numpy int32 arrays) of the index tensors. None by default."""
        return {}

    def reference(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float64 outputs computed from the rounded inputs, on the inputs' device, chunked where large."""
        raise NotImplementedError(f"{type(self).__name__} does not define reference()")

    def yardstick(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Outputs of a sound algorithm in the case's own precision, for a ``bound`` of kind ``vendor``: the
        measure where no vendor kernel is at hand. None by default: errors are then measured, not judged."""
        return None

    def flops(self, case: Case) -> float:
        """Floating-point operations that the case must do."""
        raise NotImplementedError(f"{type(self).__name__} does not define flops()")

    def bytes(self, case: Case) -> float:
        """Fewest bytes that must cross device memory: each input once, each output once."""
        raise NotImplementedError(f"{type(self).__name__} does not define bytes()")


def positive_int(workload: str, key: str, text: str) -> int:
    """``text`` as an integer of at least 1, or a UsageError that names the parameter."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(f"{workload}: {key}={text!r} is not a positive integer")
    return value


def int_list(text: str) -> tuple[int, ...]:
    """``512*16+8192`` as a tuple of integers, each at least 0; ValueError tells what is wrong."""
    numbers: list[int] = []
    for part in text.split("+"):
        value, star, count = (piece.strip() for piece in part.partition("*"))
        if not value.isdecimal() or (star and not count.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a length nor length*count")
        numbers += [int(value)] * (int(count) if star else 1)
    return tuple(numbers)
