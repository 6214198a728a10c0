"""``compare``: who became faster or slower, and how often it is wrong about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dsl_bench import compare, stats, store
from dsl_bench.records import Race, Record, RunHeader

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def recorded() -> list[Record]:
    """The recorded races and the headers of their runs."""
    found, _ = store.read([RESULTS])
    return [r for r in found if isinstance(r, Race | RunHeader)]


def write(path: Path, records: list[Record]) -> Path:
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(r) + b"\n" for r in records))
    return path


def changed(race: Race, backend: str, factor: float) -> Race:
    """The race with one language's samples multiplied."""
    samples = [
        [round(x * factor) for x in row] if race.participants[index].backend == backend else list(row)
        for index, row in zip(race.racers, race.samples, strict=True)
    ]
    return msgspec.structs.replace(race, samples=samples)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A dozen recorded races of GEMM in one file, and their records."""
    found = recorded()
    cases = sorted({r.case.name for r in found if isinstance(r, Race) and "square" in r.case.groups})[:4]
    kept = [r for r in found if not isinstance(r, Race) or r.case.name in cases]
    return write(tmp_path_factory.mktemp("side") / "before.jsonl", kept), kept


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsl_bench", "compare", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)


def test_results_against_themselves_are_no_change(some: tuple[Path, list[Record]]) -> None:
    done = run(some[0], some[0], "-f", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows and {r["verdict"] for r in rows} <= {"same", "ambiguous"}
    assert all(abs(r["change"] - 1) < 1e-9 for r in rows)


def test_a_loss_is_found_and_exits_4_unless_the_threshold_allows_it(
    some: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    slow = [changed(r, "triton", 1.05) if isinstance(r, Race) else r for r in some[1]]
    after = write(tmp_path / "after.jsonl", slow)
    done = run(some[0], after, "-f", "json")
    assert done.returncode == 4, done.stderr
    rows = json.loads(done.stdout)
    assert {r["backend"] for r in rows if r["verdict"] == "slower"} == {"triton"}
    assert run(some[0], after, "--threshold", "10").returncode == 0
    back = run(after, some[0], "-f", "json")
    assert back.returncode == 0 and any(r["verdict"] == "faster" for r in json.loads(back.stdout))


def test_what_is_on_one_side_only_is_missing_with_its_reason(
    some: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    name = next(r.case.name for r in some[1] if isinstance(r, Race))
    less = [r for r in some[1] if not isinstance(r, Race) or r.case.name != name]
    after = write(tmp_path / "after.jsonl", less)
    rows = json.loads(run(some[0], after, "-f", "json").stdout)
    gone = [r for r in rows if r["case"] == name]
    assert gone and all(r["verdict"] == "missing" and "not there" in r["reason"] for r in gone)


def test_another_version_of_the_baseline_is_named_and_not_compared(
    some: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    def other(race: Race) -> Race:
        people = [
            msgspec.structs.replace(p, version="cublas 99") if p.backend == "vendor" else p
            for p in race.participants
        ]
        return msgspec.structs.replace(race, participants=people)

    after = write(tmp_path / "after.jsonl", [other(r) if isinstance(r, Race) else r for r in some[1]])
    done = run(some[0], after, "-f", "json")
    rows = json.loads(done.stdout)
    assert {r["verdict"] for r in rows} == {"ambiguous"}
    assert all("cublas 99" in r["reason"] for r in rows)
    assert "differs: vendor" in done.stderr


def test_a_side_may_be_a_run_or_a_revision_and_a_wrong_one_is_told() -> None:
    run_id = next(r.run_id for r in recorded() if isinstance(r, Race))
    assert compare.load(run_id).standings
    wrong = run("no-such-thing", RESULTS)
    assert wrong.returncode == 2 and "no-such-thing" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_a_git_revision_holds_its_own_results(
    some: tuple[Path, list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    target = folder / "old.jsonl"
    target.write_bytes(some[0].read_bytes())

    def git(*args: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "old")
    target.unlink()
    monkeypatch.setenv("DSL_BENCH_RESULTS", str(folder))
    assert compare.load("HEAD").standings.keys() == compare.load(str(some[0])).standings.keys()


# -- how often it errs ----------------------------------------------------------------------------------

Pair = tuple[Any, Any]


def simulated(pairs: list[Pair], spread: float, loss: float, rng: np.random.Generator) -> list[Pair]:
    """Two processes with the rounds' noise and drift of recorded races and a spread between processes."""
    made = []
    for _ in range(2):
        vendor, ours = (np.asarray(x, dtype=np.float64) for x in pairs[rng.integers(len(pairs))])
        n = len(vendor)
        block = stats.block_length(n)
        starts = rng.integers(0, n, size=-(-n // block))
        rounds = ((starts[:, None] + np.arange(block)) % n).ravel()[:n]
        ratios = vendor[rounds] / ours[rounds] / np.median(vendor / ours)
        made.append((ratios * np.exp(rng.normal(0.0, spread)) / (1.0 + loss), np.ones(n)))
    return made


@pytest.mark.sampled(0)
def test_a_loss_of_three_per_cent_is_found_and_none_is_invented() -> None:
    """1000 pairs (a language on a case, two processes a side, both regimes) with the noise of the recorded
    races: slower is a verdict in either regime."""
    side = compare.load(str(RESULTS))
    slots: dict[tuple[str, str], dict[compare.Key, Any]] = defaultdict(dict)
    for key, numbers in side.numbers.items():
        slots[key[:2]][key] = numbers
    truth = compare.Spreads((side,))
    rng = np.random.default_rng(20)
    slower = {0.0: 0, 0.03: 0}
    pairs = 0
    while pairs < 1000:
        drawn = [sorted(slots)[k] for k in rng.choice(len(slots), 20, replace=False)]
        rows = {key: n for case in drawn for key, n in slots[case].items()}
        pairs += len({(key[1], key[3]) for key in rows})
        for loss in slower:
            spreads = compare.Spreads(())
            made = {}
            for key, n in rows.items():
                sd = truth.of(key, n.mean("time_us"))
                recorded_pairs = compare._pairs(n, n.baseline)
                made[key] = (
                    simulated(recorded_pairs, sd, 0.0, rng),
                    simulated(recorded_pairs, sd, loss, rng),
                )
                for half in made[key]:
                    spreads.add(key, n.mean("time_us"), [float(np.median(v / o)) for v, o in half])
            losers = set()
            for key, (before, after) in made.items():
                n = rows[key]
                got = stats.change(before, after, spreads.of(key, n.mean("time_us")), resamples=300)
                if stats.verdict(got.lo, got.hi, stats.band(n.floor or 0.0)) == "loss":
                    losers.add((key[1], key[3]))
            slower[loss] += len(losers)
    assert slower[0.0] / pairs <= 0.025
    assert slower[0.03] / pairs >= 0.95
