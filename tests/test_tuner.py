"""The tuner against a made-up device: every config gets one verdict, whatever it does to its worker."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dsl_bench import costmodel, jobs, planning, pruning, records, spending, strategies
from dsl_bench.contest import Contender, Contest, Memory
from dsl_bench.jobs import Built, Candidate, Done, Origin, Partial, Planned, Progress, Racer, Refused
from dsl_bench.kernel import Call, Kernel
from dsl_bench.pool import Outcome
from dsl_bench.records import CaseRef, Choice, Compiled, Facts, Ledger, Pruned, RunHeader, Trial, Tuned
from dsl_bench.runner import Runner
from dsl_bench.session import Progressor, Settings
from dsl_bench.spending import Purse
from dsl_bench.transfer import Lessons
from dsl_bench.tuner import Tuner
from dsl_bench.workload import Case, TensorSpec, Workload

ORIGIN = Origin("backend", "toy", "toy:BACKEND")
TOY = Contender("toy", "toy", "language")
SMALL = CaseRef("gemm", "64x64x64-bf16", {"m": 64, "n": 64, "k": 64}, "bf16", ("square",))
LARGE = CaseRef("gemm", "128x128x128-bf16", {"m": 128, "n": 128, "k": 128}, "bf16", ("square",))


def candidates(count: int = 24) -> list[Candidate]:
    """Configs (a, b), the first the default, the next two seeds."""
    made = []
    for number, (a, b) in enumerate(itertools.islice(itertools.product(range(6), range(4)), count)):
        made.append(
            Candidate({"a": a, "b": b}, f"k{number}", {}, 0 if not number else 1 if number < 3 else 2)
        )
    return made


def time_of(config: dict[str, Any]) -> float:
    """A valley at (4, 2)."""
    return 1000.0 + 100.0 * abs(config["a"] - 4) + 37.0 * abs(config["b"] - 2)


@dataclass
class Clock:
    """Runs out when told to, or after so many looks."""

    limit: int = 10_000
    looks: int = 0

    def elapsed(self) -> float:
        return float(self.looks)

    def over(self) -> bool:
        self.looks += 1
        return self.looks > self.limit


@dataclass
class FakeSession:
    """The tuner's view of a session. ``acts`` says what a config does to the device; ``compiles`` what became
    of an artifact (None: still under way)."""

    plans: list[Planned]
    acts: Callable[[dict[str, Any]], str] = lambda config: "ok"
    compiles: Callable[[str], Built | Refused | None] = lambda key: Built(key, Facts(), 0.5, "toy 1")
    settings: Settings = field(default_factory=lambda: Settings(strategy="local", compile_workers=1))
    run_id: str = "r1"
    hashes: dict[str, str] = field(default_factory=lambda: {"toy/one": "h1", "toy/two": "h1"})
    toolchain: str = "toy 1"

    def __post_init__(self) -> None:
        self.written: list[records.Record] = []
        self.sink = SimpleNamespace(write=self.written.append)
        self.clock = Clock()
        self.show = Progressor()
        self.purse = Purse()
        self.smem_limit = pruning.SMEM_LIMIT
        self.compiled: list[str] = []
        self.ran: list[tuple[str, str, float]] = []
        self.hits = self.misses = self.cached = self.loaded = 0
        self.ledger: dict[str, float] = {}
        self.compile_seconds: dict[str, float] = {}
        self.started: dict[str, int] = {}
        info = SimpleNamespace(
            role="language",
            targets={"device": jobs.TargetInfo(True)},
            problems=[],
            kernels=[1],
            toolchain=self.toolchain,
        )
        kernel = SimpleNamespace(hash="h1", space={"a": list(range(6)), "b": list(range(4))})
        self.catalog = SimpleNamespace(
            hashes=lambda: self.hashes,
            backends=lambda: {"toy": (ORIGIN, info)},
            kernels=lambda: {"toy/one": kernel, "toy/two": kernel},
            failed=[],
        )

    def plan(self, backend: str, cases: Any, limit: int, kernels: Any, include: Any) -> list[Planned]:
        return self.plans

    def preload(self, backends: Any) -> None:
        """Nothing to import."""

    def compile(self, kernel: str, candidate: Candidate, priority: int = 0) -> None:
        self.compiled.append(candidate.key)

    def built(self, key: str) -> Built | Refused | None:
        return self.compiles(key) if key in self.compiled else None

    class head:
        @staticmethod
        def timeline() -> dict[str, float]:
            return {"described": 0.5, "finished": 2.0}

    def wait_built(self, ready: Any, seconds: float = 1.0) -> None:
        time.sleep(0.01)

    def progress(self) -> tuple[int, int]:
        return len(self.compiled), len(self.compiled)

    def workload_origin(self, name: str) -> Origin:
        return Origin("workload", name, "")

    def racer(self, choice: Choice) -> Racer:
        return Racer(ORIGIN, (), "language", choice, "")

    def on_device(self, job: Any, on_partial: Callable[[Any], None]) -> Outcome:
        if isinstance(job, jobs.FinalJob):
            medians = [time_of(r.choice.config) for r in job.racers]
            self.ran += [("final", json.dumps(r.choice.config), 0.0) for r in job.racers]
            return Outcome(done=Done(msgspec.Raw(msgspec.json.encode((medians, medians)))))
        for index, racer in enumerate(job.racers):
            c = racer.choice
            act = self.acts(c.config)
            if act == "false start":
                return Outcome(refused=Refused("oom", "no room for the case"), last=Progress("allocate", -1))
            self.ran.append((job.case.name, json.dumps(c.config), job.seconds))
            if act in ("hang", "abort"):
                status = "hang" if act == "hang" else "launch_error"
                refused = Refused(status, f"the worker {act}s", "deadline")
                return Outcome(refused=refused, last=Progress("trying", index), died=True)
            trial = Trial(job.run_id, job.case, c.kernel, c.kernel_hash, c.config, act, c.key, seconds=0.1)
            if act == "ok":
                trial = msgspec.structs.replace(trial, median_ns=time_of(c.config), n=5)
            on_partial(trial)
        return Outcome(done=Done(msgspec.Raw(b"1")))


def planned(case: CaseRef = SMALL, kernel: str = "toy/one", count: int = 24) -> Planned:
    return Planned(kernel, case, candidates(count), "", {"too wide": 3})


def search(
    session: FakeSession,
    cases: tuple[CaseRef, ...] = (SMALL,),
    trials: int = 12,
    memory: Memory | None = None,
    again: bool = False,
) -> Tuner:
    """Prepare and search, as a run does."""
    memory = memory or Memory()
    contest = Contest(session)  # type: ignore[arg-type]
    assert contest.prepare(cases, [TOY], -1, memory) == [TOY]
    tuner = Tuner(session, contest, memory, "gemm", "NVIDIA H200", "580")  # type: ignore[arg-type]
    tuner.search(cases, [TOY], trials, again)
    return tuner


def of(session: FakeSession, kind: type) -> list[Any]:
    return [r for r in session.written if isinstance(r, kind)]


def test_a_search_ends_with_a_winner_and_what_it_cost():
    session = FakeSession([planned()])
    search(session, trials=20)
    (tuned,) = of(session, Tuned)
    assert tuned.near[0].config == {"a": 4, "b": 2}
    assert (tuned.bound, tuned.trials, tuned.failed, tuned.pruned) == ("trials", 20, 0, 3)
    assert (tuned.gpu, tuned.driver, tuned.toolchain) == ("NVIDIA H200", "580", "toy 1")
    assert len(of(session, Trial)) == 20
    assert session.purse.bounds == {"trials": 1}
    assert session.purse.of("toy").tried == 20


def test_a_space_that_is_walked_through_is_the_bound():
    session = FakeSession([planned(count=5)])
    search(session, trials=20)
    assert of(session, Tuned)[0].bound == "space"


@pytest.mark.parametrize("strategy", ["exhaustive", "random", "local", "halving"])
def test_every_config_gets_one_verdict_whatever_it_does(strategy):
    fate = {0: "ok", 1: "hang", 2: "incorrect", 3: "abort"}
    session = FakeSession([planned()], lambda config: fate[config["b"]])
    session.settings.strategy = strategy
    search(session, trials=24)
    first = [t for t in of(session, Trial) if t.effort <= 1 / 3 or strategy != "halving"]
    assert len({json.dumps(t.config) for t in first}) == len(first) == 24
    assert Counter(t.status for t in first) == {"ok": 6, "hang": 6, "incorrect": 6, "launch_error": 6}
    (tuned,) = of(session, Tuned)
    assert tuned.near[0].config == {"a": 4, "b": 0}
    assert tuned.failures == {"hang": 6, "incorrect": 6, "launch_error": 6}


def test_nothing_that_holds_is_one_failure_and_no_winner():
    session = FakeSession([planned()], lambda config: "hang")
    tuner = search(session)
    assert tuner.failed == 1
    assert not of(session, Tuned)
    assert "none of 12 configs held" in of(session, records.Failure)[0].reason


def test_compilers_that_abort_or_never_return_are_rows():
    def compiles(key: str) -> Built | Refused:
        number = int(key[1:])
        if number % 3 == 1:
            return Refused("compile_timeout", "no answer for 300 s; killed", "deadline")
        return Built(key, Facts(), 0.1, "toy 1")

    session = FakeSession([planned()], compiles=compiles)
    search(session, trials=24)
    trials = of(session, Trial)
    assert Counter(t.status for t in trials) == {"ok": 16, "compile_timeout": 8}
    assert len(session.ran) >= 16


def test_the_device_does_not_wait_for_the_last_compiler_of_a_round():
    session = FakeSession([planned()])
    session.settings.strategy = "halving"
    slow = "k1"
    session.compiles = lambda key: (
        None if key == slow and len(session.ran) < 11 else Built(key, Facts(), 0.1, "toy 1")
    )
    search(session, trials=12)
    tried = [t.key for t in of(session, Trial) if t.effort < 0.5]
    assert len(tried) == 12
    assert tried[-1] == slow
    (tuned,) = of(session, Tuned)
    assert tuned.trials == 12
    assert len(of(session, Trial)) > 12  # the next rung followed the straggler


def test_the_device_begins_with_a_case_that_is_ready_as_a_whole():
    session = FakeSession([planned(), planned(LARGE)])
    for number, candidate in enumerate(session.plans[1].candidates):
        session.plans[1].candidates[number] = msgspec.structs.replace(candidate, key=f"l{number}")
    session.compiles = lambda key: (
        None if key == "k2" and len(session.ran) < 5 else Built(key, Facts(), 0.1, "toy 1")
    )
    search(session, (SMALL, LARGE), trials=3)
    cases = [name for name, *_ in session.ran if name != "final"]
    assert cases == [LARGE.name] * 3 + [SMALL.name] * 3
    assert len(of(session, Tuned)) == 2


def test_what_the_compiled_code_shows_keeps_it_off_the_device():
    def compiles(key: str) -> Built:
        return Built(
            key, Facts(spill_stores=40 * (key == "k3"), smem_dynamic=300000 * (key == "k4")), 0.1, ""
        )

    session = FakeSession([planned()], compiles=compiles)
    search(session, trials=24)
    refused = {t.key: t for t in of(session, Trial) if t.status == "invalid_config"}
    assert {k: t.check for k, t in refused.items()} == {"k3": "facts", "k4": "facts"}
    assert "spills" in refused["k3"].reason
    assert "shared memory" in refused["k4"].reason
    assert not any(json.loads(config) == {"a": 0, "b": 3} for _, config, _ in session.ran)


def test_without_pruning_they_are_tried_and_say_what_would_have_kept_them_off():
    session = FakeSession([planned()], compiles=lambda key: Built(key, Facts(spill_stores=40), 0.1, ""))
    session.settings.prune = False
    search(session, trials=24)
    assert all(t.status == "ok" and "spills" in t.pruned for t in of(session, Trial))


def test_a_worker_that_never_reaches_a_candidate_is_not_asked_for_each():
    session = FakeSession([planned()], lambda config: "false start")
    search(session, trials=12)
    assert Counter(t.status for t in of(session, Trial)) == {"oom": 12}
    assert session.ran == []


def test_an_artifact_that_does_not_come_holds_up_its_own_case_alone():
    large = Planned(
        "toy/one", LARGE, [msgspec.structs.replace(c, key="late" + c.key) for c in candidates()], "", {}
    )
    session = FakeSession(
        [large, planned()],
        compiles=lambda key: None if key.startswith("late") else Built(key, Facts(), 0.1, ""),
    )
    session.clock.limit = 60
    tuner = search(session, (LARGE, SMALL))
    assert [t.case.name for t in of(session, Tuned)] == [SMALL.name]
    assert tuner.unfinished == [f"tune {LARGE.name}"]


def test_out_of_time_keeps_the_best_so_far():
    session = FakeSession([planned()])
    session.clock.limit = 6
    tuner = search(session, trials=24)
    assert [t.bound for t in of(session, Tuned)] == ["seconds"]
    assert tuner.unfinished == [f"tune {SMALL.name}"]


def test_halving_counts_configs_and_books_every_timing():
    session = FakeSession([planned()])
    session.settings.strategy = "halving"
    search(session, trials=24)
    (tuned,) = of(session, Tuned)
    assert (tuned.trials, tuned.retimed, tuned.bound) == (24, 10, "space")
    assert session.purse.of("toy").tried == 24
    seconds = Counter(round(s / session.settings.trial_seconds, 2) for *_, s in session.ran if s)
    assert seconds == {0.33: 24, 1.0: 8, 3.0: 2}


def resumed(session: FakeSession, keep: int) -> list[records.Record]:
    """What a run killed after ``keep`` trials left behind."""
    header = RunHeader(1, "r1", "", "", {"gpu": "NVIDIA H200", "driver": "580"})
    trials = of(session, Trial)[:keep]
    return [header, *of(session, Pruned), *trials]


@pytest.mark.parametrize("strategy", ["exhaustive", "random", "local", "halving"])
@pytest.mark.parametrize("keep", [0, 1, 7, 15])
def test_a_resumed_search_repeats_no_trial_and_finds_the_same(strategy, keep):
    def fate(config: dict[str, Any]) -> str:
        return "hang" if config["b"] == 3 else "ok"

    whole, rest = FakeSession([planned()], fate), FakeSession([planned()], fate)
    whole.settings.strategy = rest.settings.strategy = strategy
    search(whole, trials=18)
    earlier = resumed(whole, keep)
    search(rest, trials=18, memory=Memory.of([], rest.catalog, "NVIDIA H200", earlier, "580"))
    done = [(json.dumps(t.config), t.effort) for t in [*of(whole, Trial)[:keep], *of(rest, Trial)]]
    assert len(done) == len(set(done))
    assert set(done) == {(json.dumps(t.config), t.effort) for t in of(whole, Trial)}
    (first,), (second,) = of(whole, Tuned), of(rest, Tuned)
    assert (first.near, first.trials, first.failures) == (second.near, second.trials, second.failures)
    assert not of(rest, Pruned)


def winner(**changes: Any) -> Tuned:
    near = [Choice("toy/one", "h1", {"a": 4, "b": b}, "", 1000.0 + b) for b in (2, 1, 3)]
    base = Tuned(
        "old", SMALL, "toy", "local", near, 20, 0, 0, 1.0, 1.0, "trials", "NVIDIA H200", 0.0, "580", "toy 1"
    )
    return msgspec.structs.replace(base, **changes)


def memory(session: FakeSession, *found: records.Record, driver: str = "580") -> Memory:
    return Memory.of(found, session.catalog, "NVIDIA H200", (), driver)  # type: ignore[arg-type]


def test_a_winner_of_here_is_used_as_it_is():
    session = FakeSession([planned()])
    search(session, memory=memory(session, winner()))
    assert session.ran == []
    assert not of(session, Tuned)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu": "NVIDIA H100"}, "GPU NVIDIA H100, here NVIDIA H200"),
        ({"driver": "550"}, "driver 550, here 580"),
        ({"toolchain": "toy 0"}, "toolchain toy 0, here toy 1"),
        ({"near": [Choice("toy/one", "h0", {"a": 4, "b": 2})]}, "source of toy/one h0, here h1"),
    ],
)
def test_of_a_winner_from_elsewhere_the_near_ties_race_again(changes, says):
    session = FakeSession([planned()])
    search(session, memory=memory(session, winner(**changes)))
    (tuned,) = of(session, Tuned)
    assert says in tuned.revisits
    assert tuned.near[0].config == {"a": 4, "b": 2}
    assert tuned.trials == len(changes.get("near", [1, 2, 3]))
    assert any(says in line for line in spending.lines([*session.written, ledger(session)]))


def test_near_ties_that_do_not_hold_any_more_give_way_to_a_search():
    session = FakeSession([planned()], lambda config: "incorrect" if config["a"] == 4 else "ok")
    search(session, memory=memory(session, winner(driver="550")), trials=24)
    (tuned,) = of(session, Tuned)
    assert tuned.revisits == ""
    assert tuned.near[0].config["a"] in (3, 5)


def test_a_winner_that_is_no_candidate_here_is_searched_for_again():
    session = FakeSession([planned()])
    search(session, memory=memory(session, winner(near=[Choice("toy/one", "h1", {"a": 99, "b": 2})])))
    assert of(session, Tuned)[0].trials == 12


def test_what_an_old_record_does_not_say_is_read_from_its_run():
    session = FakeSession([planned()])
    old = winner(driver="", toolchain="", near=[Choice("toy/one", "h1", {"a": 4, "b": 2}, "key")])
    header = RunHeader(1, "old", "", "", {"gpu": "NVIDIA H200", "driver": "550"})
    compiled = Compiled("old", "key", "toy/one", "h1", "sm_90a", {}, "ok", 1.0, toolchain="toy 0")
    ((_, differs),) = memory(session, header, compiled, old).stale.values()
    assert differs == "driver 550, here 580; toolchain toy 0, here toy 1"


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_winners_the_later_searchs_counts_wherever_it_stands(turned):
    session = FakeSession([planned()])
    found = []
    for run_id, started, a in (("first", "2026-12-01T00:00:00", 3), ("second", "2026-12-02T00:00:00", 4)):
        header = RunHeader(1, run_id, started, "", {"gpu": "NVIDIA H200", "driver": "580"})
        near = [Choice("toy/one", "h1", {"a": a, "b": 2})]
        found.append((header, winner(run_id=run_id, near=near)))
    order = reversed(found) if turned else found
    held = memory(session, *(record for pair in order for record in pair))
    (tuned,) = held.tuned.values()
    assert tuned.run_id == "second"


def test_a_winner_of_here_counts_more_than_a_later_one_from_elsewhere():
    session = FakeSession([planned()])
    held = memory(session, winner(), winner(gpu="NVIDIA H100"))
    assert held.tuned
    assert not held.stale


def test_the_best_of_one_case_is_tried_early_on_the_next():
    lessons = Lessons()
    lessons.learn("toy", SMALL, ("toy/one", "small"))
    lessons.learn("toy", LARGE, ("toy/one", "large"))
    near = msgspec.structs.replace(LARGE, name="near", params={"m": 120, "n": 128, "k": 128})
    assert lessons.hints("toy", near) == [("toy/one", "large"), ("toy/one", "small")]
    assert lessons.hints("toy", SMALL) == [("toy/one", "large")]
    assert lessons.hints("other", SMALL) == []


def test_a_recorded_winner_hints_at_the_next_case():
    session = FakeSession([planned(), planned(LARGE)])
    search(session, (SMALL, LARGE), memory=memory(session, winner()))
    second = json.loads(session.ran[1][1])
    assert session.ran[1][0] == LARGE.name
    assert second == {"a": 4, "b": 2}


# -- what is refused before it is compiled ----------------------------------------------------------------


class Product(Workload):
    name = "gemm"

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        return (TensorSpec("c", (case["m"], case["n"]), "bf16", "output"),)

    def flops(self, case: Case) -> float:
        return 2.0 * case["m"] * case["n"] * case["k"]

    def bytes(self, case: Case) -> float:
        return 1.0


def kernel(**changes: Any) -> Kernel:
    def valid(case: Case, config: Any) -> str | None:
        return f"{config['bm']} rows are too many" if config["bm"] > 128 else None

    fields: dict[str, Any] = {
        "id": "toy/one",
        "workload": "gemm",
        "space": {"bm": (64, 128, 256), "bn": (64, 128)},
        "default": lambda case: {"bm": 64, "bn": 64},
        "source": lambda static, arch: None,
        "bind": lambda *args: Call(lambda: None),
        "valid": valid,
        **changes,
    }
    return Kernel(**fields)


def plan(made: Kernel, **changes: Any) -> Planned:
    job = msgspec.structs.replace(jobs.PlanJob(ORIGIN, (), (), [SMALL], "sm_90a", -1), **changes)
    big = msgspec.structs.replace(SMALL, params={"m": 4096, "n": 4096, "k": 64})
    return planning.plan_case(made, "source", big, "toy 1", job, Product())


def test_every_refused_config_is_written_down_with_its_reason():
    got = plan(kernel())
    assert got.pruned == {"256 rows are too many": 2}
    record = records.PrunedKernel(
        "toy/one", "h1", {"bm": [64, 128, 256], "bn": [64, 128]}, list(got.pruned), [2], got.codes
    )
    assert list(pruning.refused(record)) == [
        ({"bm": 256, "bn": 64}, "256 rows are too many"),
        ({"bm": 256, "bn": 128}, "256 rows are too many"),
    ]


def test_thousands_of_refusals_take_little_room():
    space = {"x": tuple(range(100)), "y": tuple(range(100)), "bm": (256,)}
    got = plan(
        kernel(
            space=space,
            default=lambda case: {"x": 0, "y": 0, "bm": 256},
            valid=lambda case, config: f"{config['x'] * config['y']} is too much" if config["x"] else None,
        )
    )
    assert sum(got.pruned.values()) == 9900
    assert len(got.pruned) == planning.MOST_REASONS + 1
    assert len(got.codes) < 20_000


def test_without_pruning_what_is_refused_is_a_candidate_with_its_reason():
    got = plan(kernel(), prune=False)
    assert len(got.candidates) == 6
    assert {c.refused for c in got.candidates} == {"", "256 rows are too many"}


def test_a_kernels_own_cost_goes_before_the_model():
    own = plan(kernel(cost=lambda case, config: config["bm"] + config["bn"] / 1000))
    assert {c.config["bm"]: c.estimate for c in own.candidates if c.config["bn"] == 64} == {
        64: 64.064,
        128: 128.064,
    }
    model = {(c.config["bm"], c.config["bn"]): c.estimate for c in plan(kernel()).candidates}
    assert model[128, 128] < model[64, 64]


def test_the_model_knows_waves_and_says_nothing_where_no_tile_is_named():
    work = costmodel.Work(2.0 * 4096**3, 3 * 4096 * 4096 * 2.0, (4096, 4096))
    assert costmodel.estimate(work, {"tile": "128x256 coop"}) == costmodel.estimate(
        work, {"bm": 128, "bn": 256}
    )
    one_more = costmodel.Work(work.flops, work.bytes, (4096 + 129 * 4, 4096))
    assert costmodel.estimate(one_more, {"bm": 128, "bn": 256}) > costmodel.estimate(
        work, {"bm": 128, "bn": 256}
    )
    assert costmodel.estimate(work, {"warps": 4}) == 0.0
    assert costmodel.estimate(costmodel.Work(1e9, 1.0, (4, 8, 16)), {"bm": 64, "bn": 64}) == 0.0


def test_the_pruned_record_of_a_search_names_its_kernels():
    session = FakeSession([planned()])
    search(session)
    (record,) = of(session, Pruned)
    assert [(k.kernel, k.reasons, k.counts) for k in record.kernels] == [("toy/one", ["too wide"], [3])]
    assert records.decode(records.encode(record)) == record


# -- the end of a run -------------------------------------------------------------------------------------


def ledger(session: FakeSession) -> Ledger:
    runner = Runner(session, "gemm", Memory(), "NVIDIA H200")  # type: ignore[arg-type]
    runner.finish()
    return of(session, Ledger)[-1]


def test_the_end_of_a_run_says_what_it_cost_and_what_bound_it():
    session = FakeSession([planned()], lambda config: "hang" if config["b"] == 3 else "ok")
    search(session, trials=24)
    session.hits, session.misses, session.cached = 6, 12, 6
    text = "\n".join(spending.lines([*session.written, ledger(session)]))
    assert "toy: 24 configs tried, 6 failed (hang 6), 3 pruned" in text
    assert "searches ended: 1 by space" in text
    assert "artifacts: 24 asked for, 12 compiled, 50% found" in text
    assert "compiled none itself" in text


def test_an_assembler_in_the_device_worker_is_told():
    session = FakeSession([planned()])
    search(session)
    session.started = {"ptxas": 2, "gcc": 1}
    assert "ran ptxas 2 itself" in "\n".join(spending.lines([ledger(session)]))


def test_a_run_that_searched_nothing_says_nothing():
    assert spending.lines([Ledger("r", {})]) == []


def test_old_lines_still_load():
    trial = {
        "type": "trial",
        "run_id": "r",
        "case": {"workload": "gemm", "name": "x", "params": {}, "dtype": "bf16"},
        "kernel": "toy/one",
        "kernel_hash": "h",
        "config": {},
        "status": "ok",
    }
    got = records.decode(json.dumps(trial).encode())
    assert isinstance(got, Trial)
    assert (got.rank, got.effort, got.pruned) == (-1, 1.0, "")
    assert strategies.config_text({"b": 1, "a": 2}) == '{"a": 2, "b": 1}'
    assert isinstance(Partial(got).record, Trial)
