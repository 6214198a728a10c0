"""The HTML page and the tables beside the fractions, from the recorded results."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import pytest

from dsl_bench import frames, insights, page, plot, plotting, report, store
from dsl_bench.errors import NothingMatched
from dsl_bench.records import Tuned

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def rows() -> list[report.Row]:
    return report.rows(store.read([RESULTS])[0])


@pytest.fixture(scope="module")
def text(rows: list[report.Row]) -> str:
    return page.render(rows, store.read([RESULTS])[0], {"cuda/gemm": ("gemm", 100)})


class _Checker(HTMLParser):
    """Counts tags and remembers ids and what points outside the page."""

    VOID = ("meta", "br", "img", "link", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_stands_alone(text: str) -> None:
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids)), "an id occurs twice"
    assert checker.outside == []
    assert not re.search(r"<script|@import|https?://(?!www\.w3\.org|purl\.org|creativecommons)", text)


def test_the_page_holds_every_group_and_says_what_it_was_measured_on(
    text: str, rows: list[report.Row]
) -> None:
    for group in {f"{r['group']} {r['dtype']}" for r in rows}:
        assert f"<h3>{group}</h3>" in text
    assert text.count("<svg") > len({r["group"] for r in rows})
    for word in ("NVIDIA H200", "driver", "regimes cold, sustained", "A/A floor", "cublas"):
        assert word in text


def test_the_answer_comes_first_and_the_gaps_have_reasons(text: str, rows: list[report.Row]) -> None:
    table = text[: text.index("<svg")]
    assert "<th>fastest</th>" in table and 'class="fastest"' in table
    missing = [r for r in rows if r["fraction"] is None]
    gaps = text[text.index('id="gaps"') : text.index('id="baselines"')]
    assert all(r["case"] in gaps for r in missing)


def test_the_page_follows_the_reader_s_light_and_size(text: str) -> None:
    assert "prefers-color-scheme: dark" in text and "max-width: 40rem" in text and "@media print" in text
    assert "<text" in text, "a figure's text is no text"


def test_a_figure_shows_what_has_no_number(rows: list[report.Row]) -> None:
    mine = [r for r in rows if (r["workload"], r["group"], r["regime"]) == ("gemm", "square", "cold")]
    mine = [r for r in mine if r["dtype"] == "bf16"]
    gone = dict.fromkeys(("fraction", "fraction_lo", "fraction_hi")) | {"status": "launch_error"}
    table = pd.DataFrame([mine[0] | gone, *mine[1:]])
    ax = plot.fractions(table)
    assert [t.get_text() for t in ax.texts] == [f"{mine[0]['backend']}: launch error"]
    assert len(ax.get_yticks()) == len({r["case"] for r in mine})
    low = ax.get_xlim()[0]
    room = table["fraction_lo"].min() - low
    assert room > 0.15 * (ax.get_xlim()[1] - low), "the status would lie on a point"
    assert "1.0 = fastest of" in ax.get_xlabel() and "cublas 1" in ax.get_xlabel()
    plt.close(ax.figure)


def test_both_regimes_share_one_scale(rows: list[report.Row]) -> None:
    mine = [r for r in rows if (r["workload"], r["group"]) == ("gemm", "square")]
    figure = plot.both_regimes(pd.DataFrame(mine)).figure
    one, other = figure.axes
    assert one.get_xlim() == other.get_xlim() and one.get_ylim() == other.get_ylim()
    assert one.get_title("left").endswith("cold") and other.get_title("left").endswith("sustained")
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["cuda", "tilelang", "triton"]
    plt.close(figure)


@pytest.mark.parametrize("count", [3, 7])
def test_no_text_of_a_figure_lies_on_another(rows: list[report.Row], count: int) -> None:
    mine = [r for r in rows if (r["workload"], r["group"], r["regime"]) == ("gemm", "llm", "cold")]
    more = [r | {"backend": f"language{n}"} for n in range(count - 3) for r in mine if r["backend"] == "cuda"]
    ax = plot.fractions(pd.DataFrame([*mine, *more]))
    ax.figure.draw_without_rendering()
    legend = ax.get_legend().get_window_extent()
    title = next(t for t in (ax._left_title,) if t.get_text()).get_window_extent()
    assert not legend.overlaps(title)
    boxes = [t.get_window_extent() for t in ax.get_yticklabels()]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
    plt.close(ax.figure)


def test_trials_of_libraries_are_not_drawn_as_languages() -> None:
    roles = ["language", "vendor", "vendor", "language"]
    trials = pd.DataFrame({"backend": ["cuda", "their_library", "vendor", "mine"], "role": roles})
    assert plotting.languages(trials) == ["cuda", "mine"]


def test_which_backends_are_libraries_is_read_from_the_records() -> None:
    trials, compiled = frames.load_trials(RESULTS), frames.load_compiled(RESULTS)
    for table in (trials, compiled):
        assert set(table[table["role"] == "language"]["backend"]) == {"cuda", "tilelang", "triton"}
    assert "vendor" in set(trials[trials["role"] == "vendor"]["backend"])


def test_what_a_kernel_says_is_escaped(rows: list[report.Row]) -> None:
    evil = [
        r | {"status": "launch_error", "reason": "<script>x</script>", "fraction": None} for r in rows[:1]
    ]
    made = page.render([*rows[:6], *evil], store.read([RESULTS])[0], {})
    assert "<script>" not in made and "&lt;script&gt;" in made


def test_flips_name_two_languages_beyond_their_intervals(rows: list[report.Row]) -> None:
    for flip in insights.flips(rows):
        assert flip["cold"] != flip["sustained"]
        assert flip["cold_order"].startswith(flip["cold"])

    def row(backend: str, regime: str, value: float, half: float = 0.001) -> report.Row:
        made = dict.fromkeys(report.ROW_FIELDS) | {"gpu": "g", "workload": "w", "case": "c"}
        edges = {"fraction_lo": value - half, "fraction_hi": value + half}
        return made | {"backend": backend, "regime": regime, "fraction": value} | edges

    crossed = [row("a", "cold", 1.0), row("b", "cold", 0.9), row("a", "sustained", 0.9)]
    assert len(insights.flips([*crossed, row("b", "sustained", 1.0)])) == 1
    assert insights.flips([*crossed, row("b", "sustained", 1.0, 0.2)]) == []


def test_baselines_count_every_case_once(rows: list[report.Row]) -> None:
    found = insights.baselines(rows)
    names = ("workload", "group", "dtype", "regime")
    for group in {tuple(r[n] for n in names) for r in found}:
        mine = [r for r in found if tuple(r[n] for n in names) == group]
        assert sum(r["cases"] for r in mine) == mine[0]["total"]


def test_cost_adds_up() -> None:
    found = store.read([RESULTS])[0]
    workload = {c.kernel: r.case.workload for r in found if isinstance(r, Tuned) for c in r.near}
    kernels = {name: (held, 10) for name, held in workload.items() if not name.startswith("vendor/")}
    tuning = frames.load_tuning(RESULTS)
    table = [r for r in insights.costs(found, kernels) if r["contenders"]]
    assert {r["backend"] for r in table} == {"cuda", "tilelang", "triton"}
    for row in table:
        mine = tuning[(tuning["contender"] == row["backend"]) & (tuning["workload"] == row["workload"])]
        assert row["trials"] == mine["trials"].sum() > 0
        assert row["compiles"] > 0 and row["compile_seconds"] > 0


def test_an_empty_frame_is_named_not_drawn() -> None:
    trials = frames.load_trials(RESULTS)
    with pytest.raises(NothingMatched, match="no trial"):
        plot.budget(trials[:0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shown", ["flips", "baselines", "cost", "gaps"])
def test_the_command_shows_them(shown: str) -> None:
    command = [sys.executable, "-m", "dsl_bench", "report", "-r", str(RESULTS), "--show", shown, "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("[")
