"""The report's rows, ratios and summaries on synthetic races whose outcome is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dsl_bench import api, insights, listing, report, store, tables
from dsl_bench.errors import UsageError
from dsl_bench.records import (
    Accuracy,
    CaseRef,
    Compiled,
    Failure,
    Participant,
    Race,
    Record,
    Regime,
    RunHeader,
    Skip,
)

GPU = "NVIDIA H200"
HASHES = {"triton/gemm": "t1", "tilelang/gemm": "l1", "cuda/gemm": "c1"}


def case(name: str, *groups: str) -> CaseRef:
    return CaseRef("gemm", f"{name}-bf16", {"m": 4096, "n": 4096, "k": 4096}, "bf16", groups or ("square",))


BIG, SMALL = case("4096", "quick", "square"), case("1024")


def header(run_id: str, day: int = 1) -> RunHeader:
    env = {"gpu": GPU, "driver": "580.95"}
    return RunHeader(1, run_id, f"2026-03-{day:02d}T10:00:00+00:00", "dsl-bench run", env)


def race(
    speeds: Mapping[str, float],
    at: CaseRef = BIG,
    regime: Regime = "cold",
    *,
    run_id: str = "r1",
    process: str = "0",
    day: int = 1,
    seed: int = 0,
    hashes: Mapping[str, str] | None = None,
    statuses: Mapping[str, str] | None = None,
    noise: float = 0.001,
    flops: float = 2.0 * 4096**3,
) -> Race:
    """A race of 300 rounds; ``speeds`` are relative to 180 µs. The first baseline's twin races along."""
    rng = np.random.default_rng(seed)
    clock = rng.normal(1.0, 0.05, 300)
    people, samples = [], []
    hashes, statuses = hashes or HASHES, statuses or {}
    twin = next((k for k in speeds if k.startswith("vendor/")), None)
    for kernel, speed in [*speeds.items(), *([(twin, speeds[twin])] if twin else [])]:
        backend = kernel.partition("/")[0]
        second = backend == "vendor" and any(p.kernel == kernel for p in people)
        role = "aa" if second else "vendor" if backend == "vendor" else "language"
        people.append(
            Participant(
                kernel,
                backend,
                role,
                {"tile": 128},
                kernel_hash=hashes.get(kernel, "v"),
                version=f"{backend} 1.0",
                status=statuses.get(kernel, "ok"),
                reason="too far off" if kernel in statuses else "",
                host_us=5.0,
                accuracy=[Accuracy("normal", 0.0011, 0.01, 0.001, 0.01)],
            )
        )
        samples.append((180_000 / speed * clock * rng.normal(1.0, noise, 300)).astype(int).tolist())
    running = [i for i, p in enumerate(people) if p.status == "ok"]
    return Race(
        run_id=run_id,
        case=at,
        regime=regime,
        process=process,
        started=f"2026-03-{day:02d}T10:00:{int(process) + 1:02d}+00:00",
        participants=people,
        racers=running,
        samples=[samples[i] for i in running],
        timer="events",
        calls=1,
        flops=flops,
        bytes=3.0 * 4096 * 4096 * 2,
        clock_mhz=1500.0,
    )


EVEN = {"vendor/cublas": 1.0, "triton/gemm": 1.0, "tilelang/gemm": 0.9, "cuda/gemm": 1.05}


def by_backend(rows: list[dict[str, Any]], **wanted: object) -> dict[str, dict[str, Any]]:
    kept = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    found = {r["backend"]: r for r in kept}
    assert len(found) == len(kept), "one row a backend"
    return found


def test_rows_have_the_public_fields_in_their_order() -> None:
    rows = report.rows([header("r1"), race(EVEN)], HASHES, [BIG])
    assert list(rows[0]) == report.ROW_FIELDS
    expected = (
        "workload group dtype regime backend geomean min cases total wins ties losses ambiguous stale gpu"
    )
    assert list(report.geomeans(rows)[0]) == expected.split()


def test_each_workload_keeps_the_order_of_its_own_groups() -> None:
    other = CaseRef("attention", "a", {}, "bf16", ("square", "quick"))
    rows = report.rows([header("r1"), race(EVEN)], HASHES, [other, BIG])
    assert list(dict.fromkeys(r["group"] for r in rows)) == ["quick", "square"]


def test_a_summary_counts_rows_of_changed_kernels_and_shows_the_first_runs_handful_last() -> None:
    found = [header("r1"), race(EVEN), race(EVEN, regime="sustained")]
    stale = report.rows(found, HASHES | {"triton/gemm": "newer"}, [BIG])
    assert {m["backend"]: m["stale"] for m in report.geomeans(stale)} == {
        "triton": 1,
        "tilelang": 0,
        "cuda": 0,
    }
    lines = report.summary(report.rows(found, HASHES, [BIG]), found, [BIG]).splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| gemm")] == ["square", "quick"]


def test_win_tie_and_loss() -> None:
    rows = by_backend(report.rows([header("r1"), race(EVEN)], HASHES), group="square")
    assert {b: r["verdict"] for b, r in rows.items()} == {"triton": "tie", "tilelang": "loss", "cuda": "win"}
    assert rows["cuda"]["fraction"] == pytest.approx(1.05, abs=0.002)
    assert rows["cuda"]["fraction_lo"] < rows["cuda"]["fraction"] < rows["cuda"]["fraction_hi"]
    assert rows["triton"]["floor"] < 0.001
    assert rows["triton"]["time_us"] == pytest.approx(180, rel=0.02)
    assert rows["triton"]["tflops"] == pytest.approx(763, rel=0.02)
    assert 0 < rows["triton"]["sol"] < 1
    assert rows["triton"]["error"] == pytest.approx(1.1)
    assert rows["triton"]["stale"] is False


def test_a_noisy_near_tie_is_ambiguous() -> None:
    noisy = race({"vendor/cublas": 1.0, "triton/gemm": 1.006}, noise=0.02)
    rows = by_backend(report.rows([header("r1"), noisy], HASHES), group="square")
    assert rows["triton"]["verdict"] == "ambiguous"


def test_the_fastest_baseline_is_the_denominator_and_the_default_stands_beside_it() -> None:
    speeds = {"vendor/cublas": 1.0, "vendor/cublaslt": 1.1, "triton/gemm": 1.0}
    row = by_backend(report.rows([header("r1"), race(speeds)], HASHES), group="square")["triton"]
    assert row["baseline"] == "vendor/cublaslt"
    assert row["baseline_version"] == "vendor 1.0"
    assert row["fraction"] == pytest.approx(1 / 1.1, abs=0.002)
    assert row["fraction_default"] == pytest.approx(1.0, abs=0.002)


def test_a_baseline_that_failed_its_check_is_no_denominator() -> None:
    speeds = {"vendor/cublas": 1.0, "vendor/cublaslt": 2.0, "triton/gemm": 1.0}
    wrong = race(speeds, statuses={"vendor/cublaslt": "incorrect"})
    row = by_backend(report.rows([header("r1"), wrong], HASHES), group="square")["triton"]
    assert row["baseline"] == "vendor/cublas"
    alone = race({"vendor/cublas": 1.0, "triton/gemm": 1.0}, statuses={"vendor/cublas": "incorrect"})
    row = by_backend(report.rows([header("r1"), alone], HASHES), group="square")["triton"]
    assert (row["status"], row["fraction"], row["verdict"]) == ("baseline_missing", None, None)
    assert row["time_us"] is not None


def test_two_processes_widen_the_interval_to_what_they_disagree_on() -> None:
    one = race(EVEN | {"cuda/gemm": 1.05})
    other = race(EVEN | {"cuda/gemm": 1.01}, process="1", seed=1)
    single = by_backend(report.rows([header("r1"), one], HASHES), group="square")["cuda"]
    both = by_backend(report.rows([header("r1"), one, other], HASHES), group="square")["cuda"]
    assert both["fraction"] == pytest.approx(1.03, abs=0.003)
    assert both["fraction_hi"] - both["fraction_lo"] > 5 * (single["fraction_hi"] - single["fraction_lo"])
    assert both["verdict"] == "ambiguous", "the spread between processes is part of the band"


def test_the_newest_race_of_the_trees_kernel_counts_and_not_the_best() -> None:
    records = [header("r1"), race(EVEN | {"cuda/gemm": 1.2})]
    slower = race(EVEN | {"cuda/gemm": 0.8}, run_id="r2", day=2)
    slower = msgspec.structs.replace(
        slower, participants=[msgspec.structs.replace(p, config={"tile": 64}) for p in slower.participants]
    )
    rows = report.rows([*records, header("r2", 2), slower], HASHES)
    assert by_backend(rows, group="square")["cuda"]["fraction"] == pytest.approx(0.8, abs=0.01)
    assert by_backend(rows, group="square")["cuda"]["run_id"] == "r2"


def test_races_of_another_source_are_passed_over_or_marked_stale() -> None:
    old = race(EVEN | {"cuda/gemm": 0.7}, hashes=HASHES | {"cuda/gemm": "c0"}, run_id="r0", day=3)
    records: list[Record] = [header("r0", 3), old, header("r1"), race(EVEN)]
    current = by_backend(report.rows(records, HASHES), group="square")["cuda"]
    assert (current["stale"], current["kernel_hash"]) == (False, "c1")
    stale = by_backend(report.rows(records[:2], HASHES), group="square")["cuda"]
    assert (stale["stale"], stale["kernel_hash"]) == (True, "c0")
    assert by_backend(report.rows(records[:2]), group="square")["cuda"]["stale"] is False


def test_a_failure_in_the_newest_run_is_not_hidden_by_an_older_success() -> None:
    hang = Failure("r2", "gemm", BIG.name, "cuda", "cuda/gemm", "hang", "race", "no sign of life for 60 s")
    without = race({k: v for k, v in EVEN.items() if k != "cuda/gemm"}, run_id="r2", day=2)
    records = [header("r1"), race(EVEN), header("r2", 2), hang, without]
    row = by_backend(report.rows(records, HASHES), group="square")["cuda"]
    assert (row["status"], row["reason"]) == ("hang", "race: no sign of life for 60 s")
    assert row["fraction"] is None
    wrong = race(EVEN, run_id="r2", day=2, statuses={"cuda/gemm": "incorrect"})
    row = by_backend(report.rows([header("r1"), race(EVEN), header("r2", 2), wrong], HASHES), group="square")[
        "cuda"
    ]
    assert (row["status"], row["reason"]) == ("incorrect", "too far off")


def test_a_laptops_skips_do_not_touch_what_a_gpu_recorded() -> None:
    bare = RunHeader(1, "laptop", "2026-04-01T00:00:00+00:00", "dsl-bench run", {})
    skip = Skip("laptop", "gemm", BIG.name, "cuda", "", "unavailable", "no GPU")
    rows = report.rows([header("r1"), race(EVEN), bare, skip], HASHES)
    assert by_backend(rows, group="square")["cuda"]["status"] == "ok"
    assert report.rows([bare, skip], HASHES) == []


def test_refused_and_absent_languages_are_rows_with_a_reason() -> None:
    speeds = {"vendor/cublas": 1.0, "triton/gemm": 1.0}
    skip = Skip("r1", "gemm", BIG.name, "cuda", "cuda/gemm", "invalid_config", "rows must start on 16 bytes")
    missing = Skip("r1", "gemm", BIG.name, "vendor", "vendor/cublaslt", "baseline_missing", "not here")
    records = [header("r1"), race(speeds), race(EVEN, SMALL), skip, missing]
    rows = by_backend(report.rows(records, HASHES), case=BIG.name, group="square", regime="cold")
    assert (rows["cuda"]["status"], rows["cuda"]["reason"]) == (
        "invalid_config",
        "rows must start on 16 bytes",
    )
    assert rows["tilelang"]["status"] == "missing"
    assert set(rows) == {"triton", "tilelang", "cuda"}, "vendors are no rows"


def test_geomeans_count_every_case_and_take_the_worse_regime_case_by_case() -> None:
    def both(at: CaseRef, cold: float, sustained: float, seed: int) -> list[Record]:
        speeds = {"vendor/cublas": 1.0, "cuda/gemm": cold}
        return [
            race(speeds, at, "cold", seed=seed),
            race(speeds | {"cuda/gemm": sustained}, at, "sustained", seed=seed + 1),
        ]

    third, never = case("8192"), case("16384")
    refused = Failure("r1", "gemm", third.name, "cuda", "cuda/gemm", "oom", "race", "out of memory")
    records = [header("r1"), *both(BIG, 1.1, 0.9, 1), *both(SMALL, 0.8, 1.2, 3), refused]
    cases = [BIG, SMALL, third, never]
    rows = report.rows(records, HASHES, cases)
    means = {(m["group"], m["regime"]): m for m in report.geomeans(rows, cases)}
    worse = means["square", "worse"]
    assert worse["geomean"] == pytest.approx((0.9 * 0.8) ** 0.5, abs=0.003)
    assert worse["min"] == pytest.approx(0.8, abs=0.003)
    assert (worse["cases"], worse["total"]) == (2, 4)
    assert (worse["wins"], worse["ties"], worse["losses"]) == (0, 0, 2)
    assert means["square", "cold"]["geomean"] == pytest.approx((1.1 * 0.8) ** 0.5, abs=0.003)
    assert (means["square", "sustained"]["wins"], means["square", "sustained"]["losses"]) == (1, 1)
    assert (means["quick", "worse"]["cases"], means["quick", "worse"]["total"]) == (1, 1)


def test_a_case_with_one_regime_is_not_worse_than_anything() -> None:
    records = [header("r1"), race(EVEN), race(EVEN, SMALL), race(EVEN, SMALL, "sustained")]
    means = report.geomeans(report.rows(records, HASHES))
    square = {m["backend"]: m for m in means if (m["group"], m["regime"]) == ("square", "worse")}
    assert (square["cuda"]["cases"], square["cuda"]["total"]) == (1, 2)


def test_a_group_without_any_success_has_no_geomean() -> None:
    wrong = race(EVEN, SMALL, statuses={"cuda/gemm": "incorrect"})
    means = report.geomeans(report.rows([header("r1"), wrong], HASHES))
    mean = next(m for m in means if m["backend"] == "cuda")
    assert (mean["geomean"], mean["min"], mean["cases"], mean["total"]) == (None, None, 0, 1)


def test_faster_than_physics_is_no_result() -> None:
    absurd = race(EVEN, flops=1e13)
    row = by_backend(report.rows([header("r1"), absurd], HASHES), group="square")["cuda"]
    assert (row["status"], row["fraction"]) == ("implausible", None)
    assert row["sol"] > 1.05


def test_slow_participants_that_raced_apart_are_measured_where_they_raced() -> None:
    together = race({k: v for k, v in EVEN.items() if k != "tilelang/gemm"})
    apart = race({"vendor/cublas": 1.0, "tilelang/gemm": 0.5}, seed=4)
    everybody = [*together.participants, apart.participants[1]]
    together = msgspec.structs.replace(together, participants=everybody)
    rows = by_backend(report.rows([header("r1"), together, apart], HASHES), group="square")
    assert rows["tilelang"]["fraction"] == pytest.approx(0.5, abs=0.002)
    assert rows["cuda"]["fraction"] == pytest.approx(1.05, abs=0.002)


README = f"# title\n\n{report.BEGIN}\nnothing yet\n{report.END}\n\nrest\n"


def test_the_readme_table_is_replaced_between_its_markers_and_stays_put() -> None:
    records = [header("r1"), race(EVEN), race(EVEN, regime="sustained", process="1")]
    rows = report.rows(records, HASHES, [BIG, SMALL])
    text = report.render_readme(README, rows, records, [BIG, SMALL])
    assert text.startswith("# title\n\n")
    assert text.endswith("\n\nrest\n")
    assert "nothing yet" not in text
    for wanted in (GPU, "2026-03-01", "driver 580.95", "triton 1.0", "(1 of 2)", "| gemm | square | bf16 |"):
        assert wanted in text
    assert report.render_readme(text, rows, records, [BIG, SMALL]) == text
    with pytest.raises(UsageError, match="results:begin"):
        report.render_readme("# title", rows, records)


def test_stale_rows_show_in_the_readme() -> None:
    records = [header("r1"), race(EVEN), race(EVEN, regime="sustained")]
    changed = report.rows(records, HASHES | {"cuda/gemm": "c2"})
    assert "changed since" in report.summary(changed, records)
    assert "changed since" not in report.summary(report.rows(records, HASHES), records)


def test_notebooks_get_the_same_numbers() -> None:
    records = [header("r1"), race(EVEN), race(EVEN, regime="sustained")]
    frame = store.to_frame(store.entries(records))
    rows = report.rows(records)
    fractions = report.fraction_of(frame)
    assert list(fractions.columns) == report.ROW_FIELDS
    assert fractions["fraction"].tolist() == [r["fraction"] for r in rows]
    cold = report.fraction_of(frame[frame["regime"] == "cold"])
    assert set(cold["regime"]) == {"cold"}
    assert list(report.best(frame)["backend"]) == ["cuda"] * 4, "two groups, two regimes"
    means = report.geomean(frame)
    assert list(means.columns) == report.MEAN_FIELDS
    assert means["geomean"].tolist() == [m["geomean"] for m in report.geomeans(rows)]
    assert report.fraction_of(frame.iloc[:0]).empty
    assert report.best(frame.iloc[:0]).empty


ROWS = [
    {"name": "a|b", "x": 1.23456, "n": 3, "c": {"tile": 64}, "none": None, "nan": float("nan")},
    {"name": "é"},
]


def test_json_is_one_array_with_an_object_a_line() -> None:
    text = tables.render(ROWS, "json")
    assert len(text.splitlines()) == 4
    first, second = json.loads(text)
    assert first == {"name": "a|b", "x": 1.23456, "n": 3, "c": {"tile": 64}, "none": None, "nan": None}
    assert second == {"name": "é", "x": None, "n": None, "c": None, "none": None, "nan": None}
    assert tables.render([], "json") == "[]"


def test_csv_keeps_every_digit_and_nests_json() -> None:
    lines = tables.render(ROWS, "csv").splitlines()
    assert lines[0] == "name,x,n,c,none,nan"
    assert lines[1] == 'a|b,1.23456,3,"{""tile"": 64}",,'


def test_markdown_escapes_and_aligns() -> None:
    lines = tables.render(ROWS, "md", ["name", "x"]).splitlines()
    assert lines == ["| name | x |", "|---|---:|", "| a\\|b | 1.235 |", "| é |  |"]


def test_the_terminals_table_shows_every_value_whole() -> None:
    text = tables.render([*ROWS, {"name": "long " * 30, "x": 12345.678}], "table")
    assert "1.235" in text
    assert "12346" in text
    assert "tile=64" in text
    assert "nan" not in text.splitlines()[2]
    assert "\x1b" not in text


def test_an_unknown_format_names_the_closest() -> None:
    with pytest.raises(UsageError, match="did you mean json"):
        tables.render(ROWS, "jsn")


def test_rows_from_one_process_are_named_in_the_readme() -> None:
    first = [header("r1"), race(EVEN), race(EVEN, regime="sustained")]
    alone = report.summary(report.rows(first, HASHES), first)
    assert "from one process only: gemm quick, square." in alone or "only: gemm square, quick." in alone
    second = [race(EVEN, process="1", seed=1), race(EVEN, regime="sustained", process="1", seed=1)]
    both = [*first, *second]
    assert "from one process only" not in report.summary(report.rows(both, HASHES), both)


def test_the_headline_names_the_fastest_of_those_with_the_most_cases() -> None:
    def mean(backend: str, geomean: float | None, cases: int, group: str = "square") -> report.Row:
        made: report.Row = dict.fromkeys(report.MEAN_FIELDS)
        made |= {"workload": "gemm", "group": group, "dtype": "bf16", "backend": backend, "total": 5}
        return made | {"geomean": geomean, "min": geomean, "cases": cases}

    held = [mean("cuda", 1.2, 3), mean("tilelang", 1.0, 5), mean("triton", 0.995, 5), mean("odd", None, 0)]
    (row,), names = report.headline(held)
    assert row["fastest"] == "tilelang, triton"
    assert row["cuda"] == "1.200 / 1.200 (3 of 5)" and row["odd"] == "–"
    assert names == ["workload", "group", "dtype", "cases", "cuda", "tilelang", "triton", "odd", "fastest"]
    (row,), _ = report.headline(held[1:3], worst=False)
    assert (row["fastest"], row["tilelang"]) == ("all", "1.000")


def test_gaps_say_what_has_no_number_and_why() -> None:
    rows = report.rows([header("r1"), race(EVEN)], HASHES, [BIG, SMALL])
    assert insights.gaps(rows) == []
    bad = [r | {"fraction": None, "status": "incorrect", "reason": "far off"} for r in rows[:1]]
    found = insights.gaps([*bad, *rows[1:]], [BIG, SMALL])
    assert [(g["status"], g["reason"]) for g in found] == [
        ("incorrect", "far off"),
        ("missing", "not raced yet"),
    ]
    lines = insights.gap_lines(found)
    assert lines[0].endswith("incorrect: far off") and lines[1] == f"not raced yet: gemm {SMALL.name}"


def test_sections_leave_out_what_a_terminal_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"w": w, "name": "n" * 30, "x": 1.5, "y": 2.0, "none": None} for w in ("one", "one", "two")]
    text, gone = tables.sections(rows, ["w"], ["w", "name", "x", "y", "none"], [("x",), ("y",)])
    assert gone == [] and text.count("1.500") == 3 and "none" not in text
    assert [line for line in text.splitlines() if line in ("one", "two")] == ["one", "two"]
    monkeypatch.setenv("COLUMNS", "43")
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True, raising=False)
    text, gone = tables.sections(rows, ["w"], ["w", "name", "x", "y"], [("x",), ("y",)])
    assert gone == ["x"] and "n" * 30 in text and "2.000" in text
    assert max(map(len, text.splitlines())) <= 43


def test_a_failed_compile_is_one_failure() -> None:
    compiled = Compiled("r1", "k", "cuda/x", "h", "sm_90a", {}, "compile_error", 0.0, reason="error: line 1")
    failure = Failure("r1", "gemm", "", "cuda", "cuda/x", "compile_error", "compile", "error: line 1")
    other = msgspec.structs.replace(failure, kernel="cuda/y")
    found = api.Report(Path("r.jsonl"), [compiled, failure, other])
    assert [(r["what"], r["kernel"]) for r in listing.outcome_rows(found)] == [
        ("compile", "cuda/x"),
        ("failure", "cuda/y"),
    ]
    assert listing.outcome_summary(found) == "compile: 1 compile_error; failure: 1 compile_error"
