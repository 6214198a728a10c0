"""What the checks must catch and what they must let pass, on CPU kernels that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsl_bench import check
from dsl_bench.errors import DslBenchError, KernelFault, UsageError
from dsl_bench.records import Accuracy
from dsl_bench.workload import DATA_KINDS, Bound, Case, TensorSpec, Workload

torch = pytest.importorskip("torch")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = dict[str, Any]
Kernel = Callable[[Any, Any, Any], None]


class Product(Workload):
    """C = A·Bᵀ, small."""

    name = "product"

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        """a, b and c."""
        m, n, k = case["m"], case["n"], case["k"]
        return (
            TensorSpec("a", (m, k), case.dtype, "value"),
            TensorSpec("b", (n, k), case.dtype, "value"),
            TensorSpec("c", (m, n), case.dtype, "output"),
        )


class ByVendor(Product):
    """The same, held to a vendor's accuracy."""

    bound = Bound("vendor", rms=1.25, worst=2.0)


def case_of(m: int, n: int, k: int, dtype: str = "bf16") -> Case:
    return Case("product", f"{m}x{n}x{k}-{dtype}", {"m": m, "n": n, "k": k}, dtype)


def run(
    kernel: Kernel,
    case: Case,
    data: str = "normal",
    workload: Workload | None = None,
    vendor: Accuracy | None = None,
    seed: int = 0,
) -> Accuracy:
    """Draw, poison, run, verify: as the device worker does."""
    generator = torch.Generator().manual_seed(seed)
    m, n, k = case["m"], case["n"], case["k"]
    inputs = {
        "a": torch.empty((m, k), dtype=DTYPES[case.dtype]),
        "b": torch.empty((n, k), dtype=DTYPES[case.dtype]),
    }
    outputs = {"c": torch.empty((m, n), dtype=DTYPES[case.dtype])}
    for tensor in inputs.values():
        check.draw(tensor, data, generator)
    reference = {"c": inputs["a"].double() @ inputs["b"].double().t()}
    before = check.fingerprint(inputs)
    check.poison(outputs)
    kernel(inputs["a"], inputs["b"], outputs["c"])
    return check.verify(workload or Product(), case, reference, outputs, inputs, before, data, vendor=vendor)


def caught(kernel: Kernel, case: Case | None = None, **how: Any) -> KernelFault:
    with pytest.raises(KernelFault) as fault:
        run(kernel, case or case_of(96, 80, 512), **how)
    return fault.value


# -- kernels --------------------------------------------------------------------------------------------


def right(a: Any, b: Any, c: Any) -> None:
    """Accumulates in float32 over chunks of K, rounds once."""
    total = torch.zeros(c.shape, dtype=torch.float32)
    for k in range(0, a.shape[1], 64):
        total += a[:, k : k + 64].float() @ b[:, k : k + 64].float().t()
    c.copy_(total)


def split_k(parts: int) -> Kernel:
    """Partial sums in the output's type, added in float32."""

    def kernel(a: Any, b: Any, c: Any) -> None:
        pieces = zip(a.chunk(parts, 1), b.chunk(parts, 1), strict=True)
        c.copy_(sum((x.float() @ y.float().t()).to(c.dtype).float() for x, y in pieces))

    return kernel


def low_accumulator(a: Any, b: Any, c: Any) -> None:
    """The running sum itself is kept in the output's type."""
    total = torch.zeros_like(c)
    for k in range(0, a.shape[1], 16):
        total = (total.float() + a[:, k : k + 16].float() @ b[:, k : k + 16].float().t()).to(c.dtype)
    c.copy_(total)


def truncating(a: Any, b: Any, c: Any) -> None:
    """Rounds towards zero by dropping bits."""
    exact = (a.float() @ b.float().t()).view(torch.int32)
    c.copy_((exact & ~0xFFFF).view(torch.float32))


def spoiled(spoil: Callable[[Any, Any, Any], None]) -> Kernel:
    """The right result, then ``spoil``."""

    def kernel(a: Any, b: Any, c: Any) -> None:
        right(a, b, c)
        spoil(a, b, c)

    return kernel


# -- what holds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", DATA_KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "size", [(96, 80, 512), (1, 300, 4096), (300, 1, 4096), (33, 61, 47), (1, 1, 1), (64, 64, 4096)]
)
def test_float32_accumulation_holds(data: str, dtype: str, size: tuple[int, int, int]) -> None:
    for seed in range(2):
        got = run(right, case_of(*size, dtype), data, seed=seed)
        assert got.data == data
        assert got.rms <= 1.1 * got.rounding_rms + check.SLACK_RMS
    if data == "zeros":
        assert (got.rms, got.worst) == (0.0, 0.0)


def test_accuracy_is_relative_to_the_rms_of_the_reference() -> None:
    got = run(right, case_of(96, 80, 512))
    # rounding to 8 bits: between 2**-9 / sqrt(3) and 2**-8 / sqrt(3)
    assert 0.0011 < got.rounding_rms < 0.0023
    assert got.rms == pytest.approx(got.rounding_rms, rel=0.01)
    assert got.rounding_worst < 0.02


# -- what is caught -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_split_k_through_the_output_type_is_caught_by_rms(parts: int, dtype: str) -> None:
    fault = caught(split_k(parts), case_of(128, 128, 2048, dtype))
    assert (fault.status, fault.check) == ("incorrect", "rms")


@pytest.mark.parametrize("data", ["normal", "uniform", "outliers"])
def test_a_low_precision_accumulator_is_caught(data: str) -> None:
    fault = caught(low_accumulator, data=data)
    assert (fault.status, fault.check) == ("incorrect", "rms")


def test_truncation_instead_of_rounding_is_caught() -> None:
    assert caught(truncating).check == "rms"


def test_one_wrong_element_is_caught_by_the_worst_error() -> None:
    def spoil(a: Any, b: Any, c: Any) -> None:
        c[17, 33] += 0.1 * float(c.float().std())

    fault = caught(spoiled(spoil), case_of(512, 512, 256))
    assert fault.status == "incorrect"
    assert fault.check in ("worst", "row", "column")
    assert caught(spoiled(spoil), case_of(2048, 1024, 64)).check == "worst"


@pytest.mark.parametrize("line", ["row", "column"])
def test_wrong_small_lines_are_caught_where_large_ones_drown_them(line: str) -> None:
    def spoil(a: Any, b: Any, c: Any) -> None:
        sizes = c.float().square().mean(dim=1 if line == "row" else 0)
        view = c if line == "row" else c.t()
        view[int(sizes.argmin())] *= 1.02

    fault = caught(spoiled(spoil), case_of(256, 256, 256), data="outliers")
    assert (fault.status, fault.check) == ("incorrect", line)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a, b, c: c.copy_(c.roll(1, 0)),
        lambda a, b, c: c[:, -1:].copy_(c[:, :1]),
        lambda a, b, c: c.zero_(),
        lambda a, b, c: c.mul_(1.01),
        lambda a, b, c: c.sub_(torch.outer(a[:, -1].float(), b[:, -1].float()).to(c.dtype)),
    ],
    ids=["shifted rows", "last column", "zeros", "one per cent", "last k left out"],
)
def test_wrong_results_are_caught(spoil: Callable[[Any, Any, Any], None]) -> None:
    assert caught(spoiled(spoil)).status == "incorrect"


def test_unwritten_elements_are_counted_and_placed() -> None:
    def partial(a: Any, b: Any, c: Any) -> None:
        c[:90, :79] = (a.float() @ b.float().t())[:90, :79].to(c.dtype)

    fault = caught(partial)
    assert fault.status == "unwritten"
    assert f"{96 * 80 - 90 * 79} of {96 * 80}" in fault.reason
    assert "(0, 79)" in fault.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_kernels_own_nan_or_infinity_is_told_from_the_poison(value: float) -> None:
    def spoil(a: Any, b: Any, c: Any) -> None:
        c[5, 7] = value

    fault = caught(spoiled(spoil))
    assert fault.status == "nonfinite"
    assert "1 of 7680" in fault.reason
    assert "(5, 7)" in fault.reason


def test_accumulating_onto_the_poison_is_caught() -> None:
    assert caught(lambda a, b, c: c.add_((a.float() @ b.float().t()).to(c.dtype))).status in (
        "nonfinite",
        "unwritten",
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a, b, c: a[3, 4].add_(1.0),
        lambda a, b, c: b.copy_(b.roll(1, 0)),
        lambda a, b, c: a.neg_(),
        lambda a, b, c: b[0].copy_(b[0].flip(0)),
    ],
    ids=["one element", "rows exchanged", "negated", "one row reversed"],
)
def test_changed_inputs_are_caught(spoil: Callable[[Any, Any, Any], None]) -> None:
    fault = caught(spoiled(spoil))
    assert fault.status == "mutated_input"
    assert fault.check == "fingerprint"


def test_missing_and_misshapen_outputs_are_caught() -> None:
    case, reference = case_of(4, 4, 4), {"c": torch.zeros((4, 4), dtype=torch.float64)}
    for outputs in ({}, {"c": torch.zeros((2, 8), dtype=torch.bfloat16)}):
        with pytest.raises(KernelFault) as fault:
            check.verify(Product(), case, reference, outputs, {}, {})
        assert (fault.value.status, fault.value.check) == ("incorrect", "shape")


def test_a_reference_that_does_not_fit_is_the_workloads_fault() -> None:
    case = case_of(2, 2, 2, "fp16")
    outputs = {"c": torch.full((2, 2), 60000.0, dtype=torch.float16)}
    for value in (1e6, float("nan")):
        reference = {"c": torch.full((2, 2), value, dtype=torch.float64)}
        with pytest.raises(DslBenchError, match="reference of c") as fault:
            check.verify(Product(), case, reference, outputs, {}, {})
        assert not isinstance(fault.value, KernelFault)


# -- the vendor as yardstick ----------------------------------------------------------------------------


def test_a_vendors_error_can_be_the_yardstick() -> None:
    case = case_of(128, 128, 1024)
    vendor = run(split_k(2), case, workload=ByVendor())
    assert vendor.rms > 1.2 * vendor.rounding_rms
    assert run(right, case, workload=ByVendor(), vendor=vendor).rms < vendor.rms
    fault = caught(low_accumulator, case, workload=ByVendor(), vendor=vendor)
    assert fault.check == "rms"
    assert "a sound algorithm" in fault.reason
    assert run(low_accumulator, case, workload=ByVendor()).rms > vendor.rms


# -- chunks, drawing, fingerprints, proof ---------------------------------------------------------------


def test_chunks_change_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(70, 50, 256)
    whole = run(right, case)
    generator = torch.Generator().manual_seed(0)
    tensor = torch.empty((70, 50), dtype=torch.bfloat16).normal_(generator=generator)
    fingerprint = check.fingerprint({"t": tensor})
    monkeypatch.setattr(check, "CHUNK", 333)
    pieces = run(right, case)
    assert (pieces.rms, pieces.worst) == pytest.approx((whole.rms, whole.worst))
    assert check.fingerprint({"t": tensor}) == fingerprint

    def spoil(a: Any, b: Any, c: Any) -> None:
        c[61, 3] = float("nan")

    assert "(61, 3)" in caught(spoiled(spoil), case).reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_draws_are_seeded_finite_and_of_their_kind(dtype: str) -> None:
    drawn = {}
    for kind in DATA_KINDS:
        tensor = torch.empty((256, 512), dtype=DTYPES[dtype])
        check.draw(tensor, kind, torch.Generator().manual_seed(5))
        again = torch.empty_like(tensor)
        check.draw(again, kind, torch.Generator().manual_seed(5))
        assert torch.equal(tensor, again)
        assert bool(torch.isfinite(tensor).all())
        drawn[kind] = tensor.float()
    assert float(drawn["zeros"].abs().max()) == 0.0
    assert float(drawn["uniform"].abs().max()) <= 1.0
    assert float(drawn["normal"].std()) == pytest.approx(1.0, abs=0.02)
    rows = drawn["outliers"].square().mean(dim=1).sqrt()
    assert float(rows.max() / rows.min()) > 8
    assert float(drawn["outliers"].abs().max()) > 12


def test_an_unknown_kind_of_data_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cauchy"):
        check.draw(torch.empty(3), "cauchy", None)


def test_float16_sums_of_outliers_stay_in_range() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.empty((256, 32768), dtype=torch.float16) for _ in range(2))
    check.draw(a, "outliers", generator)
    check.draw(b, "outliers", generator)
    assert float((a.float() @ b.float().t()).abs().max()) < 60000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_poison_is_found_until_it_is_overwritten(dtype: Any) -> None:
    outputs = {"x": torch.zeros((5, 3), dtype=dtype)}
    check.poison(outputs)
    assert check.unwritten(outputs["x"]) == 15
    with pytest.raises(KernelFault, match="15 of 15 elements of x") as fault:
        check.assert_written([outputs], "a graph")
    assert fault.value.check == "capture"
    outputs["x"].zero_()
    check.assert_written([outputs], "a graph")


def test_verifying_leaves_reference_and_outputs_as_they_are() -> None:
    reference = {"c": torch.randn((40, 30), dtype=torch.float64)}
    outputs = {"c": reference["c"].bfloat16()}
    kept = {name: tensor.clone() for name, tensor in (("r", reference["c"]), ("o", outputs["c"]))}
    for _ in range(2):
        check.verify(Product(), case_of(40, 30, 8), reference, outputs, {}, {})
    assert torch.equal(reference["c"], kept["r"])
    assert torch.equal(outputs["c"], kept["o"])
