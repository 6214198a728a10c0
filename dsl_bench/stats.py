"""Ratios of interleaved samples, their intervals, and the verdict on them. numpy only.

A ratio here is numerator time over denominator time, taken round by round, so that the clock, the
temperature and whatever else the participants of a round share cancels. ``ratio(vendor, ours)`` is a
fraction of the vendor's speed: above 1 means faster than the vendor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Verdict = Literal["win", "loss", "tie", "ambiguous"]
Floats = NDArray[np.float64]

RESAMPLES = 2000
#: least difference that is ever called one
LEAST_BAND = 0.005
#: share of the rounds on which the best baseline is picked; ratios come from the rest
SELECTION = 3
#: two-sided 97.5 % points of Student's t for 1, 2, … degrees of freedom, then the normal's
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_Z975 = 1.960


@dataclass(frozen=True)
class Estimate:
    """A ratio with its 95 % interval. ``n`` is the number of rounds, ``spread`` the distance between the
    lowest and the highest process (0 for one process)."""

    value: float
    lo: float
    hi: float
    n: int
    spread: float = 0.0

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.hi - self.lo) / 2.0


def block_length(rounds: int) -> int:
    """Rounds a bootstrap block holds. Neighbouring rounds share what does not cancel (a clock step within a
    round, the captured graph in turn), so blocks grow with the cube root of the race."""
    return max(1, round(1.5 * rounds ** (1.0 / 3.0))) if rounds > 8 else 1


def _paired(num: ArrayLike, den: ArrayLike) -> Floats:
    top = np.asarray(num, dtype=np.float64)
    bottom = np.asarray(den, dtype=np.float64)
    if top.ndim != 1 or top.shape != bottom.shape or top.size == 0:
        raise ValueError(f"samples must be two equal, non-empty rows; got shapes {top.shape}, {bottom.shape}")
    if not (np.all(np.isfinite(top)) and np.all(np.isfinite(bottom)) and top.min() > 0 and bottom.min() > 0):
        raise ValueError("samples must be positive, finite times")
    ratios: Floats = top / bottom
    return ratios


def _resample(ratios: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Medians of circular block-bootstrap resamples, widened about the median for few blocks."""
    n = ratios.size
    length = block_length(n)
    blocks = -(-n // length)
    # ranks in 16 bits sort ten times faster than the ratios themselves
    order = np.argsort(ratios, kind="stable")
    ranks = np.empty(n, dtype=np.uint16 if n < 2**16 else np.uint32)
    ranks[order] = np.arange(n)
    circle = np.resize(ranks, n + length)
    windows = np.lib.stride_tricks.sliding_window_view(circle, length)[:n]
    starts = rng.integers(0, n, size=(resamples, blocks))
    drawn = np.sort(windows[starts].reshape(resamples, -1)[:, :n], axis=1)
    ordered = ratios[order]
    medians = (ordered[drawn[:, (n - 1) // 2]] + ordered[drawn[:, n // 2]]) / 2.0
    centre = float(np.median(ratios))
    widened: Floats = centre + (medians - centre) * _widening(blocks)
    return widened


def _widening(blocks: int) -> float:
    """A percentile interval from few blocks is too narrow: Student's t over the normal, and the n/(n-1)
    of an estimated variance."""
    if blocks < 2:
        return 1.0
    df = blocks - 1
    t = _T975[df - 1] if df <= len(_T975) else _Z975 * (1.0 + 0.65 / df + 0.55 / df**1.5)
    return min(3.0, t / _Z975 * math.sqrt(blocks / df))


def _interval(draws: Floats) -> tuple[float, float]:
    lo, hi = np.percentile(draws, [2.5, 97.5])
    return float(lo), float(hi)


def ratio(num: ArrayLike, den: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Median of the per-round ratios ``num[r] / den[r]`` with a 95 % interval from a bootstrap over blocks of
    rounds. Raises ValueError for unequal, empty or non-positive samples. Deterministic for a seed."""
    return hierarchical([(num, den)], resamples=resamples, seed=seed)


def hierarchical(
    races: Sequence[tuple[ArrayLike, ArrayLike]], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """One estimate from several races (processes) of the same pair: the mean of the processes' medians; the
    interval resamples processes first, then blocks of rounds within each."""
    if not races:
        raise ValueError("no races to estimate from")
    rows = [_paired(num, den) for num, den in races]
    rng = np.random.default_rng(seed)
    draws = np.stack([_resample(row, resamples, rng) for row in rows])
    centres = np.array([float(np.median(row)) for row in rows])
    rounds = sum(row.size for row in rows)
    if len(rows) == 1:
        lo, hi = _interval(draws[0])
        return Estimate(float(centres[0]), lo, hi, rounds)
    picks = rng.integers(0, len(rows), size=(len(rows), resamples))
    means = draws[picks, rng.integers(0, resamples, size=picks.shape)].mean(axis=0)
    lo, hi = _interval(means)
    return Estimate(float(centres.mean()), lo, hi, rounds, float(centres.max() - centres.min()))


@dataclass(frozen=True)
class Spread:
    """The relative variance between processes, pooled, and the degrees of freedom it rests on."""

    variance: float = 0.0
    freedom: int = 0

    @staticmethod
    def of(groups: Iterable[Sequence[float]]) -> Spread:
        """Pooled over groups of medians, one group what was measured in several processes."""
        squares, freedom = 0.0, 0
        for group in groups:
            if len(group) > 1:
                values = np.log(np.asarray(group, dtype=np.float64))
                squares += float(((values - values.mean()) ** 2).sum())
                freedom += len(group) - 1
        return Spread(squares / freedom if freedom else 0.0, freedom)

    def within(self, wider: Spread, weight: int = 4) -> Spread:
        """This one drawn towards ``wider``, which counts as ``weight`` degrees of freedom."""
        weight = min(weight, wider.freedom)
        total = self.freedom + weight
        if not total:
            return self
        return Spread((self.freedom * self.variance + weight * wider.variance) / total, total)

    @property
    def deviation(self) -> float:
        """The relative standard deviation."""
        return math.sqrt(self.variance)


def change(
    before: Sequence[tuple[ArrayLike, ArrayLike]],
    after: Sequence[tuple[ArrayLike, ArrayLike]],
    spread: float = 0.0,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """How a ratio changed between two sets of races (processes) of the same pair: the ratio after over the
    ratio before. ``spread`` is the relative standard deviation between processes; a process's own rounds
    cannot show it, so it widens the interval by what the numbers of processes leave of it."""
    rng = np.random.default_rng(seed)
    centres: list[float] = []
    draws: list[Floats] = []
    for side in (before, after):
        rows = [_paired(num, den) for num, den in side]
        if not rows:
            raise ValueError("no races to estimate from")
        centres.append(float(np.exp(np.mean([np.log(np.median(row)) for row in rows]))))
        means = np.stack([np.log(np.maximum(_resample(row, resamples, rng), 1e-12)) for row in rows]).mean(
            axis=0
        )
        draws.append(means + rng.normal(0.0, spread / math.sqrt(len(rows)), resamples))
    lo, hi = _interval(np.exp(draws[1] - draws[0]))
    rounds = sum(np.asarray(num).size for num, _ in (*before, *after))
    return Estimate(centres[1] / centres[0], lo, hi, rounds, spread)


def aa_floor(copy: ArrayLike, original: ArrayLike) -> float:
    """What a race can tell apart: |A/A median - 1| plus half its interval."""
    same = ratio(copy, original)
    return abs(same.value - 1.0) + same.half


def split(samples: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rounds for picking the best baseline (the first third) and rounds for ratios (the rest), along the last
    axis. Fewer than three rounds serve as both."""
    rows = np.asarray(samples)
    n = rows.shape[-1]
    cut = n // SELECTION
    return (rows[..., :cut], rows[..., cut:]) if cut else (rows, rows)


def best_baseline(samples: ArrayLike, candidates: Sequence[int]) -> int:
    """The index (out of ``candidates``) of the fastest row on the first third of the rounds. Rows are
    compared after dividing each round by the candidates' mean, so that a drifting clock does not choose."""
    if not candidates:
        raise ValueError("no baseline to choose from")
    first, _ = split(samples)
    rows = np.asarray(first, dtype=np.float64)[list(candidates)]
    relative = np.median(rows / rows.mean(axis=0, keepdims=True), axis=1)
    return int(candidates[int(np.argmin(relative))])


def fraction(samples: ArrayLike, ours: int, baseline: int) -> Estimate:
    """Speed of row ``ours`` as a fraction of row ``baseline``'s, on the rounds that chose no baseline."""
    _, rest = split(samples)
    return ratio(rest[baseline], rest[ours])


def band(floor: float = 0.0, spread: float = 0.0) -> float:
    """Half-width of what counts as equal: the greatest of 0.5 %, the A/A floor and the spread between
    processes."""
    return max(LEAST_BAND, floor, spread)


def verdict(lo: float, hi: float, width: float) -> Verdict:
    """win: the interval lies above 1 + ``width``; loss: below 1 - ``width``; tie: within; else ambiguous."""
    if lo > 1.0 + width:
        return "win"
    if hi < 1.0 - width:
        return "loss"
    if lo >= 1.0 - width and hi <= 1.0 + width:
        return "tie"
    return "ambiguous"


def geomean(values: ArrayLike) -> float:
    """Geometric mean of positive numbers; ValueError for none, or for one that is not positive and finite."""
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0 or not np.all(np.isfinite(x)) or x.min() <= 0:
        raise ValueError("a geometric mean needs at least one number, all positive and finite")
    return float(np.exp(np.log(x).mean()))
