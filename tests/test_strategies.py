"""Strategies walk a space through ask and tell: order, budgets, near-ties, and what local search finds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl_bench import strategies
from dsl_bench.errors import UsageError
from dsl_bench.jobs import Candidate
from dsl_bench.strategies import Point, Result


def space(kernel: str = "toy/gemm", seeds: int = 2) -> list[Point]:
    points = []
    for number, (a, b, c) in enumerate(itertools.product(range(6), range(6), range(4))):
        rank = 0 if number == 0 else 1 if number <= seeds else 2
        points.append(Point(kernel, Candidate({"a": a, "b": b, "c": c}, f"{kernel}{number}", {}, rank)))
    return points


def bowl(point: Point) -> float:
    """A valley whose lowest point is (4, 3, 2)."""
    config = point.candidate.config
    return 100.0 + 10.0 * abs(config["a"] - 4) + 6.0 * abs(config["b"] - 3) + 4.0 * abs(config["c"] - 2)


def walk(strategy, trials: int) -> list[Result]:
    results: list[Result] = []
    while len(results) < trials:
        asked = strategy.ask(trials - len(results))
        if not asked:
            break
        told = [Result(p, bowl(p)) for p in asked]
        strategy.tell(told)
        results += told
    return results


@pytest.mark.parametrize("name", strategies.STRATEGIES)
@given(trials=st.integers(1, 200), seed=st.integers(0, 50))
def test_no_point_is_asked_twice_and_no_budget_is_exceeded(name, trials, seed):
    points = space()
    results = walk(strategies.make_strategy(name, points, seed), trials)
    assert len(results) == min(trials, len(points))
    assert len({r.point.candidate.key for r in results}) == len(results)


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_the_default_is_tried_first(name):
    first = strategies.make_strategy(name, space(), 3).ask(1)
    assert first[0].candidate.rank == 0


def test_exhaustive_finds_the_best():
    results = walk(strategies.make_strategy("exhaustive", space(), 0), 1000)
    assert min(r.median_ns for r in results) == 100.0


def test_local_search_finds_the_valley_in_a_third_of_the_space():
    for seed in range(10):
        results = walk(strategies.make_strategy("local", space(), seed), 48)
        assert min(r.median_ns for r in results) == 100.0


def test_failed_points_do_not_lead_the_way():
    strategy = strategies.make_strategy("local", space(), 0)
    asked = strategy.ask(10)
    strategy.tell([Result(p, None) for p in asked])
    assert strategy.ask(10)


def test_kernels_take_turns_within_a_rank():
    points = space("toy/one") + space("toy/two")
    order = [p.kernel for p in strategies.by_rank(points)[:4]]
    assert order == ["toy/one", "toy/two", "toy/one", "toy/two"]


def test_near_ties_are_within_two_per_cent_best_first():
    points = space()
    times = [103.0, 100.0, 101.5, None, 100.5, 150.0]
    near = strategies.near_ties([Result(p, t) for p, t in zip(points, times, strict=False)])
    assert [r.median_ns for r in near] == [100.0, 100.5, 101.5]


def test_near_ties_of_nothing_are_nothing():
    assert strategies.near_ties([Result(space()[0], None)]) == []


def test_an_unknown_strategy_names_the_known_ones():
    with pytest.raises(UsageError, match="exhaustive"):
        strategies.make_strategy("exhaustiv", space(), 0)
