"""What tuning left behind as DataFrames: winners, trials and compiles, for notebooks and plots."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dsl_bench import records, store
from dsl_bench.records import Compiled, Race, Record, Trial, Tuned

if TYPE_CHECKING:
    import pandas as pd

Paths = Path | str | Iterable[Path | str] | None

TUNING = (
    "workload case groups dtype backend contender strategy kernel config median_us near trials failed pruned "
    "compile_seconds gpu_seconds bound regret gpu run_id"
).split()
TRIALS = "workload case groups dtype backend role kernel config status reason time_us order run_id".split()
COMPILED = (
    "kernel backend role key status seconds registers spill_stores spill_loads stack smem threads hgmma "
    "tma_loads cubin_bytes assembler run_id"
).split()


def load_tuning(path: Paths = None) -> pd.DataFrame:
    """One row a case and contender that was tuned: the winner, how many configs lie within the noise of it
    (``near``, the winner included), and what it cost. Times in µs and seconds."""
    rows = [_tuned(r) for r in _read(path) if isinstance(r, Tuned) and r.near]
    return _frame(rows, TUNING)


def load_trials(path: Paths = None) -> pd.DataFrame:
    """One row a config that was tried: its status and median in µs (NaN where it failed). ``order`` counts a
    contender's trials of a case from 0; ``role`` is language or vendor. Trials are recorded compressed
    (``*-trials.jsonl.xz``)."""
    given = _given(path)
    around = _read(given)
    vendors = libraries(around)
    found = [r for r in around if isinstance(r, Trial)]
    for folder in (Path(p) for p in given):
        files = sorted(folder.rglob("*.jsonl.xz")) if folder.is_dir() else []
        found += [r for file in files for r in _compressed(file) if isinstance(r, Trial)]
    seen: dict[tuple[str, str, str], int] = {}
    rows = []
    for trial in found:
        slot = (trial.run_id, trial.case.name, trial.kernel.partition("/")[0])
        order = seen[slot] = seen.get(slot, -1) + 1
        rows.append(_trial(trial, order) | {"role": _role(trial.kernel, vendors)})
    return _frame(rows, TRIALS)


def load_compiled(path: Paths = None) -> pd.DataFrame:
    """One row a specialisation that was compiled: seconds, and the facts read from its cubin. ``role`` is
    language or vendor."""
    found = _read(path)
    vendors = libraries(found)
    rows = [_compiled(r) | {"role": _role(r.kernel, vendors)} for r in found if isinstance(r, Compiled)]
    return _frame(rows, COMPILED)


def libraries(found: Iterable[Record]) -> set[str]:
    """Backends whose kernels are baselines, as the races and searches among the records say: in a search each
    of these kernels stands for itself."""
    names = set()
    for record in found:
        if isinstance(record, Race):
            names |= {p.backend for p in record.participants if p.role != "language"}
        elif isinstance(record, Tuned) and "/" in record.contender:
            names.add(record.contender.partition("/")[0])
    return names


def _role(kernel: str, vendors: set[str]) -> str:
    return "vendor" if kernel.partition("/")[0] in vendors else "language"


def with_facts(results: pd.DataFrame, compiled: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``fraction_of`` with the facts of the artifact that raced, where its compile was recorded.

    ``results`` from ``load_results``, ``compiled`` from :func:`load_compiled`."""
    from dsl_bench.report import fraction_of

    join = ["run_id", "workload", "case", "regime", "kernel"]
    keys = results[results["role"] == "language"][[*join, "key"]].drop_duplicates(join)
    facts = compiled.dropna(subset=["registers"]).drop_duplicates("key")
    facts = facts.drop(columns=["kernel", "backend", "role", "status", "run_id"])
    return fraction_of(results).merge(keys, on=join).merge(facts, on="key")


def _given(path: Paths) -> list[Path | str]:
    if path is None:
        return list(store.default_paths())
    return [path] if isinstance(path, str | Path) else list(path)


def _read(path: Paths) -> list[Record]:
    return store.read(_given(path))[0]


def _compressed(path: Path) -> list[Record]:
    with lzma.open(path) as file:
        return [records.decode(line) for line in file if line.strip()]


def _frame(rows: list[dict[str, Any]], names: list[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=names)


def _case(record: Tuned | Trial) -> dict[str, Any]:
    case = record.case
    return {"workload": case.workload, "case": case.name, "groups": case.groups, "dtype": case.dtype}


def _tuned(record: Tuned) -> dict[str, Any]:
    best = record.near[0]
    row = {
        k: v for k, v in msgspec.structs.asdict(record).items() if k in TUNING and k not in ("case", "near")
    }
    return (
        row
        | _case(record)
        | {
            "backend": best.kernel.partition("/")[0],
            "kernel": best.kernel,
            "config": best.config,
            "median_us": best.median_ns / 1e3,
            "near": len(record.near),
        }
    )


def _trial(record: Trial, order: int) -> dict[str, Any]:
    good = record.status == "ok"
    return _case(record) | {
        "backend": record.kernel.partition("/")[0],
        "kernel": record.kernel,
        "config": record.config,
        "status": record.status,
        "reason": record.reason,
        "time_us": record.median_ns / 1e3 if good else float("nan"),
        "order": order,
        "run_id": record.run_id,
    }


def _compiled(record: Compiled) -> dict[str, Any]:
    facts: Mapping[str, Any] = msgspec.structs.asdict(record.facts) if record.facts else {}
    sass = facts.get("sass") or {}
    named = ("registers", "spill_stores", "spill_loads", "stack", "threads", "cubin_bytes", "assembler")
    smem = facts.get("smem_static", 0) + facts.get("smem_dynamic", 0) if facts else None
    return {name: facts.get(name) for name in named} | {
        "kernel": record.kernel,
        "backend": record.kernel.partition("/")[0],
        "key": record.key,
        "status": record.status,
        "seconds": record.seconds,
        "smem": smem,
        "hgmma": sass.get("HGMMA", 0),
        "tma_loads": sass.get("UTMALDG", 0),
        "run_id": record.run_id,
    }
