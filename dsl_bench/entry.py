"""Participants of races as rows, and rows as a DataFrame and back: what reports and notebooks work on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dsl_bench.errors import UsageError
from dsl_bench.records import Accuracy, Participant, Race, Record, RunHeader

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Entry:
    """One participant of one race: a row of ``load_results()``. Times in microseconds, samples in ns a call.

    ``race`` numbers the races in the order in which they were run; ``process`` is unique to the process that
    ran it. ``time_us`` is the median (NaN without samples); ``error`` the greatest RMS error over that of
    rounding the reference (NaN where none was measured)."""

    race: int
    run_id: str
    process: str
    started: str
    gpu: str
    workload: str
    case: str
    groups: tuple[str, ...]
    dtype: str
    params: dict[str, int | str]
    regime: str
    data: str
    kernel: str
    backend: str
    role: str
    config: dict[str, Any]
    kernel_hash: str
    key: str
    version: str
    status: str
    check: str
    reason: str
    time_us: float
    host_us: float
    clock_mhz: float
    power_w: float
    flops: float
    bytes: float
    error: float
    timer: str
    calls: int
    dropped: int
    samples: NDArray[np.int64]


def entries(found: Iterable[Record]) -> list[Entry]:
    """Every participant of every race, oldest race first. Participants that were verified but raced apart (in
    another record of the same job) appear once, where they raced."""
    kept = list(found)
    gpus = {r.run_id: str(r.environment.get("gpu", "")) for r in kept if isinstance(r, RunHeader)}
    races = [r for r in kept if isinstance(r, Race)]
    races.sort(key=lambda r: r.started)
    rows = []
    for number, race in enumerate(races):
        gpu = gpus.get(race.run_id, "")
        place = {participant: row for row, participant in enumerate(race.racers)}
        for index, person in enumerate(race.participants):
            if index in place or person.status != "ok":
                samples = race.samples[place[index]] if index in place else []
                rows.append(_entry(number, gpu, race, person, np.asarray(samples, dtype=np.int64)))
    return rows


def _entry(number: int, gpu: str, race: Race, person: Participant, samples: NDArray[np.int64]) -> Entry:
    return Entry(
        race=number,
        run_id=race.run_id,
        process=f"{race.run_id}/{race.process}",
        started=race.started,
        gpu=gpu,
        workload=race.case.workload,
        case=race.case.name,
        groups=race.case.groups,
        dtype=race.case.dtype,
        params=dict(race.case.params),
        regime=race.regime,
        data=race.data,
        kernel=person.kernel,
        backend=person.backend,
        role=person.role,
        config=dict(person.config),
        kernel_hash=person.kernel_hash,
        key=person.key,
        version=person.version,
        status=person.status,
        check=person.check,
        reason=person.reason,
        time_us=float(np.median(samples)) / 1e3 if samples.size else float("nan"),
        host_us=person.host_us,
        clock_mhz=race.clock_mhz,
        power_w=race.power_w,
        flops=race.flops,
        bytes=race.bytes,
        error=_error(person.accuracy),
        timer=race.timer,
        calls=race.calls,
        dropped=race.dropped,
        samples=samples,
    )


def _error(accuracy: Iterable[Accuracy]) -> float:
    return max((a.rms / a.rounding_rms for a in accuracy if a.rounding_rms > 0), default=float("nan"))


def to_frame(rows: Sequence[Entry]) -> pd.DataFrame:
    """Entries as a DataFrame; see :func:`from_frame` for the way back."""
    import pandas as pd

    names = [f.name for f in fields(Entry)]
    return pd.DataFrame({name: _column([getattr(row, name) for row in rows]) for name in names})


def _column(values: list[Any]) -> Any:
    """Lists, dicts and arrays one a cell: pandas would make a table of equally long ones."""
    if not values or not isinstance(values[0], tuple | dict | np.ndarray):
        return values
    cells = np.empty(len(values), dtype=object)
    cells[:] = [None] * len(values)
    for index, value in enumerate(values):
        cells[index] = value
    return cells


def from_frame(frame: pd.DataFrame) -> list[Entry]:
    """The entries behind the rows of a DataFrame from :func:`load_results`, filtered as the user liked."""
    names = [f.name for f in fields(Entry)]
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise UsageError(f"not a frame of load_results(): it lacks {', '.join(missing)}")
    return [
        Entry(**dict(zip(names, row, strict=True))) for row in frame[names].itertuples(index=False, name=None)
    ]
