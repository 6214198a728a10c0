"""Ratios, intervals and verdicts: known answers, and what the intervals promise under simulated noise."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsl_bench import stats

Floats = NDArray[np.float64]
TRUTH = 1.01
TIMES = st.lists(st.floats(1e3, 1e7), min_size=1, max_size=60)


def simulate(kind: str, rounds: int, rng: np.random.Generator, truth: float = TRUTH) -> tuple[Floats, Floats]:
    """A race of two whose true ratio is ``truth``: noise of one kind on a shared clock."""
    clock = np.full(rounds, 1e6)
    noise = rng.normal(0, 0.01, (2, rounds))
    if kind == "drift":
        clock *= np.linspace(1.0, 1.1, rounds)
    elif kind == "steps":
        for at in rng.integers(0, rounds, 3):
            clock[at:] *= rng.uniform(0.9, 1.1)
    elif kind == "correlated":
        for r in range(1, rounds):
            noise[:, r] = 0.3 * noise[:, r - 1] + 0.95 * noise[:, r]
    elif kind == "heavy":
        noise = 0.005 * rng.standard_t(3, (2, rounds))
    elif kind == "captures":  # each of four captures has its own offset, and they take turns
        noise = rng.choice([-0.002, 0.0, 0.001, 0.003], (2, rounds)) + rng.normal(0, 0.001, (2, rounds))
    return clock * truth * np.exp(noise[0]), clock * np.exp(noise[1])


@pytest.mark.parametrize("kind", ["plain", "drift", "steps", "correlated", "heavy", "captures"])
@pytest.mark.parametrize("rounds", [20, 200, 300])
def test_intervals_cover_the_truth(kind: str, rounds: int) -> None:
    rng = np.random.default_rng(7)
    races = 800
    covered = 0
    for seed in range(races):
        got = stats.ratio(*simulate(kind, rounds, rng), resamples=400, seed=seed)
        covered += got.lo <= TRUTH <= got.hi
    # 93-97 %, give or take what 800 simulations leave open
    open_by = 2.0 * math.sqrt(0.95 * 0.05 / races)
    assert 0.93 - open_by <= covered / races <= 0.97 + open_by


@pytest.mark.parametrize("kind", ["plain", "drift", "steps", "correlated", "heavy"])
def test_a_against_a_is_seldom_a_win_or_a_loss(kind: str) -> None:
    rng = np.random.default_rng(11)
    wrong, races = 0, 400
    for seed in range(races):
        got = stats.ratio(*simulate(kind, 30, rng, truth=1.0), resamples=400, seed=seed)
        # the least band of all: even without an A/A floor the interval alone must hold
        wrong += stats.verdict(got.lo, got.hi, 0.0) in ("win", "loss")
    assert wrong / races <= 0.08
    wrong = 0
    for seed in range(races):
        got = stats.ratio(*simulate(kind, 30, rng, truth=1.0), resamples=400, seed=seed)
        floor = stats.aa_floor(*simulate(kind, 30, rng, truth=1.0))
        wrong += stats.verdict(got.lo, got.hi, stats.band(floor)) in ("win", "loss")
    assert wrong / races <= 0.025


def test_several_processes_widen_the_interval_and_show_their_spread() -> None:
    rng = np.random.default_rng(3)
    near = [simulate("plain", 200, rng, truth=t) for t in (1.0, 1.0, 1.0)]
    far = [simulate("plain", 200, rng, truth=t) for t in (0.99, 1.0, 1.01)]
    calm, torn = stats.hierarchical(near), stats.hierarchical(far)
    assert torn.half > 3 * calm.half
    assert torn.spread == pytest.approx(0.02, abs=0.003)
    assert calm.spread < 0.004
    assert torn.value == pytest.approx(1.0, abs=0.003)
    assert torn.n == 600
    assert stats.verdict(torn.lo, torn.hi, stats.band(spread=torn.spread)) == "tie"


def test_one_process_is_a_plain_ratio() -> None:
    pair = simulate("plain", 100, np.random.default_rng(1))
    assert stats.hierarchical([pair]) == stats.ratio(*pair)
    assert stats.ratio(*pair).spread == 0.0


@given(TIMES, st.floats(0.5, 2.0))
def test_an_exact_ratio_has_no_width(times: list[float], factor: float) -> None:
    got = stats.ratio([t * factor for t in times], times)
    assert got.value == pytest.approx(factor)
    assert got.half == pytest.approx(0.0, abs=1e-9)
    assert got.n == len(times)


@given(TIMES)
def test_the_median_lies_in_its_interval(times: list[float]) -> None:
    got = stats.ratio(times, [1e5] * len(times), resamples=200)
    assert got.lo <= got.value * (1 + 1e-12)
    assert got.value <= got.hi * (1 + 1e-12)


@given(TIMES, st.floats(0.1, 10.0))
def test_the_unit_of_time_does_not_matter(times: list[float], scale: float) -> None:
    other = list(reversed(times))
    a = stats.ratio(times, other, resamples=100)
    b = stats.ratio([t * scale for t in times], [t * scale for t in other], resamples=100)
    assert (a.value, a.lo, a.hi) == pytest.approx((b.value, b.lo, b.hi))


def test_deterministic_and_fast() -> None:
    pair = simulate("plain", 300, np.random.default_rng(1))
    assert stats.ratio(*pair) == stats.ratio(*pair)
    spans = []
    for _ in range(5):
        start = time.process_time()
        stats.ratio(*pair)
        spans.append(time.process_time() - start)
    assert min(spans) < 0.02


@pytest.mark.parametrize(
    ("num", "den"),
    [
        ([], []),
        ([1.0], [1.0, 2.0]),
        ([1.0], [0.0]),
        ([-1.0], [1.0]),
        ([math.nan], [1.0]),
        ([1.0], [math.inf]),
    ],
)
def test_bad_samples_are_refused(num: list[float], den: list[float]) -> None:
    with pytest.raises(ValueError, match="samples must be"):
        stats.ratio(num, den)


def test_floor_is_bias_plus_half_the_interval() -> None:
    original, _ = simulate("plain", 100, np.random.default_rng(5))
    assert stats.aa_floor(original * 1.004, original) == pytest.approx(0.004)
    assert stats.aa_floor(original, original) == 0.0


def test_best_baseline_is_picked_on_the_first_third_alone() -> None:
    first = np.array([[100.0] * 10, [90.0] * 10, [80.0] * 10])
    rest = np.array([[100.0] * 20, [10.0] * 20, [500.0] * 20])
    samples = np.concatenate([first, rest], axis=1)
    assert stats.best_baseline(samples, [0, 1, 2]) == 2
    assert stats.best_baseline(samples, [0, 1]) == 1
    assert stats.fraction(samples, ours=0, baseline=2).value == pytest.approx(5.0)
    with pytest.raises(ValueError, match="no baseline"):
        stats.best_baseline(samples, [])


def test_a_drifting_clock_does_not_choose_the_baseline() -> None:
    rng = np.random.default_rng(2)
    clock = np.repeat(np.array([1.0, 2.0, 3.0]), 40)
    samples = np.stack(
        [clock * 100 * (1 + rng.normal(0, 1e-3, 120)), clock * 99 * (1 + rng.normal(0, 1e-3, 120))]
    )
    assert stats.best_baseline(samples, [0, 1]) == 1


@pytest.mark.parametrize(("rounds", "cut"), [(1, 0), (2, 0), (3, 1), (10, 3), (300, 100)])
def test_split_uses_every_round(rounds: int, cut: int) -> None:
    first, rest = stats.split(np.arange(2 * rounds).reshape(2, rounds))
    assert rest.shape[1] == rounds - cut
    assert first.shape[1] == (cut or rounds)


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (1.006, 1.02, "win"),
        (1.004, 1.02, "ambiguous"),
        (0.98, 0.994, "loss"),
        (0.98, 0.996, "ambiguous"),
        (0.996, 1.004, "tie"),
        (0.995, 1.005, "tie"),
        (0.98, 1.02, "ambiguous"),
    ],
)
def test_verdicts(lo: float, hi: float, expected: str) -> None:
    assert stats.verdict(lo, hi, stats.band()) == expected


@given(st.floats(0, 0.1), st.floats(0, 0.1))
def test_the_band_is_the_widest_of_its_reasons(floor: float, spread: float) -> None:
    assert stats.band(floor, spread) == max(0.005, floor, spread)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_geomean_lies_between_the_extremes_and_inverts(values: list[float]) -> None:
    mean = stats.geomean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert stats.geomean([1 / v for v in values]) == pytest.approx(1 / mean)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, math.nan], [-1.0], [math.inf]])
def test_geomean_refuses_what_has_none(values: list[float]) -> None:
    with pytest.raises(ValueError, match="geometric mean"):
        stats.geomean(values)
