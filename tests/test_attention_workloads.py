"""The attention workloads: their cases, their reference, their yardstick, and what users may ask for."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from dsl_bench import check
from dsl_bench.errors import KernelFault, UsageError
from dsl_bench.records import Accuracy
from dsl_bench.workload import Bound, Case, Workload, int_list
from dsl_bench.workloads.attention_decode import WORKLOAD as DECODE
from dsl_bench.workloads.attention_prefill import WORKLOAD as PREFILL
from dsl_bench.workloads.mla_decode import WORKLOAD as MLA

torch = pytest.importorskip("torch")
from dsl_bench.arena import Arena  # noqa: E402 (needs torch)

ALL: tuple[Workload, ...] = (PREFILL, DECODE, MLA)
CPU = torch.device("cpu")


def small(workload: Workload) -> list[Case]:
    return [c for c in workload.cases() if {"smoke", "edge"} & set(c.groups)]


SMALL = [(w, c) for w in ALL for c in small(w)]
IDS = [f"{w.name}-{c.name}" for w, c in SMALL]


def arena(workload: Workload, case: Case, data: str = "normal") -> Arena:
    made = Arena(workload, case, CPU, 1, 0)
    made.draw(1, data)
    return made


def one_by_one(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
    """Attention of one sequence, query by query and head by head, as the textbook writes it."""
    (sq, hq, _), (sk, hkv, _) = q.shape, k.shape
    out = torch.zeros(sq, hq, v.shape[2], dtype=torch.float64)
    for i in range(sq):
        seen = sk - sq + i + 1 if causal else sk
        for h in range(hq if seen > 0 else 0):
            scores = k[:seen, h // (hq // hkv)].double() @ q[i, h].double() * scale
            out[i, h] = torch.softmax(scores, 0) @ v[:seen, h // (hq // hkv)].double()
    return out


def by_the_textbook(workload: Workload, case: Case, x: dict[str, Any]) -> Any:
    lens = int_list(str(case.params["lens"]))
    parts, start = [], 0
    for row, n in enumerate(lens):
        if workload is PREFILL:
            mine = slice(start, start + n)
            q, k, v = (x[name][mine] for name in "qkv")
            parts.append(one_by_one(q, k, v, 1 / math.sqrt(case["d"]), bool(case["causal"])))
            start += n
            continue
        page = x["kv_cache" if workload is MLA else "k_cache"].shape[1]
        at = [(int(x["page_table"][row, t // page]), t % page) for t in range(n)]
        if workload is DECODE:
            k, v = (
                torch.stack([x[c][p, s] for p, s in at]) if at else x[c][0, :0]
                for c in ("k_cache", "v_cache")
            )
            parts.append(one_by_one(x["q"][row : row + 1], k, v, 1 / math.sqrt(case["d"]), False))
        else:
            c = (
                torch.stack([x["kv_cache"][p, s] for p, s in at])[:, None]
                if at
                else x["kv_cache"][0, :0, None]
            )
            parts.append(one_by_one(x["q"][row], c, c[..., :512], 1 / math.sqrt(576), True)[None])
    return torch.cat(parts)


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_the_reference_is_the_textbooks(workload: Workload) -> None:
    for case in (c for c in small(workload) if "smoke" in c.groups):
        made = arena(workload, case)
        found = made.reference(1, "normal")["o"]
        wanted = by_the_textbook(workload, case, made.sets[0].inputs)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("workload", "case"), SMALL, ids=IDS)
def test_the_yardstick_is_sound_and_no_better_than_rounding(workload: Workload, case: Case) -> None:
    for data in ("normal", "outliers"):
        made = arena(workload, case, data)
        yard = made.yardstick(1, data)
        assert yard is not None
        assert yard.rounding_rms * 0.99 <= yard.rms <= 4 * yard.rounding_rms + 1e-6
        assert math.isfinite(yard.worst)


@pytest.mark.parametrize("workload", (DECODE, MLA), ids=lambda w: w.name)
def test_pages_are_shuffled_and_nobodys_twice(workload: Workload) -> None:
    for case in workload.cases():
        lens = int_list(str(case.params["lens"]))
        index = workload.index(case, np.random.default_rng(0))
        page = 64 if workload is MLA else case["page"]
        used = [p for row, n in enumerate(lens) for p in index["page_table"][row, : -(-n // page)]]
        assert len(used) == len(set(used))
        pool = {s.name: s for s in workload.specs(case)}["kv_cache" if workload is MLA else "k_cache"].shape[
            0
        ]
        assert all(0 <= p < pool for p in used)
        if len(used) > 8:
            assert used != sorted(used)


def test_a_sequence_without_tokens_gives_zeros() -> None:
    for workload in (DECODE, MLA):
        case = next(c for c in small(workload) if str(c.params["lens"]).startswith("0+"))
        assert not arena(workload, case).reference(1, "normal")["o"][0].any()


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    case = MLA.parse_case({"lens": "1+3", "heads": "2", "sq": "2", "dtype": "fp16"})
    out = arena(MLA, case).reference(1, "normal")["o"]
    assert not out[0, 0].any()
    assert bool(out[0, 1].any()) and bool(out[1, 0].any())


def test_flops_and_bytes_are_the_stated_formulas() -> None:
    one = PREFILL.parse_case({"lens": "100*2"})
    assert PREFILL.flops(one) == 2 * (2 * 32 * 128 * 100 * 101)
    full = PREFILL.parse_case({"lens": "100*2", "causal": "0"})
    assert PREFILL.flops(full) == 2 * (4 * 32 * 128 * 100 * 100)
    decode = DECODE.parse_case({"lens": "50+70"})
    assert DECODE.flops(decode) == 4 * 32 * 128 * 120
    assert DECODE.bytes(decode) == 2 * 2 * 8 * 128 * 120 + 2 * 2 * 32 * 128 * 2
    mla = MLA.parse_case({"lens": "50+70", "heads": "16", "sq": "2"})
    assert MLA.flops(mla) == 2 * 16 * 2 * (576 + 512) * 120
    assert MLA.bytes(mla) == 2 * 576 * 120


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_names_are_unique_and_a_named_size_is_the_named_case(workload: Workload) -> None:
    cases = workload.cases()
    assert len({c.name for c in cases}) == len(cases)
    groups = {g for c in cases for g in c.groups}
    assert {"smoke", "quick", "edge", "ragged"} <= groups
    for case in cases:
        given = {"lens": str(case.params["lens"]), "dtype": case.dtype}
        if "hq" in case.params:
            given["heads"] = f"{case['hq']}/{case['hkv']}"
        elif "h" in case.params:
            given["heads"] = str(case["h"])
        given |= {k: str(case.params[k]) for k in ("d", "causal", "page", "sq") if k in case.params}
        if workload is DECODE and case["d"] != 128:
            continue
        assert workload.parse_case(given).name == case.name


@pytest.mark.parametrize(
    ("workload", "given", "said"),
    [
        (PREFILL, {}, "missing lens"),
        (PREFILL, {"lens": "12x"}, "'12x' is neither a length nor length*count"),
        (PREFILL, {"lens": "0*4"}, "holds no token"),
        (PREFILL, {"lens": "8", "heads": "32/5"}, "no multiple"),
        (PREFILL, {"lens": "8", "d": "96"}, "known: 64, 128, 256"),
        (PREFILL, {"lens": "8", "causal": "maybe"}, "neither 1 nor 0"),
        (PREFILL, {"lens": "8", "dtype": "fp8"}, "known: bf16, fp16"),
        (PREFILL, {"lens": "8", "page": "16"}, "unknown page"),
        (DECODE, {"lens": "8", "page": "7"}, "known: 16, 32, 64"),
        (MLA, {"lens": "8", "sq": "0"}, "not a positive integer"),
    ],
)
def test_a_bad_case_is_told_in_one_line(workload: Workload, given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as told:
        workload.parse_case(given)
    assert said in str(told.value) and "\n" not in str(told.value)
    assert str(told.value).startswith(workload.name)


def test_lengths_are_read_as_they_are_written() -> None:
    assert int_list("512*2+8192+0") == (512, 512, 8192, 0)
    for bad in ("", "4*", "*4", "4-1", "1.5", "4**2"):
        with pytest.raises(ValueError):
            int_list(bad)


# -- judged by the yardstick, and by the fastest vendor kernel -------------------------------------------


def verified(made: Arena, outputs: dict[str, Any], **more: Any) -> Accuracy:
    reference, inputs = made.reference(1, "normal"), made.sets[0].inputs
    before = check.fingerprint(inputs)
    yard = made.yardstick(1, "normal")
    return check.verify(made.workload, made.case, reference, outputs, inputs, before, vendor=yard, **more)


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_sound_outputs_hold_and_coarser_ones_do_not(workload: Workload) -> None:
    case = next(
        c for c in small(workload) if "edge" in c.groups and sum(int_list(str(c.params["lens"]))) > 100
    )
    made = arena(workload, case)
    sound = workload.yardstick(case, made.sets[0].inputs)
    assert sound is not None
    verified(made, sound)
    noise = torch.randn(sound["o"].shape, generator=torch.Generator().manual_seed(0))
    coarse = {"o": (sound["o"].float() * (1 + noise * 2**-8)).to(sound["o"].dtype)}
    with pytest.raises(KernelFault) as fault:
        verified(made, coarse)
    assert fault.value.check in ("rms", "worst")
    verified(made, coarse, leeway=8.0)


def test_the_fastest_vendors_error_is_a_bound_too() -> None:
    vendor = Accuracy("normal", 2e-3, 2e-2, 1.5e-3, 1e-2)
    bound = Bound("vendor", rms=1.25, worst=2.0)
    check.hold_to("k", msgspec.structs.replace(vendor, rms=2.4e-3), vendor, bound)
    with pytest.raises(KernelFault) as fault:
        check.hold_to("k", msgspec.structs.replace(vendor, rms=2.6e-3), vendor, bound)
    assert (fault.value.status, fault.value.check) == ("incorrect", "vendor_rms")
    with pytest.raises(KernelFault) as fault:
        check.hold_to("k", msgspec.structs.replace(vendor, worst=5e-2), vendor, bound)
    assert fault.value.check == "vendor_worst"
