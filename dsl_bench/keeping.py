"""Descriptions of plugins on disk, each good for as long as the files behind its kernels stay as they are."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import msgspec

from dsl_bench.jobs import Described


class _Cached(msgspec.Struct, frozen=True):
    """A description on disk, with the size and time of every file behind its kernels."""

    stamps: dict[str, tuple[int, int]]
    described: Described


def read(path: Path) -> Described | None:
    """What is kept at ``path``; None where nothing is, or a file has changed."""
    try:
        cached = msgspec.json.decode(path.read_bytes(), type=_Cached)
    except (OSError, msgspec.MsgspecError):
        return None
    return cached.described if cached.stamps == _stamps(cached.described) else None


def _stamps(described: Described) -> dict[str, tuple[int, int]]:
    """Time and size of every file behind the kernels (zeros where it is gone)."""
    kernels = [*(described.backend.kernels if described.backend else ()), *described.kernels]
    stamps = {}
    for name in sorted({f for k in kernels for f in k.files}):
        try:
            stat = Path(name).stat()
            stamps[name] = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamps[name] = (0, 0)
    return stamps


def worth(described: Described) -> bool:
    """Not what may be mended without any file of ours changing."""
    info = described.backend
    if described.state != "ready" or described.problems:
        return False
    return info is None or (not info.problems and any(t.ready for t in info.targets.values()))


def write(path: Path, described: Described) -> None:
    """Best effort: a cache that cannot be written costs time only."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(_Cached(_stamps(described), described)))
        Path(file.name).replace(path)
