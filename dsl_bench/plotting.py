"""What the plots share: colours and markers, axes, legends, and the line at 1.0 with its name.

Colours are Okabe and Ito's, which the colour-blind tell apart; every language also has its own marker."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dsl_bench.errors import NothingMatched

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


def axes(ax: Axes | None, width: float, height: float) -> Axes:
    """``ax``, or new ones of so many inches."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def need(table: pd.DataFrame, what: str) -> None:
    """Raises NothingMatched where there is no row to draw."""
    if table.empty:
        raise NothingMatched(f"there is nothing to plot: no {what}")


def languages(table: pd.DataFrame) -> list[str]:
    """The languages of a table of trials or compiles, which hold those of the libraries too (``role``)."""
    return sorted(set(table[table["role"] == "language"]["backend"]))


def legend(ax: Axes, title: str = "") -> None:
    """The title to the left above the axes and the legend to the right, where neither can hide a point."""
    handles = ax.get_legend_handles_labels()[0]
    # a handle is as wide as some 13 characters; where both would not fit side by side, the title rises
    ax.set_title(title, loc="left", fontsize=9, pad=24 if len(title) + 13 * len(handles) > 86 else None)
    ax.legend(
        frameon=False,
        fontsize=9,
        ncols=len(handles),
        handletextpad=0.3,
        columnspacing=1.2,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )


def _baselines(table: pd.DataFrame) -> str:
    """Which vendor kernels stand at 1.0, by version, most frequent first."""
    known = table.dropna(subset=["baseline"])
    version = known.drop_duplicates("baseline").set_index("baseline")["baseline_version"]
    named: dict[str, list[str]] = {}
    for name in known["baseline"].value_counts().index:
        named.setdefault(_short(version[name]), []).append(name)
    return "; ".join(f"{', '.join(names)} ({which})" for which, names in named.items())


def _short(version: str) -> str:
    """The parts of a version that name a library, not a switch."""
    parts = [p for p in str(version).split(", ") if "reduction" not in p]
    return ", ".join(parts)


def inches(ax: Axes) -> float:
    """About how wide axes are once labels have taken their room."""
    place = ax.get_subplotspec()
    columns = place.get_gridspec().ncols if place is not None else 1
    return float(ax.figure.bbox.width / ax.figure.dpi / columns - 1.9)


def one_line(ax: Axes, table: pd.DataFrame, vertical: bool = True) -> None:
    """The line at 1.0, and beneath the label of the x axis what it stands for."""
    (ax.axvline if vertical else ax.axhline)(1.0, color="#444444", linewidth=1.2, zorder=1)
    # a character of this size is an eighteenth of an inch wide, and the label may be wider than the axes
    width = max(40, int(18 * inches(ax)))
    lines = textwrap.wrap(f"1.0 = fastest of {_baselines(table)}", width)
    ax.set_xlabel("\n".join([ax.get_xlabel(), *lines]), fontsize=8)


def span(ax: Axes, low: float, high: float, share: float) -> None:
    """An x axis from ``low`` to ``high`` and the line at 1.0, of which a share at the left stays empty."""
    low, high = min(low, 1.0), max(high, 1.0)
    ratios(ax.xaxis, low, high)
    more = 0.04 + share / (1.0 - share)
    if ax.get_xscale() == "log":
        ax.set_xlim(low * (low / high) ** more, high * (high / low) ** 0.04)
    else:
        ax.set_xlim(low - more * (high - low), high + 0.04 * (high - low))


def grid(ax: Axes) -> None:
    """Faint lines at the ticks of the x axis, and no frame above and to the right."""
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def ratios(axis: Any, low: float, high: float, wide: float = 1.8) -> None:
    """A logarithmic axis with plain numbers where ratios are far apart: 0.5 and 2 are equally far from 1."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if not low > 0 or high / low <= wide:
        return
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    steps = (0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0)
    ticks = [t for t in steps if low * 0.95 <= t <= high * 1.05]
    if high / low > 6:
        ticks = [t for t in ticks if t not in (0.6, 0.8, 0.9, 1.2)]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def unique(found: Iterable[Any]) -> str:
    """The different values, in order, as a text."""
    return ", ".join(dict.fromkeys(map(str, found)))
