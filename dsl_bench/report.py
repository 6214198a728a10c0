"""Rows and summaries of recorded races, for the terminal, the README and notebooks. Owns every ratio that is
shown (:mod:`dsl_bench.standing` computes them from samples); none is ever stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsl_bench import stats, store, tables
from dsl_bench.errors import UsageError
from dsl_bench.records import REGIMES, CaseRef, Race, Record, RunHeader
from dsl_bench.standing import IMPLAUSIBLE, Book, Numbers, Slot, Standing, stand
from dsl_bench.store import Entry

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

ROW_FIELDS = (
    "workload case group dtype regime backend kernel config status reason time_us host_us clock_mhz tflops "
    "gbps sol baseline baseline_version fraction fraction_lo fraction_hi fraction_default floor own_clock "
    "verdict error error_vendor kernel_hash stale gpu run_id"
).split()
MEAN_FIELDS = (
    "workload group dtype regime backend geomean min cases total wins ties losses ambiguous stale gpu"
).split()
_SHORT = (
    "group case regime backend kernel status time_us tflops sol clock_mhz baseline fraction fraction_lo "
    "fraction_hi verdict stale reason"
).split()

#: the pseudo-regime of a summary: case by case, the lower of the two regimes' fractions
WORSE = "worse"

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


# -- rows -------------------------------------------------------------------------------------------------


def rows(
    records: Iterable[Record], hashes: Mapping[str, str] | None = None, cases: Sequence[CaseRef] = ()
) -> list[Row]:
    """One row a case, group, regime and language, with the fields ``ROW_FIELDS`` (see docs/results.md).

    ``hashes`` maps kernel ids to the tree's source hashes (None: nothing is called stale); ``cases`` are the
    workloads' own, for groups and order. A case of two groups gives two rows. A language that failed, refused
    or was absent where another raced has a row with its status and reason, and no numbers."""
    found = list(records)
    return _rows(store.entries(found), found, hashes, cases)


def _rows(
    entries: Sequence[Entry],
    found: Sequence[Record],
    hashes: Mapping[str, str] | None,
    cases: Sequence[CaseRef],
) -> list[Row]:
    book = Book(entries, found, {(c.workload, c.name): c for c in cases})
    made = []
    for slot in book.slots():
        row = _row(slot, stand(slot, book, hashes), book)
        made += [row | {"group": group} for group in slot.case.groups or ("",)]
    return sorted(made, key=_place(cases))


def _place(cases: Sequence[CaseRef]) -> Any:
    """The key that sorts rows as the workloads list their groups and cases."""
    groups = {g: n for n, g in enumerate(dict.fromkeys((c.workload, g) for c in cases for g in c.groups))}
    names = {(c.workload, c.name): n for n, c in enumerate(cases)}

    def key(row: Row) -> tuple[Any, ...]:
        group = groups.get((row["workload"], row["group"]), len(groups))
        case = names.get((row["workload"], row["case"]), len(names))
        last = (row["case"], row["regime"], row["backend"])
        return row["gpu"], row["workload"], group, row["group"], row["dtype"], case, *last

    return key


def _row(slot: Slot, standing: Standing, book: Book) -> Row:
    row: Row = dict.fromkeys(ROW_FIELDS)
    row |= {
        "workload": slot.case.workload,
        "case": slot.case.name,
        "dtype": slot.case.dtype,
        "regime": slot.regime,
        "backend": slot.backend,
        "status": standing.status,
        "reason": standing.reason,
        "stale": standing.stale,
        "gpu": slot.gpu,
    }
    if standing.entries:
        entry = standing.entries[-1]
        row |= {"kernel": entry.kernel, "config": entry.config, "kernel_hash": entry.kernel_hash}
        row |= {"run_id": entry.run_id, "error": _finite(entry.error)}
        if standing.status == "ok":
            row |= _numbers(entry, Numbers(standing, book))
    return row


def _numbers(entry: Entry, numbers: Numbers) -> Row:
    time_us = numbers.mean("time_us")
    sol = numbers.sol(time_us / 1e6)
    row: Row = {
        "time_us": time_us,
        "host_us": numbers.mean("host_us"),
        "clock_mhz": numbers.mean("clock_mhz"),
        "tflops": entry.flops / time_us / 1e6,
        "gbps": entry.bytes / time_us / 1e3,
        "sol": sol,
        "floor": numbers.floor,
    }
    if sol is not None and sol > IMPLAUSIBLE:
        return row | {"status": "implausible", "reason": f"{sol:.2f} of the fixed rates: faster than physics"}
    if numbers.baseline is None:
        return row | {"status": "baseline_missing", "reason": "no verified baseline in the race, so no ratio"}
    return row | _ratios(numbers)


def _ratios(numbers: Numbers) -> Row:
    estimate, name = numbers.estimate, numbers.baseline
    if estimate is None or name is None:
        return {}
    vendor = numbers.rivals[-1][name]
    return {
        "baseline": vendor.kernel,
        "baseline_version": vendor.version,
        "fraction": estimate.value,
        "fraction_lo": estimate.lo,
        "fraction_hi": estimate.hi,
        "fraction_default": numbers.of_default,
        "verdict": numbers.verdict,
        "error_vendor": _finite(vendor.error),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- summaries --------------------------------------------------------------------------------------------


def geomeans(table: Sequence[Row], cases: Sequence[CaseRef] = ()) -> list[Row]:
    """Geometric means of ``fraction`` by workload, group, dtype, regime and backend, with the fields
    ``MEAN_FIELDS``. Regime ``worse`` takes, case by case, the lower of the two regimes. ``total`` counts
    every case of the group (of ``cases`` where given): one that failed, was refused or is missing stays in
    ``total`` and out of ``cases``."""
    sizes = _members(cases)
    groups: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in table:
        key = (row["gpu"], row["workload"], row["group"], row["dtype"], row["backend"])
        groups.setdefault(key, {}).setdefault(row["case"], []).append(row)
    made = []
    for (gpu, workload, group, dtype, backend), by_case in groups.items():
        total = len(sizes.get((workload, group, dtype), set()) | set(by_case))
        raced = {r["regime"] for found in by_case.values() for r in found}
        for regime in (*(r for r in REGIMES if r in raced), *((WORSE,) if set(REGIMES) <= raced else ())):
            held = [r for r in (_pick(found, regime) for found in by_case.values()) if r is not None]
            labels = (workload, group, dtype, regime, backend)
            row = dict(zip(MEAN_FIELDS, labels, strict=False)) | _mean(held) | {"total": total, "gpu": gpu}
            made.append({name: row[name] for name in MEAN_FIELDS})
    return made


def _members(cases: Sequence[CaseRef]) -> dict[tuple[str, str, str], set[str]]:
    sizes: dict[tuple[str, str, str], set[str]] = {}
    for case in cases:
        for group in case.groups:
            sizes.setdefault((case.workload, group, case.dtype), set()).add(case.name)
    return sizes


def _pick(found: Sequence[Row], regime: str) -> Row | None:
    """A case's row in ``regime`` if it has a fraction; for ``worse``, the lower of both, if both have one."""
    able = {r["regime"]: r for r in found if r["fraction"] is not None}
    if regime != WORSE:
        return able.get(regime)
    if not set(REGIMES) <= set(able):
        return None
    return min(able.values(), key=lambda r: float(r["fraction"]))


def _mean(held: Sequence[Row]) -> Row:
    fractions = [r["fraction"] for r in held]
    verdicts = [r["verdict"] for r in held]
    return {
        "geomean": stats.geomean(fractions) if fractions else None,
        "min": min(fractions, default=None),
        "cases": len(fractions),
        "wins": verdicts.count("win"),
        "ties": verdicts.count("tie"),
        "losses": verdicts.count("loss"),
        "ambiguous": verdicts.count("ambiguous"),
        "stale": sum(bool(r["stale"]) for r in held),
    }


def short_columns(geomean: bool = False) -> list[str]:
    """The columns for human eyes."""
    return [n for n in MEAN_FIELDS if n != "gpu"] if geomean else list(_SHORT)


#: columns that a terminal may do without, the least needed first
SPARE = (
    ("clock_mhz",),
    ("sol",),
    ("tflops",),
    ("kernel",),
    ("baseline",),
    ("time_us",),
    ("fraction_lo", "fraction_hi"),
)
MEAN_SPARE = (("ambiguous",), ("ties",), ("losses",), ("wins",))


def headline(means: Sequence[Row], worst: bool = True) -> tuple[list[Row], list[str]]:
    """A row a group and dtype with a column a language (geometric mean, where ``worst`` with the worst case),
    and the columns' names. ``fastest`` names the languages within 1 % of the best geometric mean, among those
    that have the most cases. ``means``: rows of :func:`geomeans` of one regime and GPU."""
    backends = list(dict.fromkeys(m["backend"] for m in means))
    workloads = list(dict.fromkeys(m["workload"] for m in means))
    # the handful of a first run is no benchmark: it must not be the first number that is read
    means = sorted(means, key=lambda m: (workloads.index(m["workload"]), m["group"] == "quick"))
    lines: dict[tuple[str, ...], list[Row]] = {}
    for mean in means:
        lines.setdefault((mean["workload"], mean["group"], mean["dtype"]), []).append(mean)
    rows = [
        {"workload": workload, "group": group, "dtype": dtype, "cases": held[0]["total"]}
        | {m["backend"]: _headline_cell(m, worst) for m in held}
        | {"fastest": _fastest(held)}
        for (workload, group, dtype), held in lines.items()
    ]
    return rows, ["workload", "group", "dtype", "cases", *backends, "fastest"]


def _headline_cell(mean: Row, worst: bool) -> str:
    if mean["geomean"] is None:
        return "–"
    value, of = f"{mean['geomean']:.3f}", "/"
    if worst:
        value, of = f"{value} / {mean['min']:.3f}", " of "
    return value + (f" ({mean['cases']}{of}{mean['total']})" if mean["cases"] < mean["total"] else "")


def _fastest(held: Sequence[Row]) -> str:
    most = max(m["cases"] for m in held)
    able = {m["backend"]: m["geomean"] for m in held if m["cases"] == most and m["geomean"] is not None}
    names = [name for name, value in able.items() if value >= 0.99 * max(able.values())]
    return "all" if len(names) == len(held) > 1 else ", ".join(names)


# -- the README -------------------------------------------------------------------------------------------


def render_readme(
    text: str, table: Sequence[Row], records: Iterable[Record], cases: Sequence[CaseRef] = ()
) -> str:
    """``text`` with what stands between its markers replaced by the summary of ``table``. Raises UsageError
    where the markers are missing. The same records give the same text."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the text has no {BEGIN} … {END} to write the results between")
    return f"{head}{begin}\n{summary(table, records, cases)}\n{end}{tail}"


def summary(table: Sequence[Row], records: Iterable[Record], cases: Sequence[CaseRef] = ()) -> str:
    """The headline table in Markdown, a block for each GPU, with what it was measured on and when."""
    found = list(records)
    blocks = []
    for gpu in dict.fromkeys(row["gpu"] for row in table):
        mine = [row for row in table if row["gpu"] == gpu]
        means = [m for m in geomeans(mine, cases) if m["regime"] == WORSE]
        blocks.append(f"{_caption(gpu, mine, found)}\n\n{tables.markdown(*headline(means))}")
    return "\n\n".join(blocks)


def _caption(gpu: str, mine: Sequence[Row], found: Sequence[Record]) -> str:
    runs = {row["run_id"] for row in mine if row["run_id"]}
    headers = [r for r in found if isinstance(r, RunHeader) and r.run_id in runs]
    races = [r for r in found if isinstance(r, Race) and r.run_id in runs]
    dates = sorted({r.started[:10] for r in races})
    versions = sorted({f"{p.backend} ({p.version})" for r in races for p in r.participants if p.version})
    drivers = sorted({str(h.environment["driver"]) for h in headers if h.environment.get("driver")})
    span = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no date"
    processes = len({(r.run_id, r.process) for r in races})
    parts = [
        f"{gpu or 'unknown GPU'}, {span}, {len(races)} races in {processes} processes",
        *(f"driver {d}" for d in drivers),
        *versions,
    ]
    note = "; some kernels have changed since" if any(row["stale"] for row in mine) else ""
    lone = _from_one_process(mine, [r for r in found if isinstance(r, Race)])
    note += f"; from one process only: {'; '.join(lone)}" if lone else ""
    return (
        "Speed as a fraction of the fastest vendor kernel, geometric mean / worst case, the lower of the "
        "cold and the sustained regime case by case; fastest: within 1 % of the best mean, of the languages "
        f"with the most cases.\n\n{'; '.join(parts)}{note}."
    )


def _from_one_process(mine: Sequence[Row], races: Sequence[Race]) -> list[str]:
    """Groups and languages with a row that only one process raced, a text a workload: claims that wait for
    their second."""
    seen: dict[tuple[str, str, str], set[tuple[str, str]]] = {}
    for race in races:
        for index in race.racers:
            slot = (race.case.name, str(race.regime), race.participants[index].key)
            seen.setdefault(slot, set()).add((race.run_id, race.process))
    held = {
        (r.case.name, str(r.regime), p.kernel, str(p.config)): p.key for r in races for p in r.participants
    }
    found: dict[str, dict[str, dict[str, None]]] = {}
    for row in mine:
        key = held.get((row["case"], row["regime"], row["kernel"], str(row["config"])))
        if key is not None and len(seen.get((row["case"], row["regime"], key), ())) == 1:
            groups = found.setdefault(row["workload"], {})
            groups.setdefault(row["group"], {})[row["backend"]] = None
    return [f"{workload} {_places(groups, mine, workload)}" for workload, groups in found.items()]


def _places(groups: Mapping[str, Iterable[str]], mine: Sequence[Row], workload: str) -> str:
    """Groups, with the languages where these are not all."""
    every = {r["backend"] for r in mine if r["workload"] == workload and r["fraction"] is not None}
    return ", ".join(g if set(b) >= every else f"{g} ({', '.join(b)})" for g, b in groups.items())


# -- for notebooks ----------------------------------------------------------------------------------------


def fraction_of(
    results: pd.DataFrame, hashes: Mapping[str, str] | None = None, cases: Sequence[CaseRef] = ()
) -> pd.DataFrame:
    """The rows of ``report`` for a frame of ``load_results()``, whatever filter it went through: each
    language's speed as a fraction of the fastest verified vendor kernel of the same races. Columns:
    ``ROW_FIELDS``."""
    import pandas as pd

    return pd.DataFrame(_rows(store.from_frame(results), [], hashes, cases), columns=ROW_FIELDS)


def best(results: pd.DataFrame) -> pd.DataFrame:
    """The fastest language on each case and regime: its row of :func:`fraction_of`."""
    table = fraction_of(results)
    table = table[table["status"].isin(["ok", "baseline_missing"])]
    keys = ["gpu", "workload", "group", "case", "regime"]
    fastest = table.sort_values("time_us", kind="stable").drop_duplicates(keys)
    return fastest.sort_index().reset_index(drop=True)


def geomean(results: pd.DataFrame, cases: Sequence[CaseRef] = ()) -> pd.DataFrame:
    """Geometric means of :func:`fraction_of`, as ``report --geomean`` gives them (``MEAN_FIELDS``)."""
    import pandas as pd

    table = _rows(store.from_frame(results), [], None, cases)
    return pd.DataFrame(geomeans(table, cases), columns=MEAN_FIELDS)
