"""Plots of results: each takes a DataFrame (and an Axes, if you have one) and returns the Axes.

Colours are Okabe and Ito's, which the colour-blind tell apart; every language also has its own marker. Where
fractions are shown, the line at 1.0 is the fastest vendor kernel, named with its version.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsl_bench.errors import NothingMatched
from dsl_bench.standing import PEAKS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

COLOURS = {"cuda": "#0072B2", "tilelang": "#D55E00", "triton": "#009E73"}
MARKERS = {"cuda": "s", "tilelang": "D", "triton": "o"}
_MORE = (("#CC79A7", "^"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"))


def style(name: str, names: Iterable[str]) -> tuple[str, str]:
    """Colour and marker of a language: fixed for ours, in order of the alphabet for any other."""
    if name in COLOURS:
        return COLOURS[name], MARKERS[name]
    others = sorted(set(names) - set(COLOURS))
    return _MORE[others.index(name) % len(_MORE)]


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _need(table: pd.DataFrame, what: str) -> None:
    if table.empty:
        raise NothingMatched(f"there is nothing to plot: no {what}")


def _legend(ax: Axes, title: str = "") -> None:
    ax.legend(title=title or None, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _baselines(table: pd.DataFrame) -> str:
    """Which vendor kernels stand at 1.0, with their versions, most frequent first."""
    known = table.dropna(subset=["baseline"])
    names = known["baseline"].value_counts()
    version = known.drop_duplicates("baseline").set_index("baseline")["baseline_version"]
    return "; ".join(f"{name} ({_short(version[name])})" for name in names.index)


def _short(version: str) -> str:
    """The parts of a version that name a library, not a switch."""
    parts = [p for p in str(version).split(", ") if "reduction" not in p]
    return ", ".join(parts)


def _one_line(ax: Axes, table: pd.DataFrame, vertical: bool = True) -> None:
    """The line at 1.0, and beneath the label of the x axis what it stands for."""
    (ax.axvline if vertical else ax.axhline)(1.0, color="#444444", linewidth=1.2, zorder=1)
    lines = textwrap.wrap(f"1.0 = fastest of {_baselines(table)}", 96)
    ax.set_xlabel("\n".join([ax.get_xlabel(), *lines]), fontsize=8)


def _grid(ax: Axes) -> None:
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def fractions(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Speed as a fraction of the fastest vendor kernel, a line a case, with 95 % intervals.

    ``table``: rows of ``fraction_of`` of one workload and regime (one or several groups)."""
    rows = table.dropna(subset=["fraction"]).drop_duplicates(["case", "regime", "backend"])
    _need(rows, "row with a fraction")
    cases = list(dict.fromkeys(rows["case"]))
    names = sorted(rows["backend"].unique())
    ax = _axes(ax, 8.0, 1.3 + 0.34 * len(cases))
    for number, name in enumerate(names):
        mine = rows[rows["backend"] == name]
        colour, marker = style(name, names)
        # a row has one height a language, so that no interval hides another
        y = np.array([cases.index(c) for c in mine["case"]]) + 0.22 * (number - (len(names) - 1) / 2)
        error = np.abs(
            mine[["fraction_lo", "fraction_hi"]].to_numpy(float).T - mine["fraction"].to_numpy(float)
        )
        ax.errorbar(
            mine["fraction"],
            y,
            xerr=error,
            fmt=marker,
            color=colour,
            label=name,
            markersize=5,
            capsize=2,
            zorder=3,
        )
    ax.set_yticks(range(len(cases)), cases, fontsize=8)
    ax.set_ylim(len(cases) - 0.4, -0.6)
    ax.set_xlabel(f"fraction of the fastest vendor kernel, {', '.join(sorted(rows['regime'].unique()))}")
    _grid(ax)
    _one_line(ax, rows)
    _legend(ax)
    return ax


def geomeans(means: pd.DataFrame, table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Geometric means by group, a thin line down to the worst case; hollow where cases are missing.

    ``means``: rows of ``geomean`` of one regime (``worse`` for the lower of the two); ``table``: the rows of
    ``fraction_of`` they come from, which name the baselines."""
    rows = means.dropna(subset=["geomean"])
    _need(rows, "geometric mean")
    groups = list(dict.fromkeys(zip(rows["workload"], rows["group"], rows["dtype"], strict=True)))
    names = sorted(rows["backend"].unique())
    ax = _axes(ax, 8.0, 1.3 + 0.4 * len(groups))
    for number, name in enumerate(names):
        colour, marker = style(name, names)
        for row in rows[rows["backend"] == name].itertuples():
            y = groups.index((row.workload, row.group, row.dtype)) + 0.2 * (number - (len(names) - 1) / 2)
            ax.plot([row.min, row.geomean], [y, y], color=colour, linewidth=1)
            whole = row.cases == row.total
            ax.plot(
                row.geomean, y, marker, color=colour, markerfacecolor=colour if whole else "white", zorder=3
            )
        ax.plot([], [], marker, color=colour, label=name)
    ax.set_yticks(range(len(groups)), [" ".join(g) for g in groups], fontsize=8)
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_xlabel("fraction of the fastest vendor kernel: geometric mean, line to the worst case")
    _grid(ax)
    _one_line(ax, table)
    _legend(ax)
    return ax


def regimes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Cold against sustained, a point a case and language: off the diagonal, the regime decides."""
    rows = table.dropna(subset=["fraction"]).drop_duplicates(["workload", "case", "regime", "backend"])
    wide = rows.pivot_table(
        index=["workload", "case", "backend"], columns="regime", values="fraction"
    ).dropna()
    _need(wide, "case raced in both regimes")
    ax = _axes(ax, 6.4, 5.0)
    names = sorted(wide.index.get_level_values("backend").unique())
    for name in names:
        mine = wide.xs(name, level="backend")
        colour, marker = style(name, names)
        ax.plot(mine["cold"], mine["sustained"], marker, color=colour, label=name, alpha=0.8)
    low, high = float(wide.to_numpy().min()), float(wide.to_numpy().max())
    ax.plot([low, high], [low, high], color="#999999", linewidth=0.8)
    ax.axhline(1.0, color="#444444", linewidth=1.2, zorder=1)
    if high / low > 1.6:
        ax.set_xscale("log")
        ax.set_yscale("log")
        _plain_ticks(ax, low, high)
    ax.set_xlabel("fraction, cold")
    ax.set_ylabel("fraction, sustained")
    _one_line(ax, rows)
    _legend(ax)
    return ax


def _plain_ticks(ax: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    ticks = [t for t in (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0) if low * 0.9 <= t <= high * 1.1]
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def budget(trials: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best so far against the number of trials, as a share of the best that was found in all of them.

    ``trials``: rows of ``load_trials``. Lines are medians over the cases, bands their middle half."""
    good = trials.copy()
    _need(good, "trial")
    good["time_us"] = good["time_us"].fillna(np.inf)
    ax = _axes(ax, 7.0, 4.2)
    names = sorted(n for n in good["backend"].unique() if n != "vendor")
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
        colour, marker = style(name, names)
        x = np.arange(1, length + 1)
        ax.plot(x, np.median(grid, axis=0), marker=marker, color=colour, label=name, markersize=4)
        ax.fill_between(x, *np.percentile(grid, [25, 75], axis=0), color=colour, alpha=0.15, linewidth=0)
    ax.axhline(1.0, color="#444444", linewidth=1.2, zorder=1)
    ax.set_xlabel("trials")
    ax.set_ylabel("speed of the best so far, share of the final best")
    _legend(ax)
    return ax


def _best_so_far(times: Any) -> Any:
    best = np.minimum.accumulate(times)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isfinite(best), best[-1] / best, 0.0)


def near_ties(trials: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How much of what was tried comes close to the best: the share of a case's trials within so many per
    cent of its best, median over the cases."""
    good = trials.dropna(subset=["time_us"])
    _need(good, "trial that held")
    ax = _axes(ax, 7.0, 4.2)
    names = sorted(n for n in good["backend"].unique() if n != "vendor")
    x = np.linspace(0.0, 0.5, 51)
    for name in names:
        shares = []
        for _, part in good[good["backend"] == name].groupby(["run_id", "case"]):
            ratio = part["time_us"].to_numpy(float) / part["time_us"].min() - 1.0
            shares.append((ratio[:, None] <= x).mean(axis=0))
        colour, marker = style(name, names)
        ax.plot(100 * x, np.median(shares, axis=0), marker=marker, markevery=10, color=colour, label=name)
    ax.axvline(2.0, color="#999999", linewidth=0.8, linestyle="--")
    ax.set_xlabel("slower than the best by at most, %")
    ax.set_ylabel("share of the configs tried")
    ax.set_ylim(0, 1)
    _legend(ax)
    return ax


def compile_seconds(compiled: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Seconds to compile one specialisation, a point each, a bar at the median."""
    rows = compiled[
        (compiled["status"] == "ok") & (compiled["seconds"] > 0) & (compiled["registers"].notna())
    ]
    _need(rows, "compile")
    names = sorted(rows["backend"].unique())
    ax = _axes(ax, 7.0, 1.2 + 0.6 * len(names))
    rng = np.random.default_rng(0)
    for y, name in enumerate(names):
        seconds = rows[rows["backend"] == name]["seconds"].to_numpy(float)
        colour, marker = style(name, names)
        ax.plot(
            seconds, y + rng.uniform(-0.2, 0.2, seconds.size), marker, color=colour, alpha=0.4, markersize=4
        )
        ax.plot([np.median(seconds)] * 2, [y - 0.35, y + 0.35], color="black", linewidth=2)
        ax.annotate(f"{np.median(seconds):.1f} s", (np.median(seconds), y - 0.38), ha="center", fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.7)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("seconds to compile one specialisation (bar: median)")
    _grid(ax)
    return ax


def facts(table: pd.DataFrame, name: str = "registers", ax: Axes | None = None) -> Axes:
    """A codegen fact of each winner (``registers``, ``smem``, ``hgmma``, …) against its fraction;
    a cross marks winners that spill. ``table``: rows of ``frames.with_facts``."""
    rows = table.dropna(subset=["fraction", name]).drop_duplicates(["workload", "case", "regime", "backend"])
    _need(rows, "winner whose compile was recorded")
    ax = _axes(ax, 7.0, 4.4)
    names = sorted(rows["backend"].unique())
    for backend in names:
        mine = rows[rows["backend"] == backend]
        colour, marker = style(backend, names)
        ax.plot(mine[name], mine["fraction"], marker, color=colour, label=backend, alpha=0.6)
    spills = rows[rows["spill_stores"] > 0]
    ax.plot(spills[name], spills["fraction"], "x", color="black", markersize=9, label="spills")
    ax.set_xlabel(name.replace("_", " "))
    ax.set_ylabel("fraction of the fastest vendor kernel")
    _one_line(ax, rows, vertical=False)
    _legend(ax)
    return ax


def roofline(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Speed against arithmetic intensity under the chip's fixed rates (arithmetic at the maximum clock,
    measured read bandwidth). ``table``: rows of ``fraction_of`` of one GPU."""
    rows = table.dropna(subset=["tflops", "gbps"]).drop_duplicates(["workload", "case", "regime", "backend"])
    rows = rows[rows["gpu"].isin(list(PEAKS))]
    _need(rows, "row on a GPU whose rates are known")
    flops, width = PEAKS[str(rows["gpu"].iloc[0])]
    ax = _axes(ax, 7.4, 4.8)
    intensity = 1e3 * rows["tflops"].to_numpy(float) / rows["gbps"].to_numpy(float)
    span = np.geomspace(min(intensity.min(), 1.0) * 0.8, intensity.max() * 1.3, 200)
    ax.plot(
        span, np.minimum(flops, span * width) / 1e12, color="#444444", linewidth=1.2, label="speed of light"
    )
    names = sorted(rows["backend"].unique())
    for number, name in enumerate(names):
        pick = (rows["backend"] == name).to_numpy()
        colour, marker = style(name, names)
        # side by side: languages of one case have one intensity
        ax.plot(
            intensity[pick] * 1.07 ** (number - (len(names) - 1) / 2),
            rows["tflops"].to_numpy(float)[pick],
            marker,
            color=colour,
            label=name,
            alpha=0.6,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOP per byte that must cross device memory")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(str(rows["gpu"].iloc[0]), fontsize=9)
    _legend(ax)
    return ax
