"""Results on disk: what is written is read back, and what cannot be read costs only its line."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsl_bench import records, store
from dsl_bench.errors import RecordError, UsageError
from dsl_bench.records import CaseRef, Choice, Compiled, Participant, Race, RunHeader, Skip, Trial, Tuned

CASE = CaseRef("gemm", "64x64x64-bf16", {"m": 64, "n": 64, "k": 64}, "bf16", ("smoke",))
HEADER = RunHeader(1, "r1", "2026-03-01T10:00:00+00:00", "dsl-bench run", {"gpu": "NVIDIA H200"})


def race(**changes: object) -> Race:
    people = [
        Participant("vendor/cublas", "vendor", "vendor", {}, "h0", "k0"),
        Participant("triton/gemm", "triton", "language", {"bm": 128, "fast": True}, "h1", "k1"),
        Participant("cuda/gemm", "cuda", "language", {}, "h2", "k2", status="incorrect", reason="off by one"),
    ]
    base = Race(
        run_id="r1",
        case=CASE,
        regime="cold",
        process="0",
        started="2026-03-01T10:00:01+00:00",
        participants=people,
        racers=[0, 1],
        samples=[[1000, 1100, 1200], [2000, 2200, 2400]],
        timer="events",
        calls=1,
        flops=2.0 * 64**3,
        bytes=3.0 * 64 * 64 * 2,
    )
    return msgspec.structs.replace(base, **changes)


def skip(text: str) -> Skip:
    return Skip("r1", "gemm", "c", "triton", "", "unavailable", text)


def write(path: Path, *rows: records.Record) -> Path:
    with store.Writer(path) as writer:
        for row in rows:
            writer.write(row)
    return path


def test_written_records_are_read_back_in_order(tmp_path: Path) -> None:
    rows = [HEADER, skip("a"), race()]
    path = write(tmp_path / "deep" / "er" / "run.jsonl", *rows)
    assert store.read([path]) == (rows, [])
    assert store.read([tmp_path]) == (rows, [])
    assert store.read([tmp_path, path])[0] == rows, "a file that two paths lead to is read once"


def test_every_record_is_on_disk_before_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with store.Writer(path) as writer:
        writer.write(HEADER)
        assert store.read([path])[0] == [HEADER]


def test_a_half_written_line_is_named_and_what_a_resumed_run_appends_survives(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", HEADER, race())
    path.write_bytes(path.read_bytes()[:-40])
    found, problems = store.read([path])
    assert found == [HEADER]
    assert [(p.path, p.line) for p in problems] == [(path, 2)]
    assert "cut off" in str(problems[0])
    write(path, skip("later"))
    found, problems = store.read([path])
    assert found == [HEADER, skip("later")]
    assert [p.line for p in problems] == [2]


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"{}",
        b"[1, 2]",
        b"null",
        b'{"kind": "alien"}',
        b'{"type": "race", "run_id": 3}',
        b"\xff\xfe\x00",
        b'{"type":"run","schema":99,"run_id":"x","started":"","command":"","environment":{}}',
        b"[" * 5000,
    ],
)
def test_a_foreign_line_is_named_and_the_rest_is_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(records.encode(HEADER) + b"\n\n" + line + b"\n" + records.encode(skip("b")) + b"\n")
    found, problems = store.read([path])
    assert found == [HEADER, skip("b")]
    assert str(problems[0]).startswith(f"{path}:3: ")


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    plain = msgspec.json.decode(records.encode(skip("x")))
    path = tmp_path / "newer.jsonl"
    path.write_bytes(msgspec.json.encode(plain | {"colour": "green"}) + b"\n")
    assert store.read([path]) == ([skip("x")], [])


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match="cannot write results to"):
        store.Writer(tmp_path / "file" / "run.jsonl")
    with pytest.raises(RecordError, match="cannot write results to"):
        store.Writer(tmp_path)


def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# mine\n")
    with pytest.raises(UsageError, match=r"notes\.md is not a results file"):
        store.Writer(notes)
    assert notes.read_text() == "# mine\n"


def test_a_file_with_nothing_but_a_cut_header_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(records.encode(HEADER)[:30])
    write(path, HEADER)
    found, problems = store.read([path])
    assert found == [HEADER]
    assert [p.cut for p in problems] == [True]


def test_a_full_disk_is_a_record_error(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    writer = store.Writer(tmp_path / "run.jsonl")
    writer.close()
    writer._file = full.open("wb", buffering=0)
    with writer, pytest.raises(RecordError, match="No space left"):
        writer.write(HEADER)


def test_a_record_that_would_not_read_back_is_refused(tmp_path: Path) -> None:
    with (
        store.Writer(tmp_path / "run.jsonl") as writer,
        pytest.raises(RecordError, match="would not read back"),
    ):
        writer.write(race(clock_mhz=float("nan")))


def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no results at"):
        store.read([tmp_path / "nowhere"])


names = st.text(max_size=12)
values = st.one_of(st.integers(-(2**31), 2**31), st.booleans(), st.text(max_size=6))
refs = st.builds(
    CaseRef,
    names,
    names,
    st.dictionaries(names, st.one_of(st.integers(0, 2**31), st.text(max_size=4)), max_size=3),
    st.sampled_from(["bf16", "fp16"]),
    st.lists(names, max_size=2).map(tuple),
)
trials = st.builds(
    Trial,
    names,
    refs,
    names,
    names,
    st.dictionaries(names, values, max_size=3),
    st.sampled_from(records.STATUSES),
)
some = st.one_of(trials, st.builds(Skip, *[names] * 7), st.just(HEADER), st.just(race()))


@given(rows=st.lists(some, max_size=6))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_records_survive_the_disk(tmp_path: Path, rows: list[records.Record]) -> None:
    path = tmp_path / "any.jsonl"
    path.unlink(missing_ok=True)
    write(path, *rows)
    assert store.read([path]) == (rows, [])


@given(noise=st.binary(max_size=200), cut=st.integers(0, 400))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_break_the_reader(tmp_path: Path, noise: bytes, cut: int) -> None:
    path = tmp_path / "noise.jsonl"
    good = records.encode(skip("good"))
    path.write_bytes(good + b"\n" + noise + b"\n" + good + b"\n" + good[: cut % len(good)])
    found, problems = store.read([path])
    assert found.count(skip("good")) >= 2
    lines = path.read_bytes().split(b"\n")
    assert len(found) + len(problems) == sum(bool(line.strip()) for line in lines)
    assert all(1 <= p.line <= len(lines) for p in problems)


def test_load_results_is_one_row_a_participant(tmp_path: Path) -> None:
    frame = store.load_results(write(tmp_path / "run.jsonl", HEADER, race()))
    assert list(frame["kernel"]) == ["vendor/cublas", "triton/gemm", "cuda/gemm"]
    assert list(frame["status"]) == ["ok", "ok", "incorrect"]
    assert frame["time_us"].tolist()[:2] == [1.1, 2.2]
    assert np.isnan(frame["time_us"][2])
    assert frame["config"][1] == {"bm": 128, "fast": True}
    assert frame["samples"][0].tolist() == [1000, 1100, 1200]
    assert set(frame["gpu"]) == {"NVIDIA H200"}


def test_frames_go_back_to_entries(tmp_path: Path) -> None:
    entries = store.entries([HEADER, race(), race(regime="sustained", process="1")])
    again = store.from_frame(store.to_frame(entries))
    assert [(e.kernel, e.regime, e.config, e.groups) for e in again] == [
        (e.kernel, e.regime, e.config, e.groups) for e in entries
    ]
    with pytest.raises(UsageError, match="lacks samples"):
        store.from_frame(store.to_frame(entries).drop(columns="samples"))
    assert store.from_frame(store.to_frame([])) == []


def test_a_participant_that_raced_apart_is_not_counted_as_absent_runner() -> None:
    apart = race(racers=[0], samples=[[1000, 1100, 1200]])
    assert [e.kernel for e in store.entries([apart])] == ["vendor/cublas", "cuda/gemm"]


def test_load_results_warns_about_unreadable_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", HEADER, race())
    path.write_bytes(path.read_bytes() + b"oops\n")
    with pytest.warns(UserWarning, match=r"run\.jsonl:3: not JSON"):
        assert len(store.load_results([path])) == 3


def test_default_paths_are_folders_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert Path("runs") in store.default_paths()
    monkeypatch.setenv(store.ENV_RESULTS, str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    assert store.default_paths()[0] == tmp_path / "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load_results(tmp_path / "mine").empty


class TestPromote:
    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(store.ENV_RESULTS, raising=False)

    def full_run(self, tmp_path: Path) -> Path:
        def compiled(key: str) -> Compiled:
            return Compiled("r1", key, "triton/gemm", "h1", "sm_90a", {}, "ok", 1.0)

        trial = Trial("r1", CASE, "triton/gemm", "h1", {}, "ok", "k9", 1.0, 3)
        tuned = Tuned(
            "r1", CASE, "triton", "random", [Choice("triton/gemm", "h1", {}, "k3")], 9, 0, 0, 1, 1, "trials"
        )
        rows = [HEADER, compiled("k1"), compiled("k3"), compiled("k9"), trial, tuned, race()]
        return write(tmp_path / "runs" / "r1.jsonl", *rows)

    def test_it_keeps_what_reports_read(self, tmp_path: Path) -> None:
        target = store.promote(self.full_run(tmp_path), "GEMM square")
        assert target == Path("results/nvidia-h200/20260301T100000Z-gemm-square.jsonl")
        found, problems = store.read([target])
        assert not problems
        assert [r.key for r in found if isinstance(r, Compiled)] == ["k1", "k3"]
        assert not [r for r in found if isinstance(r, Trial)]
        assert [type(r) for r in found if not isinstance(r, Compiled)] == [RunHeader, Tuned, Race]

    def test_a_run_and_its_promoted_copy_are_the_same_races(self, tmp_path: Path) -> None:
        run = self.full_run(tmp_path)
        target = store.promote(run)
        alone, _ = store.read([run])
        both, problems = store.read([run, target])
        assert not problems
        assert [r for r in both if isinstance(r, Race)] == [r for r in alone if isinstance(r, Race)]
        assert len(store.entries(both)) == len(store.entries(alone))

    def test_the_header_names_no_machine_and_no_folder(self, tmp_path: Path) -> None:
        environment = {**HEADER.environment, "host": "box7"}
        command = "dsl-bench run --winners /home/me/old.jsonl -o /scratch/r1.jsonl"
        header = msgspec.structs.replace(HEADER, environment=environment, command=command)
        target = store.promote(write(tmp_path / "r1.jsonl", header, race()))
        (first, *_), _ = store.read([target])
        assert isinstance(first, RunHeader)
        assert first.command == "dsl-bench run --winners old.jsonl -o r1.jsonl"
        assert first.environment == HEADER.environment

    def test_it_refuses_a_damaged_file(self, tmp_path: Path) -> None:
        path = self.full_run(tmp_path)
        path.write_bytes(path.read_bytes() + b"{ oops\n")
        with pytest.raises(RecordError, match=r"r1\.jsonl:8"):
            store.promote(path)

    def test_it_leaves_out_the_line_that_a_killed_run_cut_and_says_so(self, tmp_path: Path) -> None:
        path = self.full_run(tmp_path)
        path.write_bytes(path.read_bytes() + records.encode(race())[:-40])
        write(path, skip("resumed"))
        said: list[str] = []
        target = store.promote(path, say=said.append)
        assert len(said) == 1
        assert "r1.jsonl:8: cut off" in said[0]
        found, problems = store.read([target])
        assert not problems
        assert skip("resumed") in found

    def test_it_overwrites_other_results_only_when_told_to(self, tmp_path: Path) -> None:
        path = self.full_run(tmp_path)
        target = store.promote(path, "same")
        before = target.read_bytes()
        write(path, skip("more"))
        with pytest.raises(RecordError, match=r"is there already.*--force"):
            store.promote(path, "same")
        assert target.read_bytes() == before
        assert store.promote(path, "same", force=True) == target
        assert target.read_bytes() != before

    def test_it_refuses_results_without_a_gpu(self, tmp_path: Path) -> None:
        bare = msgspec.structs.replace(HEADER, environment={})
        with pytest.raises(RecordError, match="no results of a GPU"):
            store.promote(write(tmp_path / "laptop.jsonl", bare, race()))
        with pytest.raises(RecordError, match="no results of a GPU"):
            store.promote(write(tmp_path / "empty.jsonl", HEADER))

    def test_it_keeps_results_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.full_run(tmp_path)
        target = store.promote(path)
        monkeypatch.setattr(store, "MOST_BYTES", target.stat().st_size + 10)
        assert store.promote(path) == target, "writing the same file again counts it once"
        with pytest.raises(RecordError, match="remove superseded files"):
            store.promote(path, "another")
