"""Plots of results: each takes a DataFrame (and an Axes, if you have one) and returns the Axes.

Colours are Okabe and Ito's, which the colour-blind tell apart; every language also has its own marker. Where
fractions are shown, the line at 1.0 is the fastest vendor kernel, named with its version.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsl_bench import plotting as draw
from dsl_bench.standing import PEAKS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def fractions(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Speed as a fraction of the fastest vendor kernel, a line a case, with 95 % intervals; where a language
    has no number, its status stands at the left.

    ``table``: rows of ``fraction_of`` of one workload and regime (one or several groups)."""
    drawn = table.drop_duplicates(["case", "regime", "backend"])
    rows = drawn.dropna(subset=["fraction"])
    draw.need(rows, "row with a fraction")
    cases = list(dict.fromkeys(drawn["case"]))
    names = sorted(drawn["backend"].unique())
    ax = draw.axes(ax, 8.0, 1.4 + 0.36 * len(cases))
    for number, name in enumerate(names):
        # a row has one height a language, so that no interval hides another
        _language(ax, rows[rows["backend"] == name], cases, name, names, _lift(number, len(names)))
    ax.set_yticks(range(len(cases)), cases, fontsize=8)
    ax.set_ylim(len(cases) - 0.4, -0.6)
    ax.set_xlabel("fraction of the fastest vendor kernel, 95 % interval")
    draw.grid(ax)
    draw.one_line(ax, rows)
    _absent(ax, drawn[drawn["fraction"].isna()], cases, names)
    _same_scale([ax], rows)
    draw.legend(
        ax, f"{draw.unique(rows['workload'])} {draw.unique(rows['group'])}, {draw.unique(rows['regime'])}"
    )
    return ax


def _lift(number: int, count: int) -> float:
    """How far from a case's line the language of that number lies."""
    return 0.66 / max(count, 3) * (number - (count - 1) / 2)


def _language(
    ax: Axes, mine: pd.DataFrame, cases: list[str], name: str, names: list[str], lift: float
) -> None:
    colour, marker = draw.style(name, names)
    value = mine["fraction"].to_numpy(float)
    error = np.abs(mine[["fraction_lo", "fraction_hi"]].to_numpy(float).T - value)
    y = np.array([cases.index(c) for c in mine["case"]], float) + lift
    ax.errorbar(value, y, xerr=error, fmt=marker, color=colour, label=name, markersize=5, capsize=2, zorder=3)


def _absent(ax: Axes, rows: pd.DataFrame, cases: list[str], names: list[str]) -> None:
    """The status of each row without a fraction, a line a case at the left."""
    across = ax.get_yaxis_transform()
    for case, mine in rows.groupby("case"):
        y = cases.index(str(case))
        for name in mine["backend"]:
            mark: dict[str, Any] = {"color": draw.style(name, names)[0], "markersize": 5, "transform": across}
            ax.plot(0.012, y + _lift(names.index(name), len(names)), "x", **mark)
        ax.text(0.03, y, _statuses(mine), color="#222222", va="center", fontsize=7, transform=across)


def _statuses(rows: pd.DataFrame) -> str:
    """``cuda: incorrect; triton: hang``; where that is long, only how many of each."""
    parts = {str(s).replace("_", " "): list(names) for s, names in rows.groupby("status")["backend"]}
    text = "; ".join(f"{', '.join(names)}: {status}" for status, names in parts.items())
    return text if len(text) <= 32 else "; ".join(f"{len(n)} {status}" for status, n in parts.items())


def both_regimes(table: pd.DataFrame) -> Axes:
    """:func:`fractions` of each regime of ``table``, side by side on one scale. Returns the first Axes."""
    import matplotlib.pyplot as plt

    rows = table.dropna(subset=["fraction"])
    draw.need(rows, "row with a fraction")
    regimes = sorted(rows["regime"].unique())
    if len(regimes) == 1:
        return fractions(table[table["regime"] == regimes[0]])
    cases = table["case"].nunique()
    size = (11.0, 1.5 + 0.36 * cases)
    figure, axes = plt.subplots(1, len(regimes), figsize=size, sharex=True, sharey=True, layout="constrained")
    names = sorted(table["backend"].unique())
    for ax, regime in zip(axes, regimes, strict=True):
        fractions(table[table["regime"] == regime], ax)
        ax.get_legend().remove()
        ax.set_title(
            f"{draw.unique(rows['workload'])} {draw.unique(rows['group'])}, {regime}", loc="left", fontsize=9
        )
    _same_scale(axes, rows)
    handles = [ax.get_legend_handles_labels() for ax in axes]
    found = {label: h for hs, labels in handles for h, label in zip(hs, labels, strict=True)}
    shown = [n for n in names if n in found]
    figure.legend(
        [found[n] for n in shown],
        shown,
        frameon=False,
        fontsize=9,
        ncols=len(shown),
        loc="outside upper right",
    )
    first: Axes = axes[0]
    return first


def _same_scale(axes: Sequence[Axes], table: pd.DataFrame) -> None:
    """One x axis for all, which holds the widest strip of statuses."""
    texts = [len(t.get_text()) for ax in axes for t in ax.texts]
    # a character of this size is some twentieth of an inch wide
    share = min(0.5, 0.06 + max(texts) / 20 / draw.inches(axes[0])) if texts else 0.0
    for ax in axes:
        draw.span(ax, float(table["fraction_lo"].min()), float(table["fraction_hi"].max()), share)


def geomeans(means: pd.DataFrame, table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Geometric means by group, a thin line down to the worst case; hollow where cases are missing.

    ``means``: rows of ``geomean`` of one regime (``worse`` for the lower of the two); ``table``: the rows of
    ``fraction_of`` they come from, which name the baselines."""
    rows = means.dropna(subset=["geomean"])
    draw.need(rows, "geometric mean")
    groups = list(dict.fromkeys(zip(rows["workload"], rows["group"], rows["dtype"], strict=True)))
    names = sorted(rows["backend"].unique())
    ax = draw.axes(ax, 8.0, 1.5 + 0.36 * len(groups))
    for number, name in enumerate(names):
        colour, marker = draw.style(name, names)
        for row in rows[rows["backend"] == name].itertuples():
            y = groups.index((row.workload, row.group, row.dtype)) + _lift(number, len(names))
            ax.plot([row.min, row.geomean], [y, y], color=colour, linewidth=1)
            fill = colour if row.cases == row.total else "white"
            ax.plot(row.geomean, y, marker, color=colour, markerfacecolor=fill, markersize=5, zorder=3)
        ax.plot([], [], marker, color=colour, label=name, markersize=5)
    ax.plot([], [], "o", color="#444444", markerfacecolor="white", label="cases missing", markersize=5)
    for place, (one, other) in enumerate(itertools.pairwise(groups)):
        if one[0] != other[0]:
            ax.axhline(place + 0.5, color="#bbbbbb", linewidth=0.8)
    ax.set_yticks(range(len(groups)), [" ".join(g) for g in groups], fontsize=8)
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_xlabel("fraction of the fastest vendor kernel: geometric mean, line to the worst case")
    draw.ratios(ax.xaxis, float(rows["min"].min()), float(rows["geomean"].max()))
    draw.grid(ax)
    draw.one_line(ax, table)
    regime = draw.unique(rows["regime"])
    draw.legend(ax, "each case at its lower regime" if regime == "worse" else regime)
    return ax


def regimes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How a fraction changes from cold to sustained, a point a case and language: above the line at 1.0 a
    language stands better under sustained load, below it when cold."""
    rows = table.dropna(subset=["fraction"]).drop_duplicates(["workload", "case", "regime", "backend"])
    wide = rows.pivot_table(
        index=["workload", "case", "backend"], columns="regime", values="fraction"
    ).dropna()
    draw.need(wide if {"cold", "sustained"} <= set(wide) else wide[:0], "case raced in both regimes")
    change = wide["sustained"] / wide["cold"]
    ax = draw.axes(ax, 8.0, 4.6)
    names = sorted(wide.index.get_level_values("backend").unique())
    for name in names:
        mine = wide.xs(name, level="backend")["cold"]
        colour, marker = draw.style(name, names)
        y = change.xs(name, level="backend")
        ax.plot(mine, y, marker, color=colour, label=name, alpha=0.75, markersize=5, markeredgewidth=0)
    ax.axhline(1.0, color="#444444", linewidth=1.2, zorder=1)
    draw.ratios(ax.xaxis, float(wide["cold"].min()), float(wide["cold"].max()))
    ax.set_xlabel("fraction of the fastest vendor kernel, cold")
    ax.set_ylabel("fraction, sustained over cold")
    draw.one_line(ax, rows)
    draw.legend(ax, "above 1.0: better under sustained load")
    return ax


def budget(trials: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best so far against the number of trials, as a share of the best that was found in all of them.

    ``trials``: rows of ``load_trials``. Lines are medians over the cases, bands their middle half."""
    good = trials.copy()
    draw.need(good, "trial")
    good["time_us"] = good["time_us"].fillna(np.inf)
    ax = draw.axes(ax, 8.0, 4.2)
    names = draw.languages(good)
    for name in names:
        mine = good[good["backend"] == name].sort_values("order")
        curves = [
            _best_so_far(part["time_us"].to_numpy(float)) for _, part in mine.groupby(["run_id", "case"])
        ]
        curves = [c for c in curves if c.size and np.isfinite(c[-1])]
        if not curves:
            continue
        length = int(np.median([c.size for c in curves]))
        grid = np.stack([np.pad(c, (0, max(0, length - c.size)), mode="edge")[:length] for c in curves])
        colour, marker = draw.style(name, names)
        x = np.arange(1, length + 1)
        ax.plot(x, np.median(grid, axis=0), marker=marker, color=colour, label=name, markersize=4)
        ax.fill_between(x, *np.percentile(grid, [25, 75], axis=0), color=colour, alpha=0.15, linewidth=0)
    ax.axhline(1.0, color="#444444", linewidth=1.2, zorder=1)
    ax.set_xlabel("trials")
    ax.set_ylabel("speed of the best so far,\nshare of the final best")
    draw.legend(ax, "median of the cases, middle half")
    return ax


def _best_so_far(times: Any) -> Any:
    best = np.minimum.accumulate(times)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isfinite(best), best[-1] / best, 0.0)


def near_ties(trials: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How much of what was tried comes close to the best: the share of a case's trials within so many per
    cent of its best, median over the cases."""
    good = trials.dropna(subset=["time_us"])
    draw.need(good, "trial that held")
    ax = draw.axes(ax, 8.0, 4.2)
    names = draw.languages(good)
    x = np.linspace(0.0, 0.5, 51)
    for name in names:
        shares = []
        for _, part in good[good["backend"] == name].groupby(["run_id", "case"]):
            ratio = part["time_us"].to_numpy(float) / part["time_us"].min() - 1.0
            shares.append((ratio[:, None] <= x).mean(axis=0))
        colour, marker = draw.style(name, names)
        ax.plot(100 * x, np.median(shares, axis=0), marker=marker, markevery=10, color=colour, label=name)
    ax.axvline(2.0, color="#999999", linewidth=0.8, linestyle="--")
    ax.set_xlabel("slower than the best by at most, %")
    ax.set_ylabel("share of the configs tried")
    # markers at 1 are whole
    ax.set_ylim(0, 1.04)
    draw.legend(ax, "dashed: the noise of a quick trial")
    return ax


def compile_seconds(compiled: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Seconds to compile one specialisation, a point each, a bar at the median."""
    rows = compiled[
        (compiled["status"] == "ok") & (compiled["seconds"] > 0) & (compiled["registers"].notna())
    ]
    rows = rows[rows["role"] == "language"]
    draw.need(rows, "compile")
    names = sorted(rows["backend"].unique())
    ax = draw.axes(ax, 8.0, 1.2 + 0.6 * len(names))
    rng = np.random.default_rng(0)
    for y, name in enumerate(names):
        seconds = rows[rows["backend"] == name]["seconds"].to_numpy(float)
        colour, marker = draw.style(name, names)
        ax.plot(
            seconds, y + rng.uniform(-0.2, 0.2, seconds.size), marker, color=colour, alpha=0.4, markersize=4
        )
        ax.plot([np.median(seconds)] * 2, [y - 0.35, y + 0.35], color="black", linewidth=2)
        ax.annotate(f"{np.median(seconds):.1f} s", (np.median(seconds), y - 0.38), ha="center", fontsize=9)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.7)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("seconds to compile one specialisation (bar: median)")
    draw.grid(ax)
    return ax


#: what facts are called on an axis, and what they are divided by
_FACTS = {"registers": ("registers a thread", 1), "smem": ("shared memory a block, KiB", 1024)}


def facts(table: pd.DataFrame, name: str = "registers", ax: Axes | None = None) -> Axes:
    """A codegen fact of each winner (``registers``, ``smem``, ``hgmma``, …) against its fraction;
    a cross marks winners that spill. ``table``: rows of ``frames.with_facts``."""
    rows = table.dropna(subset=["fraction", name]).drop_duplicates(["workload", "case", "regime", "backend"])
    draw.need(rows, "winner whose compile was recorded")
    ax = draw.axes(ax, 8.0, 4.6)
    names = sorted(rows["backend"].unique())
    title, unit = _FACTS.get(name, (name.replace("_", " "), 1))
    for backend in names:
        mine = rows[rows["backend"] == backend]
        colour, marker = draw.style(backend, names)
        ax.plot(mine[name] / unit, mine["fraction"], marker, color=colour, label=backend, alpha=0.6)
    spills = rows[rows["spill_stores"] > 0]
    ax.plot(spills[name] / unit, spills["fraction"], "x", color="black", markersize=5, label="spills")
    ax.set_xlabel(title)
    ax.set_ylabel("fraction of the fastest vendor kernel")
    draw.ratios(ax.yaxis, float(rows["fraction"].min()), float(rows["fraction"].max()))
    draw.one_line(ax, rows, vertical=False)
    draw.legend(ax, draw.unique(rows["gpu"]))
    return ax


def roofline(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Speed against arithmetic intensity under the chip's fixed rates (arithmetic at the maximum clock,
    measured read bandwidth). ``table``: rows of ``fraction_of`` of one GPU."""
    rows = table.dropna(subset=["tflops", "gbps"]).drop_duplicates(["workload", "case", "regime", "backend"])
    rows = rows[rows["gpu"].isin(list(PEAKS))]
    draw.need(rows, "row on a GPU whose rates are known")
    flops, width = PEAKS[str(rows["gpu"].iloc[0])]
    ax = draw.axes(ax, 8.0, 4.8)
    intensity = 1e3 * rows["tflops"].to_numpy(float) / rows["gbps"].to_numpy(float)
    span = np.geomspace(min(intensity.min(), 1.0) * 0.8, intensity.max() * 1.3, 200)
    ax.plot(
        span, np.minimum(flops, span * width) / 1e12, color="#444444", linewidth=1.2, label="speed of light"
    )
    names = sorted(rows["backend"].unique())
    for number, name in enumerate(names):
        pick = (rows["backend"] == name).to_numpy()
        colour, marker = draw.style(name, names)
        # side by side, for languages of one case have one intensity; to the right, which never lifts a point
        # above the line
        ax.plot(
            intensity[pick] * 1.09**number,
            rows["tflops"].to_numpy(float)[pick],
            marker,
            color=colour,
            label=name,
            alpha=0.6,
            markersize=4,
            markeredgewidth=0,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOP per byte that must cross device memory")
    ax.set_ylabel("TFLOP/s")
    draw.legend(ax, f"{draw.unique(rows['gpu'])}, {draw.unique(rows['regime'])}")
    return ax
