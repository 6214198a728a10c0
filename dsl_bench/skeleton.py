"""`dsl-bench new`: files that already run and pass `dsl-bench check`, to be changed into one's own.

Templates lie in ``templates/*.in``; ``@name@`` in them is the new name.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from dsl_bench.errors import RecordError, UsageError, unknown

#: the backends whose kernels have a skeleton, and the files of one: template and ending
LANGUAGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "triton": (("kernel_triton.py.in", ".py"),),
    "tilelang": (("kernel_tilelang.py.in", ".py"),),
    "cuda": (("kernel_cuda.py.in", ".py"), ("kernel_cuda.cu.in", ".cu")),
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Skeleton:
    """Files with their text, and the command that comes next."""

    files: Mapping[Path, str]
    next: str

    def write(self) -> None:
        """Create the files. UsageError where one exists already; nothing is written then."""
        for path in self.files:
            if path.exists() or path.is_symlink():
                raise UsageError(f"{path} exists already: choose another name or folder (--into)")
        try:
            for path, text in self.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("x") as file:
                    file.write(text)
        except OSError as fault:
            raise RecordError(f"cannot write {fault.filename}: {fault.strerror}") from fault


def kernel(id: str, folder: Path) -> Skeleton:
    """A GEMM called ``<language>/<name>``, as ``<name>.py`` in ``folder`` (and ``<name>.cu``)."""
    language, slash, name = id.partition("/")
    if not slash:
        raise UsageError(f"a kernel is called <language>/<name>, for example triton/{name_like(id)}")
    if language not in LANGUAGES:
        raise unknown("language", language, LANGUAGES)
    _check_name("kernel", name)
    texts = {folder / (name + ending): _fill(file, name) for file, ending in LANGUAGES[language]}
    return Skeleton(texts, f"dsl-bench check {folder / name}.py")


def workload(name: str, folder: Path) -> Skeleton:
    """A workload (an RMS norm, with torch's as its baseline), as ``<name>.py`` in ``folder``."""
    _check_name("workload", name)
    path = folder / f"{name}.py"
    return Skeleton({path: _fill("workload.py.in", name)}, f"dsl-bench check {path}")


def backend(name: str, folder: Path) -> Skeleton:
    """A language as a package that pip installs: one module, pyproject.toml, and its conformance test."""
    _check_name("backend", name)
    place = folder / f"dsl-bench-{name.replace('_', '-')}"
    module = place / f"dsl_bench_{name}.py"
    texts = {
        module: _fill("backend.py.in", name),
        place / "pyproject.toml": _fill("backend.toml.in", name),
        place / "test_conformance.py": _fill("backend_test.py.in", name),
    }
    return Skeleton(texts, f"dsl-bench check {module}")


def name_like(text: str) -> str:
    """A valid name that looks like ``text``."""
    tame = re.sub(r"\W+", "_", text.lower(), flags=re.ASCII).strip("_")
    return tame if _NAME.fullmatch(tame) and not keyword.iskeyword(tame) else "my_kernel"


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{kind} name {name!r}: a small letter, then up to 39 small letters, digits and underscores"
        )
    if keyword.iskeyword(name):
        raise UsageError(f"{kind} name {name!r} is a word of Python's own")
    if kind != "backend" and importlib.util.find_spec(name) is not None:
        raise UsageError(f"{kind} name {name!r} is that of a module: {name}.py would hide it")


def _fill(template: str, name: str) -> str:
    text = files("dsl_bench").joinpath("templates", template).read_text(encoding="utf-8")
    return text.replace("@name@", name).replace("@dashed@", name.replace("_", "-"))
