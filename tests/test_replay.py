"""Replay: strategies against recorded trials, and what the recorded ones show."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import msgspec
import pytest

from dsl_bench import catalog, records, replay, store, strategies, tables
from dsl_bench.records import CaseRef, RunHeader, Trial

ROOT = Path(__file__).resolve().parents[1]
RECORDED = sorted((ROOT / "results").rglob("*-trials.jsonl.xz")) if (ROOT / "results").is_dir() else []
needs_records = pytest.mark.skipif(not RECORDED, reason="no trials are recorded")


def trial(config: dict[str, int], time: float, **changes) -> Trial:
    size = changes.pop("size", 64)
    case = CaseRef("gemm", f"{size}", {"m": size}, "bf16", ("quick", "square"))
    status = "ok" if time else "hang"
    made = Trial("r1", case, "toy/one", "h1", config, status, median_ns=time)
    return msgspec.structs.replace(made, **changes)


def header(run_id: str = "r1", gpu: str = "NVIDIA H200") -> RunHeader:
    return RunHeader(1, run_id, "", "", {"gpu": gpu})


def valley(size: int = 64, count: int = 36) -> list[Trial]:
    """A recorded search over (a, b) with the best at (4, 2); one config hung."""
    configs = [(a, b) for a in range(6) for b in range(6)][:count]
    return [
        trial(
            {"a": a, "b": b}, 0.0 if (a, b) == (5, 5) else 100.0 + 9 * abs(a - 4) + 5 * abs(b - 2), size=size
        )
        for a, b in configs
    ]


def test_a_space_is_what_was_recorded():
    (space,) = replay.spaces([header(), *valley()])
    assert len(space.points) == 36
    assert space.best == 100.0
    assert sum(t is None for t in space.times.values()) == 1
    assert [p.candidate.rank for p in space.points].count(0) == 1
    assert space.chance == pytest.approx(37 / 2 / 36)


def test_runs_are_pooled_where_gpu_and_source_are_the_same():
    again = [
        msgspec.structs.replace(t, run_id="r2", median_ns=t.median_ns + 2.0 if t.median_ns else 0.0)
        for t in valley()
    ]
    foreign = [msgspec.structs.replace(valley()[0], run_id="r3", median_ns=1.0)]
    older = [msgspec.structs.replace(valley()[0], kernel_hash="h0", median_ns=1.0)]
    heads = [header(), header("r2"), header("r3", "NVIDIA H100")]
    (space,) = replay.spaces([*heads, *older, *valley(), *again, *foreign])
    assert space.best == 101.0
    assert len(space.points) == 36


def test_the_longest_timing_of_a_config_counts():
    short = [msgspec.structs.replace(t, effort=0.333, median_ns=50.0) for t in valley() if t.status == "ok"]
    (space,) = replay.spaces([header(), *short, *valley()])
    assert space.best == 100.0


def test_ranks_and_estimates_are_used_where_they_were_recorded():
    ranked = [
        msgspec.structs.replace(t, rank=0 if t.config == {"a": 4, "b": 2} else 2, estimate=t.median_ns)
        for t in valley()
    ]
    (space,) = replay.spaces([header(), *ranked])
    done, best = replay.walk(space, "exhaustive")
    assert done.quality[0] == 1.0
    assert best == ("toy/one", strategies.config_text({"a": 4, "b": 2}))


@pytest.mark.parametrize("name", strategies.available())
def test_every_strategy_walks_the_whole_space_once(name):
    (space,) = replay.spaces([header(), *valley()])
    done, _ = replay.walk(space, name, seed=1)
    assert len(done.quality) == 36
    assert done.quality == sorted(done.quality)
    assert done.quality[-1] == 1.0
    assert done.at(1.0) == 1.0


def test_a_budget_ends_a_walk():
    (space,) = replay.spaces([header(), *valley()])
    done, _ = replay.walk(space, "random", trials=5)
    assert len(done.quality) == 5
    missed = replay.Walk(space, "random", 0, [0.5] * 5)
    assert missed.reached == 1.0


def test_local_search_beats_chance_in_a_valley():
    (space,) = replay.spaces([header(), *valley()])
    walks = replay.run([space], ["local"], seeds=range(20))
    row = replay.rows(walks)[-1]
    assert row["workload"] == "all"
    assert row["reached"] < 0.8 * row["chance"]


def test_what_was_learned_on_one_case_helps_on_the_next():
    found = replay.spaces([header(), *valley(64), *valley(128), *valley(256)])
    assert len(found) == 3
    with_hints = replay.rows(replay.run(found, ["random"], seeds=range(10)))[-1]
    without = replay.rows(replay.run(found, ["random"], seeds=range(10), transfer=False))[-1]
    assert with_hints["reached"] < without["reached"]


def test_baselines_stand_for_themselves():
    tuned = records.Tuned(
        "r1", valley()[0].case, "lib/gemm", "local", [], 1, 0, 0, 0.0, 0.0, "space", "NVIDIA H200"
    )
    theirs = [msgspec.structs.replace(t, kernel="lib/gemm") for t in valley()]
    found = replay.spaces([header(), tuned, *theirs, *valley()])
    assert {(s.contender, s.vendor) for s in found} == {("lib/gemm", True), ("toy", False)}


def write(path: Path, found: list[records.Record]) -> Path:
    lines = b"".join(records.encode(r) + b"\n" for r in found)
    path.write_bytes(lzma.compress(lines) if path.suffix == ".xz" else lines)
    return path


def test_compressed_trials_are_read_when_asked_for(tmp_path):
    write(tmp_path / "x-trials.jsonl.xz", [header(), *valley()])
    assert store.read([tmp_path])[0] == []
    found, problems = store.read([tmp_path], trials=True)
    assert len(found) == 37
    assert problems == []
    assert len(store.read([tmp_path / "x-trials.jsonl.xz"])[0]) == 37


def test_a_broken_compressed_file_is_a_problem_and_no_more(tmp_path):
    path = write(tmp_path / "x-trials.jsonl.xz", [header(), *valley()])
    path.write_bytes(path.read_bytes()[:-40])
    _, problems = store.read([tmp_path], trials=True)
    assert len(problems) == 1
    assert "x-trials.jsonl.xz" in str(problems[0])


def test_the_command_line_replays(cli, tmp_path):
    write(tmp_path / "mine.jsonl", [header(), *valley(64), *valley(128)])
    done = cli("tune", "--replay", "mine.jsonl", "--strategy", "local", "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [r["strategy"] for r in rows] == ["local", "local"]
    assert rows[0]["cases"] == 2
    assert cli("tune", "--replay", "mine.jsonl", "--case", "128", "-f", "csv").returncode == 0
    assert cli("tune", "--replay", "mine.jsonl", "--backend", "other").returncode == 3
    assert cli("tune", "--replay", "nowhere.jsonl").returncode == 2
    wrong = cli("tune", "--replay", "mine.jsonl", "--strategy", "locl")
    assert wrong.returncode == 2
    assert "did you mean local" in wrong.stderr


def reached(found: list[records.Record]) -> list[float]:
    """By strategy, the median share of a search's trials that it takes to within 2 % of the best."""
    spaces = [s for s in replay.spaces(found) if not s.vendor]
    rows = replay.rows(replay.run(spaces, ["local", "halving"]))
    return [r["reached"] for r in rows if r["workload"] == "all"]


@needs_records
def test_the_recorded_searches_reach_98_percent_in_a_quarter_of_their_trials():
    found, problems = store.read([ROOT / "results"], trials=True)
    assert problems == []
    assert max(reached(found)) <= 0.25
    now = catalog.load(probe=False).hashes()
    current = [r for r in found if not isinstance(r, Trial) or now.get(r.kernel) == r.kernel_hash]
    assert min(reached(current)) <= 0.15


@needs_records
def test_the_table_in_the_docs_is_what_a_replay_gives():
    found, _ = store.read([ROOT / "results" / "nvidia-h200" / "20261202-gemm-trials.jsonl.xz"])
    spaces = [s for s in replay.spaces(found) if s.contender in ("cuda", "tilelang", "triton")]
    rows = replay.rows(replay.run(spaces, ["exhaustive", "random", "local", "halving"]))
    shown = [r for r in rows if r["strategy"] == "local" or r["workload"] == "all"]
    text = (ROOT / "docs" / "tuning.md").read_text()
    table = text.partition("<!-- replay -->\n")[2].partition("\n<!-- /replay -->")[0]
    assert table == tables.render(shown, "md")
