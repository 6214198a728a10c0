"""The comparison with the languages' own tuners, as far as a machine without a GPU can show it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_tuners", ROOT / "tests" / "bench_tuners.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_tuners"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["triton", "tilelang"])
def test_the_list_has_its_length_and_begins_with_the_authors_choice(bench, language):
    pytest.importorskip(language)
    configs = bench.listed(language, bench.LENGTHS[language])
    assert len(configs) == bench.LENGTHS[language]
    assert len({json.dumps(c, sort_keys=True) for c in configs}) == len(configs)
    assert all(bench.one_function(language, c) for c in configs)
    assert configs == bench.listed(language, bench.LENGTHS[language])


def test_our_search_is_offered_the_list_and_no_more(bench, cli, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "triton")
    configs = bench.listed("triton", 12)
    plugin = bench.plugin_file("triton", configs, tmp_path)
    done = cli("plan", "gemm", "-b", "triton", "-c", bench.CASE, "--plugin", str(plugin), "-f", "json")
    assert done.returncode == 0, done.stderr
    (row,) = [r for r in json.loads(done.stdout) if r["kernel"] == "triton/listed"]
    assert row["candidates"] == 12
    assert json.loads(row["first"]) in configs


def test_a_config_means_the_same_to_triton(bench):
    pytest.importorskip("triton")
    (config,) = [c for c in bench.listed("triton", 48) if c["sub"] == 2 and c["form"] == "flat"][:1]
    made = bench.triton_config(config)
    assert made.num_warps == config["warps"]
    assert made.kwargs["FLAT"] is True

    class Map:
        block_shape = None

    args = {"a": Map(), "b": Map(), "c": Map(), **made.kwargs}
    made.pre_hook(args)
    assert args["a"].block_shape == [config["bm"], config["bk"]]
    assert args["c"].block_shape == [config["bm"], config["bn"] // 2]


def arms(bench, ours: float, theirs: float):
    config = {"bm": 1}
    return [
        bench.Arm("ours", ours, config=config),
        bench.Arm("triton.autotune", theirs, config=config),
        bench.Arm("exhaustive", 99.0, config=config),
    ]


def test_fast_and_good_is_what_holds(bench):
    made = arms(bench, 10.0, 30.0)
    assert bench.summary("triton", made, made, [101.0, 103.0, 100.0])["held"]
    assert not bench.summary("triton", made, made, [103.0, 103.0, 100.0])["held"]
    slow = arms(bench, 20.0, 30.0)
    assert not bench.summary("triton", slow, slow, [101.0, 103.0, 100.0])["held"]


def test_an_arm_without_an_answer_holds_nothing(bench):
    made = [bench.Arm("ours", 1.0, error="it broke"), *arms(bench, 1.0, 9.0)[1:]]
    got = bench.summary("triton", made, made[1:], [100.0, 100.0])
    assert not got["held"]
    assert bench.table({"language": "triton", **got})[0]["answer"] == "it broke"


def test_our_arm_says_when_it_came_to_what(bench):
    config = {"bm": 1}
    when = {"described": 1.25, "first trials": 7.5}
    made = [bench.Arm("ours", 9.0, config=config, timeline=when), *arms(bench, 9.0, 40.0)[1:]]
    got = {"language": "triton", **bench.summary("triton", made, made, [101.0, 103.0, 100.0])}
    assert bench.timelines(got) == ["triton, ours, seconds: described 1.2, first trials 7.5"]
    assert json.loads(json.dumps(got))["arms"][0]["timeline"] == when


def test_a_process_is_stopped_at_its_limit(bench):
    seconds, code, _, _ = bench.run_process([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5)
    assert code == -1
    assert seconds < 20


def test_arguments(bench):
    given = bench.parse(["--language", "triton", "--count", "8", "--limit", "20"])
    assert (given.language, given.count, given.limit) == (["triton"], 8, 20.0)


def test_the_page_shows_the_recorded_run(bench):
    record = json.loads((ROOT / "results" / "nvidia-h200" / "20261202-tuners.json").read_text())
    text = (ROOT / "docs" / "tuning.md").read_text()
    shown = text.partition("<!-- tuners -->\n")[2].partition("\n<!-- /tuners -->")[0]
    assert shown == bench.page(record)
    assert {r["language"] for r in record["results"]} == set(bench.FLOORS)
    assert all(r["held"] for r in record["results"])
