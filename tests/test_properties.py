"""What holds for any record, any damage to a file, any space, and any race whatever its clock does."""

from __future__ import annotations

import json
import math
import types
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsl_bench import jobs, planning, records, stats, store
from dsl_bench.jobs import Origin
from dsl_bench.kernel import Kernel
from dsl_bench.records import CaseRef, Record

Floats = NDArray[np.float64]

relaxed = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# -- records ----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), TEXT),
}


@cache
def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; a record's fields by their own annotations, whatever they are by now."""
    if kind in SCALARS:
        return SCALARS[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([any_of(a) for a in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is dict:
        return st.dictionaries(any_of(args[0]), any_of(args[1]), max_size=2)
    if origin is list:
        return st.lists(any_of(args[0]), max_size=2)
    if origin is tuple:
        return st.lists(any_of(args[0]), max_size=2).map(tuple)
    assert isinstance(kind, type)
    assert issubclass(kind, msgspec.Struct)
    return st.builds(kind, **{name: any_of(hint) for name, hint in get_type_hints(kind).items()})


ANY_RECORD = st.one_of([any_of(kind) for kind in get_args(Record)])


@given(record=ANY_RECORD)
@settings(relaxed, max_examples=300)
def test_every_record_survives_its_line(record: Record) -> None:
    line = records.encode(record)
    assert b"\n" not in line
    assert records.decode(line) == record
    # a field of a later version is ignored
    data = json.loads(line)
    assert records.decode(json.dumps({**data, "of_a_later_version": [1]}).encode()) == record


@st.composite
def damage(draw: st.DrawFn, text: bytes) -> bytes:
    """A file after a few accidents: bytes lost, changed, added; a tail cut off."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["lost", "changed", "added", "cut"]))
        noise = draw(st.binary(min_size=1, max_size=20))
        text = {
            "lost": text[:at] + text[end:],
            "changed": text[:at] + noise + text[at + len(noise) :],
            "added": text[:at] + noise + text[at:],
            "cut": text[:at],
        }[kind]
    return text


@given(data=st.data(), rows=st.lists(ANY_RECORD.filter(lambda r: _storable(r)), min_size=1, max_size=6))
@settings(relaxed, max_examples=200)
def test_damage_costs_the_damaged_lines_alone(
    tmp_path: Path, data: st.DataObject, rows: list[Record]
) -> None:
    lines = [records.encode(r) for r in rows]
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(data.draw(damage(b"".join(line + b"\n" for line in lines))))
    found, problems = store.read([path])
    left = [line.strip() for line in path.read_bytes().split(b"\n")]
    assert len(found) + len(problems) == sum(bool(line) for line in left)
    for record, line in zip(rows, lines, strict=True):
        assert found.count(record) >= min(1, left.count(line))
    assert [p.line for p in problems] == sorted({p.line for p in problems})
    for problem in problems:
        assert left[problem.line - 1]
        assert str(problem).startswith(f"{path}:{problem.line}: ")


def _storable(record: Record) -> bool:
    return not isinstance(record, records.RunHeader) or record.schema <= records.SCHEMA


@given(data=st.data(), rows=st.lists(ANY_RECORD.filter(_storable), min_size=1, max_size=4), last=ANY_RECORD)
@settings(relaxed, max_examples=60)
def test_a_run_cut_off_anywhere_goes_on(
    tmp_path: Path, data: st.DataObject, rows: list[Record], last: Record
) -> None:
    header = records.RunHeader(records.SCHEMA, "run", "", "", {})
    whole = b"".join(records.encode(r) + b"\n" for r in (header, *rows))
    first = len(records.encode(header)) + 1
    at = data.draw(st.integers(first, len(whole)))
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[:at])
    with store.Writer(path) as writer:
        writer.write(header)
    found, problems = store.read([path])
    complete = whole[:at].count(b"\n")
    assert found[:complete] == [header, *rows][:complete]
    assert found[-1] == header
    assert len(problems) <= 1


# -- spaces -----------------------------------------------------------------------------------------------

VALUES = st.one_of(st.integers(-8, 512), st.booleans(), st.text("abc", max_size=2))
SPACES = st.dictionaries(
    st.text("xyzuvw", min_size=1, max_size=2),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=lambda v: (type(v).__name__, v)),
    min_size=1,
    max_size=4,
)
CASE = CaseRef("gemm", "16x16x16-fp16", {"m": 16, "n": 16, "k": 16}, "fp16")
ORIGIN = Origin("file", "none", "none.py", "file")


def kernel_of(space: dict[str, list[Any]], refuse: int, baked: int) -> Kernel:
    """A kernel over ``space`` that refuses about one config in ``refuse``, and bakes in all names but the
    first ``baked``."""

    def valid(case: Any, config: Any) -> str | None:
        bad = refuse and zlib.crc32(name_of(config).encode()) % refuse == 0
        return f"refused for {len(str(config)) % 3}" if bad else None

    def static(case: Any, config: Any) -> dict[str, Any]:
        return {name: config[name] for name in list(space)[baked:]}

    def source(static: Any, arch: str) -> str:
        return ""

    def default(case: Any) -> dict[str, Any]:
        return {name: values[0] for name, values in space.items()}

    return Kernel("none/k", "gemm", space, default, source, lambda *args: None, valid, static)  # type: ignore[arg-type,return-value]


def planned(kernel: Kernel, limit: int, seed: int = 0) -> jobs.Planned:
    """The plan of one kernel and case, as the describe worker makes it."""
    job = jobs.PlanJob(ORIGIN, (), (), [CASE], "sm_90a", limit, seed)
    return planning.plan_case(kernel, "source", CASE, "toolchain", job, None)


def name_of(config: Any) -> str:
    return json.dumps(config, sort_keys=True)


@given(space=SPACES)
@relaxed
def test_a_space_is_enumerated_once_and_in_one_order(space: dict[str, list[Any]]) -> None:
    kernel = kernel_of(space, 0, 0)
    configs = list(kernel.configs())
    assert len(configs) == math.prod(len(values) for values in space.values())
    assert len({name_of(c) for c in configs}) == len(configs)
    assert all(list(c) == list(space) and all(c[k] in space[k] for k in c) for c in configs)
    assert configs == list(kernel.configs())
    assert configs[0] == kernel.default(None)  # type: ignore[arg-type]
    assert all(json.loads(name_of(c)) == c for c in configs)


@given(space=SPACES, refuse=st.integers(0, 5), baked=st.integers(0, 3))
@relaxed
def test_a_plan_of_all_splits_the_space_into_candidates_and_refusals(
    space: dict[str, list[Any]], refuse: int, baked: int
) -> None:
    kernel = kernel_of(space, refuse, baked)
    plan = planned(kernel, -1)
    points = {name_of(c) for c in kernel.configs()}
    chosen = [name_of(c.config) for c in plan.candidates]
    assert len(chosen) == len(set(chosen))
    case: Any = None
    assert set(chosen) == {name_of(c) for c in kernel.configs() if kernel.valid(case, c) is None}
    assert sum(plan.pruned.values()) == len(points) - len(chosen)
    assert bool(plan.reason) == (not chosen)
    if chosen and kernel.valid(case, kernel.default(case)) is None:
        assert plan.candidates[0].config == kernel.default(case)
        assert plan.candidates[0].rank == 0
    by_static: dict[str, set[str]] = {}
    for candidate in plan.candidates:
        by_static.setdefault(name_of(candidate.static), set()).add(candidate.key)
    assert all(len(keys) == 1 for keys in by_static.values()), "one specialisation, two artifacts"
    assert len({key for keys in by_static.values() for key in keys}) == len(by_static)


@given(space=SPACES, refuse=st.integers(0, 5), limit=st.integers(1, 12), seed=st.integers(0, 99))
@relaxed
def test_a_sample_of_a_space_is_valid_of_its_size_and_repeats(
    space: dict[str, list[Any]], refuse: int, limit: int, seed: int
) -> None:
    kernel = kernel_of(space, refuse, 0)
    plan = planned(kernel, limit, seed)
    everything = {name_of(c.config) for c in planned(kernel, -1).candidates}
    chosen = [name_of(c.config) for c in plan.candidates]
    assert set(chosen) <= everything
    assert len(chosen) == len(set(chosen)) == min(limit, len(everything))
    assert [c.config for c in planned(kernel, limit, seed).candidates] == [c.config for c in plan.candidates]


# -- statistics -------------------------------------------------------------------------------------------


def race(
    rng: np.random.Generator, truth: Sequence[float], rounds: int, noise: float, drift: float, steps: int
) -> Floats:
    """Times of several participants (rows) who take turns in random order on one clock. It drifts by a share
    of ``drift`` and jumps ``steps`` times by up to a tenth, also within a round; noise has heavy tails."""
    count = len(truth)
    turns = count * rounds
    clock = 1e6 * (1 + drift * np.arange(turns) / turns)
    for at in rng.integers(0, turns, steps):
        clock[at:] *= rng.uniform(0.9, 1.1)
    order = rng.permuted(np.tile(np.arange(count), (rounds, 1)), axis=1)
    times = np.empty((count, rounds))
    for place in range(count):
        times[order[:, place], np.arange(rounds)] = clock[place::count]
    spread = rng.normal(0, noise, times.shape) + 0.2 * noise * rng.standard_t(3, times.shape)
    return np.asarray(truth)[:, None] * times * np.exp(spread)


def of_any_kind(rng: np.random.Generator, truth: Sequence[float]) -> Floats:
    """A race whose length, noise, drift and steps are by chance."""
    rounds = int(rng.choice([15, 30, 60, 133, 200]))
    noise, drift = float(rng.choice([0.0005, 0.003, 0.01, 0.03])), rng.uniform(-0.08, 0.08)
    return race(rng, truth, rounds, noise, drift, int(rng.integers(0, 5)))


@pytest.mark.parametrize("truth", [0.9, 1.0, 1.01, 1.5])
def test_the_95_per_cent_interval_covers_the_truth_in_93_to_97_per_cent(truth: float) -> None:
    rng = np.random.default_rng(round(truth * 1000))
    races = 2000
    covered = 0
    for seed in range(races):
        got = stats.ratio(*of_any_kind(rng, [truth, 1.0]), resamples=400, seed=seed)
        covered += got.lo <= truth <= got.hi
    assert 0.93 <= covered / races <= 0.97


def test_a_against_a_is_a_win_or_a_loss_in_at_most_2_5_per_cent() -> None:
    """With the harness's own band, from a second copy of the baseline in the same race."""
    rng = np.random.default_rng(5)
    races = 2000
    wrong = 0
    for _ in range(races):
        _, baseline, copy = samples = of_any_kind(rng, [1.0, 1.0, 1.0])
        got = stats.fraction(samples, 0, 1)
        width = stats.band(stats.aa_floor(copy, baseline))
        wrong += stats.verdict(got.lo, got.hi, width) in ("win", "loss")
    assert wrong / races <= 0.025


@given(
    rounds=st.integers(15, 300),
    noise=st.floats(2e-4, 0.02),
    drift=st.floats(-0.1, 0.1),
    steps=st.integers(0, 6),
    truth=st.floats(0.5, 2.0),
    seed=st.integers(0, 2**32 - 1),
)
@settings(relaxed, max_examples=12)
def test_intervals_cover_whatever_the_clock_does(
    rounds: int, noise: float, drift: float, steps: int, truth: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    races = 400
    covered = 0
    for number in range(races):
        got = stats.ratio(*race(rng, [truth, 1.0], rounds, noise, drift, steps), resamples=300, seed=number)
        covered += got.lo <= truth <= got.hi
    # give or take three times what 400 races leave open
    open_by = 3.0 * math.sqrt(0.95 * 0.05 / races)
    assert 0.93 - open_by <= covered / races <= 0.97 + open_by


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 2**32 - 1), rounds=st.integers(3, 80))
@settings(relaxed, max_examples=60)
def test_a_ratio_turns_around_with_its_sides_and_not_with_its_unit(
    scale: float, seed: int, rounds: int
) -> None:
    num, den = race(np.random.default_rng(seed), [1.1, 1.0], rounds, 0.01, 0.05, 2)
    there, back = stats.ratio(num, den), stats.ratio(den, num)
    assert there.lo <= there.value <= there.hi
    assert there.value * back.value == pytest.approx(1.0, rel=1e-3)
    scaled = stats.ratio(num * scale, den * scale)
    assert (scaled.value, scaled.lo, scaled.hi) == pytest.approx((there.value, there.lo, there.hi))
