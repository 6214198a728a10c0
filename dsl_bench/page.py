"""The report as one self-contained HTML page: figures as SVG, tables, and what all of it was measured on."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from dsl_bench import insights, plot, report, tables
from dsl_bench.errors import NothingMatched
from dsl_bench.records import CaseRef, Race, Record, RunHeader

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
ROWS = (
    "case regime backend kernel status fraction fraction_lo fraction_hi verdict time_us tflops gbps sol "
    "baseline stale reason"
).split()
MEANS = "workload group dtype backend geomean min cases total wins ties losses ambiguous".split()


def render(
    rows: Sequence[Row],
    found: Sequence[Record],
    kernels: Mapping[str, tuple[str, int]],
    cases: Sequence[CaseRef] = (),
) -> str:
    """The page for the rows of a report. ``kernels`` as :func:`dsl_bench.insights.costs` takes it."""
    import jinja2
    import matplotlib

    matplotlib.use("Agg")
    means = [m for m in report.geomeans(rows, cases) if m["regime"] == report.WORSE]
    gpus = sorted({r["gpu"] for r in rows})
    source = files("dsl_bench").joinpath("templates/report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        show=lambda value: tables.cell(value, zeros=True),
        gpus=gpus,
        answers=[_answer(gpu, [m for m in means if m["gpu"] == gpu]) for gpu in gpus if means],
        gaps=insights.gaps(rows, cases),
        gap_names=insights.GAPS,
        figures=_overview(rows, means),
        means=means,
        mean_names=MEANS,
        workloads=_workloads(rows),
        row_names=ROWS,
        flips=insights.flips(rows),
        flip_names=insights.FLIPS,
        baselines=insights.baselines(rows),
        baseline_names=insights.BASELINES,
        costs=insights.costs(found, kernels),
        cost_names=insights.COSTS,
        footer=footer(rows, found),
    )


def footer(rows: Sequence[Row], found: Iterable[Record]) -> list[str]:
    """What was measured on what: GPU, driver, versions, dates, regimes and A/A floors, a line each."""
    kept = list(found)
    runs = {r["run_id"] for r in rows if r["run_id"]}
    heads = [r for r in kept if isinstance(r, RunHeader) and r.run_id in runs]
    races = [r for r in kept if isinstance(r, Race) and r.run_id in runs]
    versions = sorted({f"{p.backend}: {p.version}" for r in races for p in r.participants if p.version})
    days = sorted({r.started[:10] for r in races})
    floors = [r["floor"] for r in rows if r["floor"] is not None]
    drivers = sorted({str(h.environment.get("driver", "")) for h in heads} - {""})
    lines = [
        f"{', '.join(sorted({r['gpu'] for r in rows}))}; driver {', '.join(drivers) or 'not recorded'}; "
        f"{' to '.join(dict.fromkeys((days[0], days[-1]))) if days else 'no date'}; {len(races)} races in "
        f"{len({(r.run_id, r.process) for r in races})} processes; regimes "
        f"{', '.join(sorted({r.regime for r in races}))}.",
        "; ".join(versions) + ".",
    ]
    if floors:
        ordered = sorted(floors)
        lines.append(
            f"A/A floor (what a race can tell apart): median {100 * ordered[len(ordered) // 2]:.2f} %, "
            f"greatest {100 * ordered[-1]:.2f} %."
        )
    if any(r["stale"] for r in rows):
        lines.append("Rows marked stale were measured with an older source of their kernel.")
    return lines


def _answer(gpu: str, means: Sequence[Row]) -> tuple[str, list[Row], list[str]]:
    """The headline of one GPU, the answer before the numbers: a narrow screen shows it without scrolling."""
    table, names = report.headline(means)
    front = ["workload", "group", "dtype", "fastest"]
    return gpu, table, [*front, *(n for n in names if n not in front)]


def _workloads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for name in dict.fromkeys(r["workload"] for r in rows):
        mine = [r for r in rows if r["workload"] == name]
        groups = []
        for group, dtype in dict.fromkeys((r["group"], r["dtype"]) for r in mine):
            held = [r for r in mine if (r["group"], r["dtype"]) == (group, dtype)]
            title = f"{name} {group} {dtype}"
            note = f"{title}: fraction of the fastest vendor kernel in each regime, case by case"
            figures = [_figure(note, plot.both_regimes, _frame(held))]
            groups.append({"name": f"{group} {dtype}", "rows": held, "figures": [f for f in figures if f[1]]})
        found.append({"name": name, "groups": groups})
    return found


def _overview(rows: Sequence[Row], means: Sequence[Row]) -> list[tuple[str, Any]]:
    import pandas as pd

    frame = _frame(rows)
    drawn = [
        _figure(
            "Geometric means by group; a line down to the worst case, hollow where cases are missing",
            plot.geomeans,
            pd.DataFrame(means, columns=report.MEAN_FIELDS),
            frame,
        ),
        _figure("What the regime changes, case by case", plot.regimes, frame),
        _figure("Speed under the chip's fixed rates, case by case", plot.roofline, frame),
    ]
    return [f for f in drawn if f[1]]


def _frame(rows: Sequence[Row]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=report.ROW_FIELDS)


def _figure(name: str, draw: Callable[..., Any], *data: Any) -> tuple[str, Any]:
    """A plot as SVG that a page may hold; empty where there is nothing to draw."""
    import markupsafe
    import matplotlib
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    # text stays text: it can be found, copied and read aloud
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        try:
            ax = draw(*data)
        except NothingMatched:
            return name, ""
        ax.figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(ax.figure)
    text = buffer.getvalue()
    # ids are unique within a figure only, and would be found in the page's first
    mark = "f" + "".join(c for c in name if c.isalnum())
    for opening in ('id="', 'xlink:href="#', "url(#"):
        text = text.replace(opening, opening + mark)
    return name, markupsafe.Markup(text[text.index("<svg") :])
