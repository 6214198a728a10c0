"""Finds plugins and loads them one by one.

``origins`` enumerates what is installed without importing any of it (the parent's half). ``Shelf`` loads
origins inside a worker: whatever a plugin does there (raise, exit, hang) costs that plugin alone.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsl_bench.backend import API_VERSION, Backend
from dsl_bench.errors import PluginError, UsageError
from dsl_bench.jobs import Origin
from dsl_bench.kernel import Kernel, Needs
from dsl_bench.workload import Workload

GROUPS = {"dsl_bench.backends": "backend", "dsl_bench.workloads": "workload", "dsl_bench.kernels": "kernel"}
#: comma-separated backend names to consider; unset means all, empty means none
ALLOW = "DSL_BENCH_BACKENDS"


def origins(paths: Sequence[str] = ()) -> list[Origin]:
    """Every plugin that is installed, and the files at ``paths``, sorted by kind and name."""
    found = []
    for group, kind in GROUPS.items():
        for entry in importlib.metadata.entry_points(group=group):
            dist = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
            found.append(Origin(kind, entry.name, entry.value, dist))
    unique = sorted(set(found), key=lambda o: (o.kind, o.name, o.dist, o.value))
    files = dict.fromkeys(_file_origin(p) for p in paths)
    return [o for o in unique if _allowed(o)] + list(files)


def _allowed(origin: Origin) -> bool:
    allow = os.environ.get(ALLOW)
    if allow is None or origin.kind != "backend":
        return True
    return origin.name in {n.strip() for n in allow.split(",")}


def _file_origin(path: str) -> Origin:
    resolved = Path(path).resolve()
    if not resolved.is_file():
        raise UsageError(f"no plugin file at {path!r}")
    return Origin("file", resolved.stem, str(resolved), "file")


def duplicates(found: Iterable[Origin]) -> dict[tuple[str, str], list[Origin]]:
    """Names that two plugins of one kind claim; all claimants are refused, none is picked."""
    claims: dict[tuple[str, str], list[Origin]] = {}
    for origin in found:
        claims.setdefault((origin.kind, origin.name), []).append(origin)
    return {key: owners for key, owners in claims.items() if len(owners) > 1}


def unmet(needs: Needs, arch: str | None = None) -> str:
    """Why ``needs`` cannot be met here, or an empty string. ``arch`` None leaves the device out."""
    from packaging.requirements import Requirement

    for text in needs.packages:
        want = Requirement(text)
        try:
            have = importlib.metadata.version(want.name)
        except importlib.metadata.PackageNotFoundError:
            return f"needs {text}, which is not installed"
        if not want.specifier.contains(have, prereleases=True):
            return f"needs {text}, found {have}"
    if arch is not None and needs.archs and arch not in needs.archs:
        return f"needs {' or '.join(needs.archs)}, this is {arch}"
    return ""


def kernel_file(kernel: Kernel) -> Path:
    """The file that defines ``kernel``, found through its ``source`` function."""
    return Path(inspect.getfile(inspect.unwrap(kernel.source)))


def kernel_files(kernel: Kernel) -> tuple[Path, ...]:
    """The kernel's file and its helper files."""
    main = kernel_file(kernel)
    named = [main.parent / name for name in kernel.files]
    beside = siblings(main) if main.parent.resolve() in _file_folders else []
    return (main, *named, *(path for path in beside if path not in named))


#: the folders of the plugins that this process loaded as files
_file_folders: set[Path] = set()


def siblings(file: Path) -> list[Path]:
    """The modules in the folder of ``file`` that it imports, and those that these import, sorted; of a
    package all its modules. They are found in the text: nothing is imported.

    Empty for a file among installed packages."""
    folder = file.parent
    if folder.name.endswith("-packages"):
        return []
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        for name in _imported(waiting.pop()):
            package = folder / name / "__init__.py"
            these = package.parent.rglob("*.py") if package.is_file() else [folder / f"{name}.py"]
            new = {path for path in these if path.is_file()} - {file, *found}
            found |= new
            waiting += new
    return sorted(found)


def _imported(file: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports; none where it cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def source_hash(kernel: Kernel) -> str:
    """Twelve hex digits over the kernel's file, its helper files and its id."""
    digest = hashlib.sha256(kernel.id.encode())
    for path in kernel_files(kernel):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def source_lines(kernel: Kernel) -> int:
    """Lines of code behind a kernel (its file and helper files), blank ones left out."""
    return sum(1 for path in kernel_files(kernel) for line in path.read_text().splitlines() if line.strip())


def artifact_key(kernel_hash: str, static: bytes, toolchain: str, arch: str) -> str:
    """The content address of one specialisation of the kernel whose source has ``kernel_hash``."""
    parts = (kernel_hash.encode(), static, toolchain.encode(), arch.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@dataclass
class Loaded:
    """What one origin brought: any of a backend, a workload and kernels."""

    backend: Backend | None = None
    workload: Workload | None = None
    kernels: list[Kernel] = field(default_factory=list)


class Shelf:
    """Plugins loaded in this process, each at most once."""

    def __init__(self) -> None:
        self._loaded: dict[Origin, Loaded] = {}
        self._kernels: dict[tuple[Origin, tuple[Origin, ...]], dict[str, Kernel]] = {}
        self._owners: dict[str, Origin] = {}
        self.problems: dict[Origin, list[str]] = {}

    def load(self, origin: Origin) -> Loaded:
        """The plugin at ``origin``; raises PluginError where it breaks the contract."""
        if origin not in self._loaded:
            self._loaded[origin] = _check(origin, _import(origin))
        return self._loaded[origin]

    def backend(self, origin: Origin) -> Backend:
        """The backend at ``origin``."""
        backend = self.load(origin).backend
        if backend is None:
            raise PluginError(f"{origin.value} holds no backend")
        return backend

    def workload(self, origin: Origin) -> Workload:
        """The workload at ``origin``."""
        workload = self.load(origin).workload
        if workload is None:
            raise PluginError(f"{origin.value} holds no workload")
        return workload

    def kernels(self, origin: Origin, extra: tuple[Origin, ...] = ()) -> dict[str, Kernel]:
        """The kernels of a backend by id, with those that ``extra`` origins add to it.

        What cannot be used is left out and noted in ``problems`` under the origin that brought it."""
        key = (origin, extra)
        if key not in self._kernels:
            backend = self.backend(origin)
            table: dict[str, Kernel] = {}
            noted = self._gather(table, origin, backend.name, backend.kernels)
            self.problems[origin] = [*backend.problems, *noted]
            for more in extra:
                mine = functools.partial(self._added, more, backend.name)
                self.problems.setdefault(more, []).extend(self._gather(table, more, backend.name, mine))
            self._kernels[key] = table
        return self._kernels[key]

    def owner(self, kernel: str) -> Origin:
        """The origin that brought the kernel with this id."""
        return self._owners[kernel]

    def _added(self, origin: Origin, backend: str) -> list[Kernel]:
        return [k for k in self.load(origin).kernels if k.backend == backend]

    def _gather(
        self, table: dict[str, Kernel], origin: Origin, backend: str, find: Callable[[], Iterable[Kernel]]
    ) -> list[str]:
        """Add to ``table`` what ``find`` gives; returns what was left out. The first of a name stays."""
        noted = []
        try:
            for kernel in find():
                wrong = self._refusal(table, backend, kernel)
                if wrong:
                    noted.append(wrong)
                else:
                    table[kernel.id] = kernel
                    self._owners.setdefault(kernel.id, origin)
        except (Exception, SystemExit) as fault:  # noqa: BLE001 (a plugin may raise anything)
            noted.append(f"kernels: {type(fault).__name__}: {fault}")
        return noted

    def _refusal(self, table: dict[str, Kernel], backend: str, kernel: Any) -> str:
        if not isinstance(kernel, Kernel):
            return f"a {type(kernel).__name__} among the kernels is left out: not a Kernel"
        if wrong := _misshapen(kernel):
            return f"{wrong}; it is left out"
        if table.get(kernel.id, kernel) is not kernel:
            first = self._owners[kernel.id]
            return f"a second kernel {kernel.id} is left out: {first.dist} ({first.value}) has it"
        if kernel.backend != backend:
            return f"kernel {kernel.id} is left out: its id names another backend than {backend}"
        try:
            source_hash(kernel)
        except OSError as fault:
            return f"kernel {kernel.id} is left out: {fault}"
        return ""


class _FromText(importlib.machinery.SourceFileLoader):
    """Always compiles the text: Python takes bytecode for that of an edit within the same second, and of the
    same size, and the kernels' hashes, which are of the text, would name code that did not run."""

    def path_stats(self, path: str) -> Any:
        """Without these no bytecode is read or written."""
        raise OSError


def _import(origin: Origin) -> Any:
    if origin.kind != "file":
        return importlib.metadata.EntryPoint(origin.name, origin.value, "").load()
    name = f"dsl_bench_file_{hashlib.sha256(origin.value.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, origin.value)
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise PluginError(f"{origin.value} is not a Python file")
    spec.loader = _FromText(name, origin.value)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _file_folders.add(Path(origin.value).parent)
    spec.loader.exec_module(module)
    return module


def _check(origin: Origin, value: Any) -> Loaded:
    if origin.kind == "file":
        loaded = Loaded(
            getattr(value, "BACKEND", None),
            getattr(value, "WORKLOAD", None),
            _kernel_list(getattr(value, "KERNELS", ())),
        )
        if loaded.backend is None and loaded.workload is None and not loaded.kernels:
            raise PluginError("the file defines none of BACKEND, WORKLOAD, KERNELS")
    elif origin.kind == "kernel":
        loaded = Loaded(kernels=_kernel_list(value))
    else:
        loaded = Loaded(**{origin.kind: value})
    _check_types(origin, loaded)
    return loaded


def _kernel_list(value: Any) -> list[Kernel]:
    """One kernel, or any number of them, as a list; its items are looked at by :func:`_check_types`."""
    if isinstance(value, Kernel):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise PluginError(f"KERNELS is {_a(value)}, not a Kernel or a list of them")
    return list(value)


def _a(value: Any) -> str:
    """What ``value`` is, for an error's text; a class given in place of its instance is told apart."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _check_types(origin: Origin, loaded: Loaded) -> None:
    for name, value, base in (
        ("BACKEND", loaded.backend, Backend),
        ("WORKLOAD", loaded.workload, Workload),
    ):
        version = getattr(value, "api_version", None)
        if name == "BACKEND" and version not in (None, API_VERSION):
            raise PluginError(f"{origin.name}: made for plugin API {version}, this is API {API_VERSION}")
        if value is not None and not isinstance(value, base):
            raise PluginError(f"{origin.name}: {name} is {_a(value)}, not an instance of {base.__name__}")
    for kernel in loaded.kernels:
        if not isinstance(kernel, Kernel):
            raise PluginError(f"{origin.name}: KERNELS holds a {type(kernel).__name__}, not a Kernel")
        wrong = _misshapen(kernel)
        if wrong:
            raise PluginError(wrong)


def _misshapen(kernel: Any) -> str:
    """What is wrong with a kernel's id or space, else empty."""
    backend, slash, name = kernel.id.partition("/") if isinstance(kernel.id, str) else ("", "", "")
    if not (backend and slash and name):
        return f"kernel id {kernel.id!r} is not <language>/<name>, as triton/my_gemm"
    if not isinstance(kernel.space, Mapping):
        return f"kernel {kernel.id}: its space is {_a(kernel.space)}, not a dict of names and values"
    for key, values in kernel.space.items():
        if not isinstance(values, Sequence) or isinstance(values, str):
            return f"kernel {kernel.id}: space[{key!r}] is {values!r}, not a tuple of values"
    return ""


class Fingerprints:
    """Of origins, for one look at what is installed: that is read once, and so is every origin."""

    def __init__(self) -> None:
        self._of: dict[Origin, str] = {}
        names = (f"{d.name}{d.version}" for d in importlib.metadata.distributions() if d.name)
        seen = (platform.python_version(), Path("/dev/nvidiactl").exists(), shutil.which("nvcc"))
        settings = [
            os.environ.get(n)
            for n in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TRITON_PTXAS_PATH", "PYTHONPATH")
        ]
        self._here = f"{sorted(names)}|{seen}|{settings}"

    def of(self, origin: Origin) -> str:
        """Changes whenever what a describe job would say may change: sources, versions, interpreter."""
        if origin not in self._of:
            digest = hashlib.sha256(f"{origin}|{self._here}".encode())
            for path in _sources(origin):
                stat = path.stat()
                digest.update(f"{path}{stat.st_mtime_ns}{stat.st_size}".encode())
            self._of[origin] = digest.hexdigest()[:24]
        return self._of[origin]


def _sources(origin: Origin) -> list[Path]:
    if origin.kind == "file":
        return [Path(origin.value), *siblings(Path(origin.value))]
    spec = importlib.util.find_spec(origin.value.partition(":")[0].partition(".")[0])
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if spec and not roots and spec.origin and Path(spec.origin).is_file():
        return [Path(spec.origin)]  # a plugin of one module, in no package
    if origin.value.startswith("dsl_bench."):
        kernels = importlib.util.find_spec("dsl_bench.kernels")
        roots += list(kernels.submodule_search_locations or ()) if kernels else []
    found = (p for root in roots for p in Path(root).rglob("*"))
    return sorted(p for p in found if p.is_file() and p.suffix != ".pyc")
