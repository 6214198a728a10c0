"""Outputs against the float64 reference: poison, drawing of inputs, fingerprints, tolerance, verdict.

Works on torch tensors of any device. torch is imported inside the functions, so that importing this module
costs nothing.

Why the bounds hold a correct kernel. A kernel that accumulates in float32 computes ``ref + d`` with a tiny
``d`` and rounds once, so its error at an element is at most that of rounding the reference there plus
``2 |d|``: its RMS and its worst error are those of rounding alone, up to the float32 slack below. Partial
sums or accumulators in the output type add a second rounding error of the same size: 1.4x and more in RMS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dsl_bench.errors import DslBenchError, KernelFault, UsageError
from dsl_bench.records import Accuracy
from dsl_bench.workload import DATA_KINDS, Bound, Case, Workload

#: elements looked at in one go: 128 MiB of float64
CHUNK = 1 << 24
#: float32 accumulation's share of a single error, relative to the RMS of the reference
SLACK_WORST = 2.0**-11
#: the same in the RMS over a row or a column, and over everything
SLACK_LINE = 2.0**-14
SLACK_RMS = 2.0**-18
#: RMS error of any one row or column, as a multiple of that of rounding it (yardstick ``rounding`` only):
#: what is wrong in a few rows of small numbers does not show in the RMS over everything
LINE = 1.5

#: quiet NaNs whose payload no arithmetic produces (a GPU's own NaN is 0x7fff or 0x7fffffff)
_POISON = {2: {"bfloat16": 0x7FEB, "float16": 0x7F2B}, 4: {"float32": 0x7FC0BEEF}}
_INT_POISON = -0x5EED0BAD

#: outliers: each row's numbers are scaled by 2**-3 … 2**1, and one number in 4096 by 16 on top; products
#: of two such numbers, summed, stay within float16
_ROW_EXPONENTS = (-3, 1)
_OUTLIER_EVERY, _OUTLIER_FACTOR = 4096, 16.0


def draw(tensor: Any, kind: str, generator: Any) -> None:
    """Fill ``tensor`` in place with seeded values of ``kind`` (one of DATA_KINDS), drawn in its own low
    precision. ``generator`` is a torch.Generator on the tensor's device."""
    if kind not in DATA_KINDS:
        raise UsageError(f"unknown data {kind!r}; known: {', '.join(DATA_KINDS)}")
    if kind == "zeros":
        tensor.zero_()
    elif kind == "uniform":
        tensor.uniform_(-1.0, 1.0, generator=generator)
    else:
        tensor.normal_(generator=generator)
        if kind == "outliers":
            _scale_rows(tensor, generator)


def _scale_rows(tensor: Any, generator: Any) -> None:
    import torch

    lo, hi = _ROW_EXPONENTS
    shape = (*tensor.shape[:-1], 1) if tensor.dim() else ()
    exponents = torch.randint(lo, hi + 1, shape, generator=generator, device=tensor.device)
    tensor.mul_(torch.exp2(exponents.float()).to(tensor.dtype))
    flat = tensor.view(-1)
    count = max(1, flat.numel() // _OUTLIER_EVERY)
    where = torch.randint(flat.numel(), (count,), generator=generator, device=tensor.device)
    flat[where] = flat[where] * _OUTLIER_FACTOR


def _bits(tensor: Any) -> tuple[Any, int]:
    """The tensor's bits as integers of its width, and the poison in that type."""
    width = tensor.element_size()
    if tensor.is_floating_point():
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _POISON.get(width, {}):
            raise DslBenchError(f"outputs of type {name} cannot be checked")
        return _int_view(tensor), _POISON[width][name]
    return _int_view(tensor), _INT_POISON if width >= 4 else 0x5B


def poison(outputs: Mapping[str, Any]) -> None:
    """Fill every output in place with a NaN of our own (integers: an unlikely value)."""
    for tensor in outputs.values():
        bits, value = _bits(tensor)
        bits.fill_(value)


def unwritten(tensor: Any) -> int:
    """How many elements still hold the poison."""
    return int(still_poisoned(tensor))


def still_poisoned(tensor: Any) -> Any:
    """The same as a tensor: counted in its turn on the current stream, without a wait for the device."""
    bits, value = _bits(tensor)
    return (bits == value).sum()


def assert_written(outputs: Sequence[Mapping[str, Any]], what: str) -> None:
    """That every output of every buffer set was written since it was poisoned; KernelFault ``unwritten``.

    The proof that a captured graph holds its kernel: poison the outputs, replay, synchronise, then this."""
    for number, tensors in enumerate(outputs):
        for name, tensor in tensors.items():
            left = unwritten(tensor)
            if left:
                raise KernelFault(
                    "unwritten",
                    f"{what}: {left} of {tensor.numel()} elements of {name} (buffer set {number}) untouched",
                    "capture",
                )


def fingerprint(tensors: Mapping[str, Any]) -> dict[str, int]:
    """An exact checksum of every tensor's bits. Elements are weighted by odd numbers that grow with their
    place, modulo 2**64: any single change and any exchange of two unequal elements shows."""
    import torch

    sums = {}
    for name, tensor in tensors.items():
        flat = _int_view(tensor.contiguous()).view(-1)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        size = min(CHUNK, max(1, flat.numel()))
        weights = torch.arange(1, 2 * size + 1, 2, dtype=torch.int64, device=flat.device)
        for start in range(0, flat.numel(), size):
            part = flat[start : start + size]
            total += (part * weights[: part.numel()]).sum() + 2 * start * part.sum(dtype=torch.int64)
        sums[name] = total
    return {name: int(total) for name, total in sums.items()}


def _int_view(tensor: Any) -> Any:
    """The bits of a tensor as integers of the same width."""
    import torch

    types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(types[tensor.element_size()])


def verify(
    workload: Workload,
    case: Case,
    reference: Mapping[str, Any],
    outputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
    before: Mapping[str, int],
    data: str = "normal",
    *,
    vendor: Accuracy | None = None,
    leeway: float = 1.0,
) -> Accuracy:
    """The accuracy of ``outputs`` (of several, the one with the greatest RMS error), or a KernelFault.

    ``before`` is the fingerprint of ``inputs`` from before the call; another one is taken here. ``vendor`` is
    the accuracy of the yardstick on the same data, needed where that is ``vendor``; without it errors are
    measured and not judged, and ``leeway`` times it is allowed. Statuses: ``mutated_input``,
    ``unwritten``, ``nonfinite``, ``incorrect`` with check ``shape``, ``rms``, ``worst``, ``row`` or
    ``column``. A reference that is not finite in the output's type is a DslBenchError: the workload's fault,
    not the kernel's."""
    _unchanged(before, fingerprint(inputs))
    found: list[Accuracy] = []
    for name, ref in reference.items():
        out = _matching(case, name, ref, outputs)
        errors = _compare(name, ref, out)
        accuracy = errors.accuracy(data)
        what = f"{name} of {case.name} on {data} data"
        _judge(what, errors, accuracy, workload.bound, _scaled(vendor, leeway))
        found.append(accuracy)
    if not found:
        raise DslBenchError(f"{case.workload}: the reference has no outputs")
    return max(found, key=lambda a: a.rms)


def measure(reference: Mapping[str, Any], outputs: Mapping[str, Any], data: str) -> Accuracy:
    """The accuracy of ``outputs`` (of several, the one with the greatest RMS error), not judged."""
    found = [_compare(name, ref, outputs[name]).accuracy(data) for name, ref in reference.items()]
    return max(found, key=lambda a: a.rms)


def hold_to(what: str, got: Accuracy, vendor: Accuracy, bound: Bound) -> None:
    """KernelFault ``incorrect`` where ``got`` is out of ``bound`` of a vendor kernel's accuracy on the same
    data. A vendor more exact than its output type's rounding is no stricter measure than that rounding."""
    pairs = (
        ("rms", got.rms, max(vendor.rms, got.rounding_rms), bound.rms, SLACK_RMS),
        ("worst", got.worst, max(vendor.worst, got.rounding_worst), bound.worst, SLACK_WORST),
    )
    for name, error, yard, times, slack in pairs:
        if not error <= times * yard + slack:
            raise KernelFault(
                "incorrect",
                f"{what} on {got.data} data: {name} error {error:.3g} is {_times(error, yard)} that of the "
                f"fastest vendor kernel; allowed {times:g}x",
                f"vendor_{name}",
            )


def _scaled(accuracy: Accuracy | None, leeway: float) -> Accuracy | None:
    if accuracy is None or leeway == 1.0:
        return accuracy
    return msgspec.structs.replace(accuracy, rms=leeway * accuracy.rms, worst=leeway * accuracy.worst)


def _unchanged(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    changed = sorted(name for name in before if after.get(name) != before[name])
    if changed:
        reason = f"the kernel changed its inputs: {', '.join(changed)}"
        raise KernelFault("mutated_input", reason, "fingerprint")


def _matching(case: Case, name: str, ref: Any, outputs: Mapping[str, Any]) -> Any:
    out = outputs.get(name)
    if out is None:
        raise KernelFault("incorrect", f"{case.name}: there is no output {name}", "shape")
    if tuple(out.shape) != tuple(ref.shape):
        raise KernelFault(
            "incorrect", f"{case.name}: {name} has shape {tuple(out.shape)}, not {tuple(ref.shape)}", "shape"
        )
    return out


@dataclass
class _Errors:
    """Sums over one output. ``row`` and ``column`` are the first line out of bounds (index, error, bound)."""

    count: int
    square: float
    error: float
    worst: float
    worst_at: int
    rounding: float
    rounding_worst: float
    shape: tuple[int, ...]
    row: tuple[int, float, float] | None = None
    column: tuple[int, float, float] | None = None

    @property
    def rms(self) -> float:
        """RMS of the reference."""
        return math.sqrt(self.square / self.count)

    def accuracy(self, data: str) -> Accuracy:
        """Relative to the RMS of the reference (absolute where that is zero)."""
        unit = self.rms or 1.0
        return Accuracy(
            data=data,
            rms=math.sqrt(self.error / self.count) / unit,
            worst=self.worst / unit,
            rounding_rms=math.sqrt(self.rounding / self.count) / unit,
            rounding_worst=self.rounding_worst / unit,
        )


def _compare(name: str, ref: Any, out: Any) -> _Errors:
    """Errors of one output against its reference, by chunks of rows (lines along the last dimension)."""
    import torch

    columns = max(1, ref.shape[-1] if ref.dim() else 1)
    ref2, out2 = ref.reshape(-1, columns), out.contiguous().view(-1, columns)
    rows = ref2.shape[0]
    _all_finite(name, ref2, out2, tuple(ref.shape))

    def zeros(n: int) -> Any:
        return torch.zeros(n, dtype=torch.float64, device=ref.device)

    # per row and per column: squares of the reference, of the errors, of the rounding errors
    by_row = [zeros(rows) for _ in range(3)]
    by_column = [zeros(columns) for _ in range(3)]
    worst = rounding_worst = 0.0
    worst_at = 0
    for start, stop in _spans(rows, columns):
        # a copy, even where the reference is float64 already: what follows works in place
        r = ref2[start:stop].to(torch.float64, copy=True)
        error = (out2[start:stop].double() - r).abs_()
        rounding = (r.to(out.dtype).double() - r).abs_()
        peak = int(error.argmax())
        if float(error.view(-1)[peak]) > worst:
            worst, worst_at = float(error.view(-1)[peak]), start * columns + peak
        rounding_worst = max(rounding_worst, float(rounding.max()))
        for k, values in enumerate((r, error, rounding)):
            values.square_()
            by_row[k][start:stop] = values.sum(dim=1)
            by_column[k] += values.sum(dim=0)
    if not math.isfinite(rounding_worst):
        raise DslBenchError(f"the reference of {name} does not fit into {out.dtype}")
    square, error_sum, rounding_sum = (float(v.sum()) for v in by_row)
    found = _Errors(
        rows * columns, square, error_sum, worst, worst_at, rounding_sum, rounding_worst, tuple(ref.shape)
    )
    found.row = _broken_line(by_row, columns, found.rms)
    found.column = _broken_line(by_column, rows, found.rms)
    return found


def _spans(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _broken_line(squares: Sequence[Any], length: int, rms: float) -> tuple[int, float, float] | None:
    _, error, rounding = ((s / length).sqrt() for s in squares)
    bound = LINE * rounding + SLACK_LINE * rms
    bad = (error > bound).nonzero()
    if not bad.numel():
        return None
    first = int(bad[0, 0])
    return first, float(error[first]), float(bound[first])


def _all_finite(name: str, ref: Any, out: Any, shape: tuple[int, ...]) -> None:
    import torch

    bits, value = _bits(out)
    missing = not_finite = 0
    first_missing = first_bad = -1
    columns = ref.shape[1]
    for start, stop in _spans(*ref.shape):
        if not bool(torch.isfinite(ref[start:stop]).all()):
            raise DslBenchError(f"the reference of {name} is not finite")
        poisoned = bits[start:stop] == value
        bad = ~torch.isfinite(out[start:stop]) & ~poisoned
        for mask, is_poison in ((poisoned, True), (bad, False)):
            count = int(mask.sum())
            if not count:
                continue
            first = start * columns + int(mask.view(-1).to(torch.uint8).argmax())
            if is_poison:
                missing, first_missing = missing + count, first if first_missing < 0 else first_missing
            else:
                not_finite, first_bad = not_finite + count, first if first_bad < 0 else first_bad
    if missing:
        what = f"{missing} of {out.numel()} elements of {name} were never written"
        raise KernelFault("unwritten", f"{what}, first {_coordinate(first_missing, shape)}", "poison")
    if not_finite:
        what = f"{not_finite} of {out.numel()} elements of {name} are NaN or infinite"
        raise KernelFault("nonfinite", f"{what}, first {_coordinate(first_bad, shape)}", "finite")


def _coordinate(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for n in reversed(shape):
        flat, rest = divmod(flat, n)
        place.insert(0, rest)
    return tuple(place)


def _judge(what: str, errors: _Errors, got: Accuracy, bound: Bound, vendor: Accuracy | None) -> None:
    if bound.yardstick == "vendor":
        if vendor is None:
            return
        yard_rms, yard_worst = vendor.rms, vendor.worst
        yard = "that of a sound algorithm in this precision"
    else:
        yard_rms, yard_worst, yard = got.rounding_rms, got.rounding_worst, "that of rounding the exact result"
    # where the reference is zero throughout, nothing but zero will do
    slack = 1.0 if errors.rms else 0.0
    limit_rms = bound.rms * yard_rms + slack * SLACK_RMS
    if not got.rms <= limit_rms:
        raise KernelFault(
            "incorrect",
            f"{what}: RMS error {got.rms:.3g} is {_times(got.rms, yard_rms)} {yard}; allowed {bound.rms:g}x",
            "rms",
        )
    limit_worst = bound.worst * yard_worst + slack * SLACK_WORST
    if not got.worst <= limit_worst:
        at = _coordinate(errors.worst_at, errors.shape)
        raise KernelFault(
            "incorrect",
            f"{what}: the worst error {got.worst:.3g} at {at} is {_times(got.worst, yard_worst)} {yard}; "
            f"allowed {bound.worst:g}x",
            "worst",
        )
    if bound.yardstick == "rounding":
        _judge_lines(what, errors)


def _judge_lines(what: str, errors: _Errors) -> None:
    for kind, line in (("row", errors.row), ("column", errors.column)):
        if line is not None:
            index, error, allowed = line
            raise KernelFault(
                "incorrect",
                f"{what}: {kind} {index} has an RMS error of {error:.3g}; rounding allows {allowed:.3g}",
                kind,
            )


def _times(value: float, yard: float) -> str:
    return f"{value / yard:.2f}x" if yard else "more than"
