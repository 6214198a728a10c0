"""What breaks a plugin's contract is named: which field or method, what it is, and what it should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import catalog, planning, registry
from dsl_bench.errors import PluginError
from dsl_bench.jobs import Origin
from dsl_bench.kernel import Kernel
from dsl_bench.workload import Case

HEAD = """
from dsl_bench.plugin import Availability, Backend, Kernel, Workload

def kernel(**changes):
    fields = dict(id="triton/mine", workload="gemm", space={"bm": (64, 128)})
    calls = dict(default=lambda case: {"bm": 64}, source=lambda static, arch: "", bind=lambda *a: None)
    return Kernel(**(fields | calls | changes))
"""

BROKEN = {
    "KERNELS = 7": "KERNELS is of type int, not a Kernel or a list of them",
    "KERNELS = {'a': kernel()}": "KERNELS is of type dict",
    "KERNELS = (kernel(), 7)": "KERNELS holds a int, not a Kernel",
    "KERNELS = kernel(id='my_gemm')": "kernel id 'my_gemm' is not <language>/<name>",
    "KERNELS = kernel(id=3)": "kernel id 3 is not <language>/<name>",
    "KERNELS = kernel(space={'bm': 64})": "kernel triton/mine: space['bm'] is 64, not a tuple of values",
    "KERNELS = kernel(space={'bm': '64'})": "space['bm'] is '64', not a tuple of values",
    "KERNELS = kernel(space=('bm',))": "its space is of type tuple, not a dict",
    "BACKEND = 3": "BACKEND is of type int, not an instance of Backend",
    "BACKEND = Backend": "BACKEND is the class Backend, not an instance of Backend",
    "WORKLOAD = 0": "WORKLOAD is of type int, not an instance of Workload",
    "KERNEL = kernel()": "the file defines none of BACKEND, WORKLOAD, KERNELS",
    "BACKEND = Backend(); BACKEND.api_version = 7": "made for plugin API 7, this is API 1",
}


@pytest.fixture
def origin(tmp_path: Path) -> Callable[[str], Origin]:
    """A file with the text given, as an origin."""

    def write(text: str) -> Origin:
        path = tmp_path / "mine.py"
        path.write_text(HEAD + text + "\n")
        return Origin("file", "mine", str(path), "file")

    return write


@pytest.mark.parametrize("text", BROKEN)
def test_a_wrong_type_is_named(origin: Callable[[str], Origin], text: str) -> None:
    with pytest.raises(PluginError) as told:
        registry.Shelf().load(origin(text))
    assert BROKEN[text] in str(told.value)


def test_a_file_may_hold_one_kernel_or_many(origin: Callable[[str], Origin]) -> None:
    for text in ("KERNELS = kernel()", "KERNELS = [kernel()]", "KERNELS = (kernel(),)"):
        assert [k.id for k in registry.Shelf().load(origin(text)).kernels] == ["triton/mine"]


@pytest.mark.parametrize(
    ("kind", "method"),
    [("Backend", "probe"), ("Workload", "cases"), ("Backend", "load"), ("Workload", "specs")],
)
def test_a_method_that_is_not_there_is_named(origin: Callable[[str], Origin], kind: str, method: str) -> None:
    text = f"class Mine({kind}):\n    name = 'mine'\n{kind.upper()} = Mine()"
    loaded = registry.Shelf().load(origin(text))
    value: Any = loaded.backend or loaded.workload
    with pytest.raises(NotImplementedError, match=rf"Mine does not define {method}\(\)"):
        getattr(value, method)(*(() if method == "cases" else ("device",)))


def test_a_default_is_a_config_of_the_space() -> None:
    kernel = Kernel("triton/mine", "gemm", {"bm": (64,)}, dict, lambda s, a: "", lambda *a: None)  # type: ignore[arg-type]
    case = Case("gemm", "1x1x1-fp16", {"m": 1, "n": 1, "k": 1}, "fp16", ())
    assert planning._of_space(kernel, "default", {"bm": 32}) == {"bm": 32}
    for given, shown in (({}, "nothing"), ({"bn": 1, "bm": 2}, "bm bn")):
        wrong = dataclasses.replace(kernel, default=lambda case, given=given: given)  # type: ignore[misc]
        with pytest.raises(ValueError, match=rf"default\(case\) gives {shown}; the space has bm"):
            planning._of_space(wrong, "default", wrong.default(case))


def test_bind_returns_a_call() -> None:
    pytest.importorskip("torch")
    from dsl_bench import guard

    with pytest.raises(TypeError, match=r"bind\(\) returned a NoneType, not a Call"):
        guard.assert_fills("language", [None])  # type: ignore[list-item]


def test_probe_returns_an_availability(origin: Callable[[str], Origin]) -> None:
    from dsl_bench import worker

    text = (
        "class Mine(Backend):\n    name = 'mine'\n    def probe(self, target): return True\nBACKEND = Mine()"
    )
    backend: Any = registry.Shelf().load(origin(text)).backend
    with pytest.raises(PluginError, match=r"probe\('device'\) returned a bool, not an Availability"):
        worker._target(backend, "device")


def test_an_edited_plugin_of_one_module_is_described_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `dsl-bench new backend` makes such plugins: a module, in no package
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "a_plugin_of_one_module.py"
    module.write_text("BACKEND = 1\n")
    origin = Origin("backend", "one", "a_plugin_of_one_module:BACKEND", "one 0.1")

    def named() -> str:
        return catalog._Describer(lambda text: None, False)._cache_name(origin, ())

    before = named()
    module.write_text("BACKEND = 12\n")
    assert named() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("id='tritn/mine'", "unknown backend 'tritn'; did you mean triton"),
        ("workload='gem'", "unknown workload 'gem'; did you mean gemm"),
    ],
)
def test_a_checked_files_typo_is_placed(
    origin: Callable[[str], Origin], cli: Any, monkeypatch: pytest.MonkeyPatch, changes: str, said: str
) -> None:
    monkeypatch.setenv("DSL_BENCH_BACKENDS", "triton")
    path = origin(f"KERNELS = kernel({changes})").value
    done = cli("check", path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"of {path}: " in done.stderr
    assert said in done.stderr
