"""Facts read from SASS listings and, where a compiler is at hand, from real cubins."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsl_bench import codegen
from dsl_bench.errors import KernelFault
from dsl_bench.records import Facts


def listing(*lines: str) -> str:
    """Lines of SASS at consecutive addresses, as cuobjdump prints them."""
    rows = []
    for k, line in enumerate(lines):
        rows.append(f"        /*{16 * k:04x}*/                   {line} ;          /* 0x00000a00ff017b82 */")
        rows.append("                                                             /* 0x000fe20000000800 */")
    return "\n".join(rows)


def parsed(*lines: str) -> Sequence[codegen.Instruction]:
    return list(codegen.parse(listing(*lines)))


def test_instructions_are_read_with_predicates_and_modifiers() -> None:
    code = parsed(
        "LDC R1, c[0x0][0x28]",
        "@!P0 BRA 0x1af0",
        "@P1 HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
        "@UP0 UTMALDG.2D [UR8], [UR4], desc[URZ]",
        "STL.64 [R1+0x8], R2",
        "EXIT",
    )
    assert [i.opcode for i in code] == ["LDC", "BRA", "HGMMA", "UTMALDG", "STL", "EXIT"]
    assert [i.predicated for i in code] == [False, True, True, True, False, False]
    assert code[2].modifiers == ("64x256x16", "F32", "BF16")
    assert code[1].address == 16
    assert code[1].operands == "0x1af0"


def test_a_spill_in_a_loop_is_told_from_one_beside_it() -> None:
    code = parsed(
        "STL [R1], R2",  # 00
        "IADD3 R0, R0, 0x1, RZ",  # 10 <- loop
        "LDL R3, [R1]",  # 20
        "STL.64 [R1+0x8], R4",  # 30
        "@P0 BRA 0x10",  # 40
        "LDL R5, [R1]",  # 50
        "EXIT",  # 60
        "BRA 0x70",  # 70
    )
    assert codegen.loop_local(code) == 2
    assert codegen._local_bytes(code, "STL") == 12
    assert codegen._local_bytes(code, "LDL") == 8


def test_a_wait_loop_behind_the_end_does_not_make_all_before_it_a_loop() -> None:
    code = parsed(
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0",  # 00
        "@!P0 BRA 0x60",  # 10
        "HGMMA.64x64x16.F32 R24, gdesc[UR4]",  # 20 <- back from the wait
        "STL [R1], R2",  # 30  the epilogue spills
        "LDL R2, [R1]",  # 40
        "EXIT",  # 50
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0",  # 60 the wait
        "@!P0 BRA 0x60",  # 70
        "BRA 0x20",  # 80
    )
    assert codegen.loop_local(code) == 0


def test_conditional_uniform_branches_fall_through() -> None:
    code = parsed("BRA.U !UP0, 0x30", "LDL R2, [R1]", "BRA.U UP1, 0x0", "EXIT")
    assert codegen.loop_local(code) == 1


def test_nested_loops_count_each_access_once() -> None:
    code = parsed("LDL R2, [R1]", "STL [R1], R2", "@P0 BRA 0x10", "@P1 BRA 0x0", "EXIT")
    assert codegen.loop_local(code) == 2


def test_cycles_agree_with_reachability() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(1, 12)
        edges = [[rng.randrange(n) for _ in range(rng.randint(0, 2))] for _ in range(n)]

        def reached(start: int, edges: list[list[int]] = edges) -> set[int]:
            seen: set[int] = set()
            todo = list(edges[start])
            while todo:
                node = todo.pop()
                if node not in seen:
                    seen.add(node)
                    todo += edges[node]
            return seen

        assert codegen._cyclic(edges) == [node in reached(node) for node in range(n)]


def test_long_listings_are_read_quickly() -> None:
    body = listing(*["FFMA R1, R2, R3, R4"] * 50_000, "LDL R2, [R1]", "@P0 BRA 0x0", "EXIT")
    start = time.process_time()
    code = list(codegen.parse(body))
    assert codegen.loop_local(code) == 1
    assert len(code) == 50_003
    assert time.process_time() - start < 3.0


# -- tools ----------------------------------------------------------------------------------------------


def test_a_missing_tool_is_named_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "_locate", lambda name: None)
    with pytest.raises(
        KernelFault, match=r"cuobjdump was not found.*pip install nvidia-cuda-cuobjdump"
    ) as fault:
        codegen.cubin_facts(Path("x.cubin"))
    assert fault.value.status == "unavailable"


def tool(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cuobjdump that is a shell script."""
    path = tmp_path / "cuobjdump"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(codegen, "_locate", lambda name: path if name == "cuobjdump" else None)


def test_what_the_tool_refuses_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "echo 'cuobjdump fatal: not a cubin' >&2; exit 1", monkeypatch)
    with pytest.raises(KernelFault, match=r"cannot read x\.cubin: cuobjdump fatal: not a cubin"):
        codegen.cubin_facts(tmp_path / "x.cubin")


def test_an_unknown_entry_names_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "printf '\\tFunction : one\\n\\tFunction : two\\n'", monkeypatch)
    with pytest.raises(KernelFault, match="no kernel 'three'; it has one, two"):
        codegen.cubin_facts(tmp_path / "x.cubin", "three")
    with pytest.raises(KernelFault, match="no single kernel; it has one, two"):
        codegen.sass(tmp_path / "x.cubin")


# -- a real compiler ------------------------------------------------------------------------------------

SOURCE = """
template <int N> __global__ void spill(float *o, const float *in, int n) {
  float a[N];
  for (int i = 0; i < N; i++) a[i] = in[threadIdx.x + i * n];
  for (int k = 0; k < n; k++)
    for (int i = 0; i < N; i++) a[i] = a[i] * in[k + i] + a[(i + 1) % N];
  float s = 0;
  for (int i = 0; i < N; i++) s += a[i] * in[i * 3];
  o[threadIdx.x] = s;
}
template __global__ void spill<64>(float *, const float *, int);
extern "C" __global__ void plain(float *o, int n) {
  extern __shared__ float dynamic[];
  __shared__ float fixed[64];
  fixed[threadIdx.x % 64] = n;
  __syncthreads();
  o[threadIdx.x] = fixed[(threadIdx.x + 1) % 64] + dynamic[0];
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cubin with a spilling and a plain kernel, and what ptxas said of it."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None or codegen._locate("cuobjdump") is None:
        pytest.skip("needs nvcc and cuobjdump")
    folder = tmp_path_factory.mktemp("cubin")
    (folder / "k.cu").write_text(SOURCE)
    cubin = folder / "k.cubin"
    options = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-maxrregcount=32", "-Xptxas=-v"]
    done = subprocess.run(
        [nvcc, *options, str(folder / "k.cu"), "-o", str(cubin)], capture_output=True, text=True, check=True
    )
    return cubin, done.stdout + done.stderr


def test_facts_agree_with_what_the_assembler_said(compiled: tuple[Path, str]) -> None:
    cubin, said = compiled
    name = "_Z5spillILi64EEvPfPKfi"
    facts = codegen.cubin_facts(cubin, name, threads=128, assembler="ptxas 13.0")
    report = said[said.index(f"Function properties for {name}") :]
    stack, stores, loads = (
        int(n)
        for n in re.search(  # type: ignore[union-attr]
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        ).groups()
    )
    assert (facts.stack, facts.spill_stores, facts.spill_loads) == (stack, stores, loads)
    assert facts.registers == 32
    assert 0 < facts.loop_local <= facts.sass["LDL"] + facts.sass["STL"]
    assert facts.sass["FFMA"] >= 64
    assert (facts.threads, facts.assembler, facts.smem_dynamic) == (128, "ptxas 13.0", -1)
    assert facts.cubin_bytes == cubin.stat().st_size


def test_a_plain_kernel_has_no_spills_and_its_own_shared_memory(compiled: tuple[Path, str]) -> None:
    facts = codegen.cubin_facts(compiled[0], "plain", smem_dynamic=4096)
    assert isinstance(facts, Facts)
    assert (facts.stack, facts.spill_stores, facts.spill_loads, facts.loop_local) == (0, 0, 0, 0)
    assert (facts.smem_static, facts.smem_dynamic) == (256, 4096)


def test_sass_is_one_instruction_a_line_without_encodings(compiled: tuple[Path, str]) -> None:
    text = codegen.sass(compiled[0], "plain")
    assert "EXIT" in text
    assert "0x000fe2" not in text
    assert "/* 0x" not in text
    assert "spill" not in text


def test_a_file_that_is_no_cubin_is_refused(tmp_path: Path) -> None:
    if codegen._locate("cuobjdump") is None:
        pytest.skip("needs cuobjdump")
    path = tmp_path / "no.cubin"
    path.write_text("text")
    with pytest.raises(KernelFault, match=r"no\.cubin"):
        codegen.cubin_facts(path)
