"""The Triton kernels: compiled for sm_90a without a GPU, and run by Triton's interpreter in a subprocess.

The interpreter takes over every ``@triton.jit`` of its process, so it gets one of its own: this file, run as
a script with TRITON_INTERPRET=1.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsl_bench.kernel import Kernel
from dsl_bench.workload import Case

triton = pytest.importorskip("triton")
pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.timeout(600)

KERNEL_IDS = (
    "triton/gemm",
    "triton/gemm_pitch",
    "triton/gemm_ragged",
    "triton/gemm_repack",
    "triton/gemm_skinny",
    "triton/gemm_streamk",
    "triton/gemm_unaligned",
    "triton/gemm_widths",
    "triton/gemv",
)
#: written in Gluon, which Triton's interpreter does not run
GLUON = ("triton/gemm_pitch", "triton/gemm_ragged", "triton/gemm_widths")
#: a case each kernel is made for, and the fewest HGMMA and UTMALDG instructions its default must show
MADE_FOR = {
    "triton/gemm": ("4096x4096x4096-bf16", 4, 6),
    "triton/gemm_ragged": ("4000x4104x4072-bf16", 4, 3),
    "triton/gemm_pitch": ("3333x2728x8200-bf16", 16, 2),
    "triton/gemm_widths": ("4096x10240x8192-bf16", 16, 2),
    "triton/gemm_streamk": ("4096x2112x7168-bf16", 4, 6),
    "triton/gemm_skinny": ("16x6144x4096-bf16", 4, 6),
    "triton/gemv": ("1x6144x4096-bf16", 0, 0),
    "triton/gemm_unaligned": ("2047x2049x2051-bf16", 2, 0),
    "triton/gemm_repack": ("2047x2049x2051-bf16", 4, 6),
}


def kernels() -> dict[str, Kernel]:
    from dsl_bench.backends.triton import BACKEND

    return {kernel.id: kernel for kernel in BACKEND.kernels() if kernel.workload == "gemm"}


def cases() -> dict[str, Case]:
    from dsl_bench.workloads.gemm import WORKLOAD

    return {case.name: case for case in WORKLOAD.cases()}


def build(compiled, kernel: Kernel, case: Case, config: dict):
    """The artifact and its facts; tests of one specialisation share them."""
    return compiled(kernel.id, kernel.static(case, config))


def test_kernels_are_found() -> None:
    assert tuple(sorted(kernels())) == KERNEL_IDS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel_id", KERNEL_IDS)
def test_default_compiles_without_spills(kernel_id: str, compiled) -> None:
    kernel = kernels()[kernel_id]
    name, hgmma, loads = MADE_FOR[kernel_id]
    case = cases()[name]
    config = dict(kernel.default(case))
    assert kernel.valid(case, config) is None
    artifact, facts = build(compiled, kernel, case, config)
    assert facts.stack == 0
    assert facts.loop_local == 0
    assert facts.registers <= 255
    assert facts.sass.get("HGMMA", 0) >= hgmma
    assert facts.sass.get("UTMALDG", 0) >= loads
    assert artifact.meta["smem"] <= 232448
    assert ".target sm_90a" in (artifact.folder / "kernel.ptx").read_text()


@pytest.mark.parametrize("form", ["flat", "persistent"])
def test_forms_of_gemm(form: str, compiled) -> None:
    kernel, case = kernels()["triton/gemm"], cases()["4096x4096x4096-bf16"]
    config = {"form": form, "bm": 128, "bn": 256, "bk": 64, "warps": 8, "stages": 3, "group": 8, "sub": 1}
    assert kernel.valid(case, config) is None
    assert kernel.valid(case, {**config, "form": "tile"}), "every wgmma waits in this loop"
    artifact, facts = build(compiled, kernel, case, config)
    assert (facts.stack, facts.loop_local) == (0, 0)
    assert artifact.meta["threads"] == 256
    # two warpgroups, each with 64 rows and all 256 columns of the tile
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in (artifact.folder / "kernel.ptx").read_text()


@pytest.mark.parametrize("kernel_id", ["triton/gemm", "triton/gemm_streamk"])
def test_tiles_of_192_columns(kernel_id: str, compiled) -> None:
    """Two products a step, of 128 and of 64 columns, both in flight while the next step is waited for."""
    kernel, case = kernels()[kernel_id], cases()["4096x2112x7168-bf16"]
    config = next(dict(c) for c in kernel.seeds(case) if c["bn"] == 192)
    artifact, facts = build(compiled, kernel, case, config)
    assert (facts.stack, facts.loop_local) == (0, 0)
    # three loads a stage, in the loop and before it
    assert facts.sass["UTMALDG"] == 3 * config["stages"]
    ptx = (artifact.folder / "kernel.ptx").read_text()
    for columns in (128, 64):
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16" in ptx
    assert "wgmma.wait_group.sync.aligned 2;" in ptx


@pytest.mark.parametrize("workers", [1, 3, 7, 31, 132, 264])
def test_plan_covers_every_step_once(workers: int) -> None:
    """What gemm_cut does with a plan, replayed: every K step of every tile falls to one block."""
    from dsl_bench.kernels.triton.gemm_streamk import PARTS, plan

    for tiles in (1, 2, 5, 12, 88, 96, 132, 133, 140, 220, 272, 352, 512, 1056):
        for steps in (1, 3, 9, 64, 112):
            p = plan(tiles, steps, workers)
            assert p.parts <= PARTS
            seen = {(t, s, -1) for t in range(p.whole) for s in range(steps)}
            for worker in range(workers):
                main = worker < p.mains
                part = min(worker, p.mains) // p.cut
                odd = worker % p.cut if main else (worker - p.mains) * p.tails
                begin = part * p.share
                stop = min(begin + p.share, steps) if main else steps
                units = 1 if main else max(min(p.tails, p.cut - odd), 0)
                new = {(p.whole + odd + u, s, part) for u in range(units) for s in range(max(begin, 0), stop)}
                assert not new & seen
                assert stop > begin or not units
                seen |= new
            assert {x[:2] for x in seen} == {(t, s) for t in range(tiles) for s in range(steps)}
            assert len(seen) == tiles * steps
            cut = {x[2] for x in seen if x[0] >= p.whole}
            assert cut == set(range(p.parts))


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_estimates_of_shared_memory_hold(compiled) -> None:
    """``valid`` refuses by an estimate: it must not be under what the compiler takes, nor far over."""
    from dsl_bench.kernels.triton import gemm, gemm_streamk

    case = cases()["4096x4096x4096-bf16"]
    for module in (gemm, gemm_streamk):
        for config in module.KERNEL.seeds(case)[:4]:
            artifact, _ = build(compiled, module.KERNEL, case, dict(config))
            assert artifact.meta["smem"] <= module._smem(config) <= artifact.meta["smem"] + 20000, config


def test_artifact_is_complete_and_movable(compiled, tmp_path: Path) -> None:
    """What ``load`` reads lies in the folder, by relative names, and rebuilds Triton's own kernel object."""
    from triton.compiler import CompiledKernel

    kernel, case = kernels()["triton/gemm_repack"], cases()["2047x2049x2051-bf16"]
    artifact, _ = build(compiled, kernel, case, dict(kernel.default(case)))
    moved = shutil.copytree(artifact.folder, tmp_path / "b")
    assert artifact.meta["extra"] == 1
    json.dumps(dict(artifact.meta))
    assert not list(moved.glob("**/cache"))
    for folder in (moved, moved / "extra0"):
        meta = json.loads((folder / "manifest.json").read_text())
        group = {name: str(folder / name) for name in ("kernel.json", "kernel.cubin", "kernel.ptx")}
        loaded = CompiledKernel(None, group, meta["hash"])
        assert loaded.name == meta["entry"]
        assert loaded.asm["cubin"] == (folder / "kernel.cubin").read_bytes()


@pytest.mark.parametrize("kernel_id", KERNEL_IDS)
def test_spaces(kernel_id: str) -> None:
    """Every case has a default it can run or a reason; no more than some 200 configs are worth a try."""
    kernel = kernels()[kernel_id]
    for case in cases().values():
        good = [config for config in kernel.configs() if kernel.valid(case, config) is None]
        assert len(good) <= 200, (case.name, len(good))
        reason = kernel.valid(case, kernel.default(case))
        assert (reason is None) == bool(good), case.name
        assert not good or dict(kernel.default(case)) in good
        for config in kernel.seeds(case):
            assert set(config) == set(kernel.space)
            json.dumps(dict(kernel.static(case, config)))


def test_every_case_has_a_kernel() -> None:
    for case in cases().values():
        assert any(k.valid(case, k.default(case)) is None for k in kernels().values()), case.name


@triton.jit
def device_descriptor(x, m, B: tl.constexpr):
    view = tl.make_tensor_descriptor(x, [m, m], [m, 1], [B, B])
    view.store([0, 0], view.load([B, B]))


def test_launch_scratch_is_refused(tmp_path: Path) -> None:
    """A descriptor made on the device needs scratch at each launch, which run() must not allocate."""
    from dsl_bench.backends.triton import BACKEND, TritonSource
    from dsl_bench.errors import KernelFault

    source = TritonSource(device_descriptor, {"x": "*fp16", "m": "i32"}, {"B": 64}, {"x": 16, "m": 16})
    with pytest.raises(KernelFault, match="scratch"):
        BACKEND.compile(source, "sm_90a", tmp_path / "a")
    with pytest.raises(ValueError, match="missing"):
        BACKEND.compile(dataclasses.replace(source, signature={}), "sm_90a", tmp_path / "b")


def test_missing_assembler_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dsl_bench.backends.triton import BACKEND

    assert BACKEND.probe("compile").ready
    assert BACKEND.versions()["ptxas"][0].isdigit()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    got = BACKEND.probe("compile")
    assert not got.ready
    assert "TRITON_PTXAS_PATH" in got.reason


@pytest.mark.parametrize("package", ["kernels", "kernels/triton"])
def test_guard_explains_a_shadowed_package(package: str) -> None:
    import dsl_bench.kernels.triton as here

    root = Path(here.__file__).parents[2]
    name = Path(package).name
    env = {**os.environ, "PYTHONPATH": str((root / package).parent)}
    done = subprocess.run([sys.executable, "-c", f"import {name}"], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "dsl_bench" in done.stderr


@pytest.mark.slow
def test_interpreter() -> None:
    """Every kernel on the smoke cases and on shapes with many shares a tile, fp16 against float64."""
    from dsl_bench.backends.triton import BACKEND

    got = BACKEND.probe("interpret")
    if not got.ready:
        pytest.skip(got.reason)
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert {r["kernel"] for r in results} == set(KERNEL_IDS) - set(GLUON)
    for r in results:
        # the harness's own bound: 1.1 times what rounding the exact result to fp16 costs
        assert r["error"] <= 1.1, r
        assert r["again"] == r["error"], f"not the same twice: {r}"


def _interpret(kernel: Kernel, case: Case, config: dict, sms: int = 4) -> dict:
    """Error over that of rounding alone, on the first and on a second run of one binding."""
    import torch

    from dsl_bench.backends.triton import BACKEND

    m, n, k = case["m"], case["n"], case["k"]
    torch.manual_seed(0)
    a, b = torch.randn(m, k).half(), torch.randn(n, k).half()
    c = torch.full((m, n), float("nan"), dtype=torch.float16)
    static = json.loads(json.dumps(dict(kernel.static(case, config))))
    module = BACKEND.interpret(kernel.source(static, "sm_90a"))
    module.sms = sms
    call = kernel.bind(module, case, config, {"a": a, "b": b}, {"c": c})
    exact = a.double() @ b.double().T
    rounding = (exact.half().double() - exact).norm()
    errors = []
    for _ in range(2):
        c.fill_(float("nan"))
        call.run()
        errors.append(float((c.double() - exact).norm() / rounding))
    return {"kernel": kernel.id, "case": case.name, "config": config, "error": errors[0], "again": errors[1]}


def _shares() -> list[dict]:
    """Beyond the smoke cases: cut tiles with several parts, ends of tiles, whole tiles before them, tiles of
    192 columns, whole tiles of the skinny kernel, and a copy of rows that start on 16 bytes."""
    known = kernels()
    streamk, skinny = known["triton/gemm_streamk"], known["triton/gemm_skinny"]
    case = Case("gemm", "200x264x520", {"m": 200, "n": 264, "k": 520}, "fp16")
    tile = {"bm": 64, "bn": 128, "bk": 64, "warps": 4, "stages": 3, "group": 8, "blocks": 1}
    # 12 tiles of 9 steps: 5 blocks cut 2 of them, 7 cut 5, 31 cut all
    out = [_interpret(streamk, case, tile, sms=n) for n in (3, 5, 7, 31)]
    wide = {**tile, "bm": 128, "bn": 192, "warps": 8}
    out += [_interpret(streamk, case, wide, sms=n) for n in (3, 7)]
    large = {"bm": 128, "bk": 64, "warps": 8, "stages": 3, "group": 8}
    out.append(_interpret(known["triton/gemm"], case, {**large, "form": "persistent", "bn": 192, "sub": 2}))
    out.append(_interpret(known["triton/gemm_repack"], case, {**large, "form": "flat", "bn": 128}))
    few = Case("gemm", "20x264x520", {"m": 20, "n": 264, "k": 520}, "fp16")
    rows = {"bn": 64, "bk": 64, "warps": 4, "stages": 8, "blocks": 1, "split": True}
    out += [_interpret(skinny, few, rows, sms=n) for n in (3, 16, 45)]
    return [*out, _interpret(skinny, few, {**rows, "split": False})]


def main() -> None:
    """Interpret all kernels; prints the results as JSON."""
    results = []
    smoke = [case for case in cases().values() if "smoke" in case.groups]
    row = Case("gemm", "1x104x2000", {"m": 1, "n": 104, "k": 2000}, "fp16")
    for kernel in (k for k in kernels().values() if k.id not in GLUON):
        for case in (*smoke, row):
            forms = {c.get("form"): dict(c) for c in reversed(kernel.seeds(case))}
            every = case.name in ("72x104x40-fp16", "33x61x47-fp16")
            configs = list(forms.values()) if every else [dict(c) for c in kernel.seeds(case)][:1]
            results += [_interpret(kernel, case, config) for config in configs]
    json.dump(results + _shares(), sys.stdout)


if __name__ == "__main__":
    main()
