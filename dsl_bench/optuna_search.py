"""Optuna's sampler as a strategy. Optuna is imported here alone, and only when it is asked for.

Optuna proposes a value for every axis; what it proposes need not be a candidate (a kernel refuses most of its
space), so the nearest candidate that is left is tried in its place, and Optuna is told what that did.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from dsl_bench.jobs import Candidate
from dsl_bench.strategies import ROUND, Label, Point, Result, distance, preferred


class OptunaSearch:
    """Defaults and seeds first, then what a multivariate TPE proposes; the kernel is one more axis."""

    def __init__(self, points: list[Point], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self.points = points
        self.results: list[Result] = []
        self._asked: set[Label] = set()
        self._preferred: list[Label] = []
        self._axes = {k: _axes(points, k) for k in dict.fromkeys(p.kernel for p in points)}
        with _quiet():
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)

    def ask(self, n: int) -> list[Point]:
        """Defaults and seeds, then at most ``ROUND`` proposals."""
        fresh = [p for p in self.points if p.label not in self._asked]
        if not self.results:
            first = [p for p in fresh if p.candidate.rank < 2 or p.label in self._preferred]
            chosen = preferred(first, self._preferred)[:n] or fresh[: min(n, ROUND)]
        else:
            chosen = []
            for _ in range(min(n, ROUND, len(fresh))):
                point = self._proposal(fresh)
                fresh.remove(point)
                chosen.append(point)
        self._asked |= {p.label for p in chosen}
        return chosen

    def tell(self, results: Sequence[Result]) -> None:
        """Hand the outcome to the study; a failed point is a trial without a value."""
        self.results += results
        state = self._optuna.trial.TrialState
        for result in results:
            params, axes = self._params(result.point)
            done = result.median_ns is not None
            with _quiet():
                trial = self._optuna.trial.create_trial(
                    params=params,
                    distributions=axes,
                    value=result.median_ns,
                    state=state.COMPLETE if done else state.FAIL,
                )
                self._study.add_trial(trial)

    def prefer(self, labels: Sequence[Label]) -> None:
        """Tried right behind the defaults, if they are known when the search begins."""
        self._preferred = list(labels)

    def _proposal(self, fresh: Sequence[Point]) -> Point:
        """The candidate nearest to what the sampler would try next."""
        kernels = list(self._axes)
        with _quiet():
            trial = self._study.ask()
            kernel = trial.suggest_categorical("kernel", kernels)
            drawn = {
                axis: values[trial.suggest_categorical(f"{kernel}.{axis}", range(len(values)))]
                for axis, values in self._axes[kernel].items()
            }
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        wanted = Point(kernel, Candidate(drawn, "", {}))
        return min(fresh, key=lambda p: distance(wanted, p))

    def _params(self, point: Point) -> tuple[dict[str, Any], dict[str, Any]]:
        choice = self._optuna.distributions.CategoricalDistribution
        params: dict[str, Any] = {"kernel": point.kernel}
        axes: dict[str, Any] = {"kernel": choice(list(self._axes))}
        for axis, values in self._axes[point.kernel].items():
            params[f"{point.kernel}.{axis}"] = values.index(point.candidate.config[axis])
            axes[f"{point.kernel}.{axis}"] = choice(list(range(len(values))))
        return params, axes


def _axes(points: Sequence[Point], kernel: str) -> dict[str, list[Any]]:
    """Every axis of a kernel with the values that candidates have on it."""
    table: dict[str, dict[Any, None]] = {}
    for point in points:
        if point.kernel == kernel:
            for axis, value in point.candidate.config.items():
                table.setdefault(axis, {})[value] = None
    return {axis: list(values) for axis, values in table.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna warns that the options it is used with are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
