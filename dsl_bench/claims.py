"""Names that several plugins claim: which of them stays, and what the others are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from dsl_bench.jobs import Described, Origin

#: the state of an installed plugin in whose place a file was given
REPLACED = "replaced"


def settled(described: Iterable[Described]) -> list[Described]:
    """The rows, of which no two that are ready have a backend, a workload or a kernel of one name."""
    return _with_lost_kernels(_without_twins(described))


def without_replaced(adders: Mapping[Origin, Described]) -> dict[Origin, Described]:
    """An installed plugin of kernels all of which a file has too gives way to the file."""
    files = [d for o, d in adders.items() if o.kind == "file" and d.state == "ready"]
    rows = dict(adders)
    for origin, row in adders.items():
        mine = {k.id for k in row.kernels}
        winner = next((f for f in files if mine and mine <= {k.id for k in f.kernels}), None)
        if origin.kind == "kernel" and row.state == "ready" and winner is not None:
            rows[origin] = _replaced(row, winner)
    return rows


def _replaced(row: Described, winner: Described) -> Described:
    reason = f"given as a file too, which is used in its place: {winner.origin.value}"
    return msgspec.structs.replace(row, state=REPLACED, reason=reason)


def _without_twins(described: Iterable[Described]) -> list[Described]:
    """Two origins with different entry names may still bring backends, or workloads, of one name. None is
    picked, unless one of them is a file that was given."""
    owners: dict[tuple[str, str], list[Described]] = {}
    rows = list(described)
    for row in rows:
        for kind, info in (("backend", row.backend), ("workload", row.workload)):
            if info is not None and row.state == "ready":
                owners.setdefault((kind, info.name), []).append(row)
    clashing = {
        id(row): (kind, twins) for (kind, _), twins in owners.items() if len(twins) > 1 for row in twins
    }
    result = []
    for row in rows:
        if id(row) in clashing:
            kind, twins = clashing[id(row)]
            files = [r for r in twins if r.origin.kind == "file"]
            if len(files) == 1:
                result.append(row if row is files[0] else _replaced(row, files[0]))
                continue
            who = " and ".join(f"{r.origin.dist} ({r.origin.value})" for r in twins)
            row = msgspec.structs.replace(
                row, state="duplicate", reason=f"two owners of one {kind} name: {who}; use one of them"
            )
        result.append(row)
    return result


def _with_lost_kernels(described: Iterable[Described]) -> list[Described]:
    """A plugin's kernel whose name is taken already is a problem of that plugin."""
    rows = list(described)
    owners: dict[str, Origin] = {}
    for row in rows:
        if row.backend is not None and row.state == "ready":
            owners |= {k.id: k.origin for k in row.backend.kernels}
    result = []
    for row in rows:
        lost = []
        for kernel in row.kernels if row.state == "ready" else ():
            first = owners.setdefault(kernel.id, row.origin)
            if first != row.origin:
                lost.append(f"kernel {kernel.id} is left out: {first.dist} ({first.value}) has it")
        result.append(msgspec.structs.replace(row, problems=[*row.problems, *lost]) if lost else row)
    return result
