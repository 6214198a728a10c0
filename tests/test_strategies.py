"""Strategies walk a space through ask and tell: order, budgets, near-ties, and what local search finds."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl_bench import strategies
from dsl_bench.errors import UsageError
from dsl_bench.jobs import Candidate
from dsl_bench.records import Choice
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


def walk(strategy, trials: int, time=bowl) -> list[Result]:
    """Everything that was told, further timings of a point among it; the budget counts points."""
    results: list[Result] = []
    seen: set[str] = set()
    while asked := strategy.ask(trials - len(seen)):
        assert len(asked) <= max(trials - len(seen), len(seen))
        told = [Result(p, time(p)) for p in asked]
        strategy.tell(told)
        results += told
        seen |= {p.candidate.key for p in asked}
    return results


NAMES = strategies.available()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(trials=st.integers(1, 200), seed=st.integers(0, 50))
def test_no_point_is_asked_twice_and_no_budget_is_exceeded(name, trials, seed):
    if name == "optuna":
        trials = min(trials, 30)
    points = space()
    results = walk(strategies.make_strategy(name, points, seed, trials), trials)
    told = [(r.point.candidate.key, r.point.effort) for r in results]
    assert len(set(told)) == len(told)
    assert len({key for key, _ in told}) == min(trials, len(points))


@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_tried_first(name):
    first = strategies.make_strategy(name, space(), 3).ask(1)
    assert first[0].candidate.rank == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_did_best_elsewhere_comes_right_after_the_default(name):
    points = space()
    strategy = strategies.make_strategy(name, points, 3)
    strategy.prefer([points[100].label, points[77].label])
    asked = strategy.ask(4)
    while len(asked) < 3:
        strategy.tell([Result(p, bowl(p)) for p in asked])
        asked += strategy.ask(4)
    assert [p.candidate.key for p in asked[:3]] == [points[i].candidate.key for i in (0, 100, 77)]


@pytest.mark.parametrize("name", NAMES)
def test_a_space_where_everything_fails_comes_to_an_end(name):
    results = walk(strategies.make_strategy(name, space(), 0, 25), 25, lambda point: None)
    assert len(results) == 25
    assert strategies.near_ties(results) == []


def test_what_is_estimated_comes_before_what_is_not_and_the_likeliest_first():
    points = space(seeds=0)
    guessed = [
        Point(p.kernel, msgspec.structs.replace(p.candidate, estimate=float(len(points) - i)))
        for i, p in enumerate(points[:50])
    ]
    order = [p.candidate.estimate for p in strategies.by_rank([*points[50:], *guessed])]
    assert order[0] == len(points)  # the default
    assert order[1:50] == sorted(order[1:50])
    assert not any(order[50:])


def test_halving_times_few_points_longer_and_ends_with_the_best():
    results = walk(strategies.make_strategy("halving", space(), 0, 90), 90)
    efforts = Counter(round(r.point.effort, 3) for r in results)
    assert efforts == {0.333: 90, 1.0: 30, 3.0: 10, 9.0: 3}
    assert strategies.best_results(results)[0].point.candidate.rank == 0
    last = [r.median_ns for r in results[-3:]]
    assert min(last) == min(r.median_ns for r in results)


def test_halving_costs_the_device_about_as_much_as_one_trial_of_each():
    results = walk(strategies.make_strategy("halving", space(), 0, 90), 90)
    assert sum(r.point.effort for r in results) < 1.7 * 90


def test_halving_waits_for_a_whole_rung():
    strategy = strategies.make_strategy("halving", space(), 0, 12)
    asked = strategy.ask(12)
    strategy.tell([Result(p, bowl(p)) for p in asked[:5]])
    assert strategy.ask(0) == []
    strategy.tell([Result(p, bowl(p)) for p in asked[5:]])
    assert len(strategy.ask(0)) == 4


def test_a_longer_timing_replaces_a_shorter_one():
    point = space()[0]
    short = Result(Point(point.kernel, point.candidate, 0.333), 90.0)
    assert strategies.best_results([short, Result(point, 100.0)])[0].median_ns == 100.0
    assert strategies.best_results([Result(point, 100.0), short])[0].median_ns == 100.0


def test_a_strategy_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(strategies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'dsl-bench\[optuna\]'"):
        strategies.make_strategy("optuna", space(), 0)
    assert "optuna" not in strategies.available()


def test_help_lists_every_strategy():
    assert all(name in strategies.describe() for name in strategies.STRATEGIES)


def test_optuna_finds_the_valley():
    pytest.importorskip("optuna")
    results = walk(strategies.make_strategy("optuna", space(), 1, 60), 60)
    assert min(r.median_ns for r in results) <= 106.0


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


def test_finalists_are_more_than_the_near_ties_and_what_is_kept_is_near_the_winner():
    points = space()
    times = [104.5, 100.0, 101.5, None, 106.0]
    run = strategies.finalists([Result(p, t) for p, t in zip(points, times, strict=False)])
    assert [r.median_ns for r in run] == [100.0, 101.5, 104.5]
    under_load = [Choice("toy/a", "", {"n": n}, median_ns=t) for n, t in enumerate((110.0, 111.0, 113.0))]
    assert [c.median_ns for c in strategies.kept(under_load)] == [110.0, 111.0]


def test_the_place_goes_to_the_least_loss_in_the_worse_regime():
    # fastest when cold and 3 % behind under load; the reverse; and 1.5 % and 1 % behind, which wins
    assert strategies.final_order([100.0, 104.0, 101.5], [103.0, 100.0, 101.0]) == [2, 0, 1]
    # three per mille of a cold median are scatter: the load decides
    assert strategies.final_order([100.0, 100.2], [100.1, 100.0]) == [1, 0]
    assert strategies.final_order([100.0, 100.9], [100.1, 100.0]) == [0, 1]
    assert strategies.final_order([100.0, 103.0], [101.0, 100.0]) == [0, 1]


def test_near_ties_of_nothing_are_nothing():
    assert strategies.near_ties([Result(space()[0], None)]) == []


def test_an_unknown_strategy_names_the_known_ones():
    with pytest.raises(UsageError, match="exhaustive"):
        strategies.make_strategy("exhaustiv", space(), 0)
