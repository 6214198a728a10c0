"""Codegen facts read from a cubin: registers, shared memory, spills, SASS instruction counts.

Reads with NVIDIA's ``cuobjdump``, which comes with a CUDA toolkit, with the ``nvidia-cuda-cuobjdump`` wheel
or inside the Triton wheel. Touches no GPU and imports no DSL.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsl_bench.errors import KernelFault
from dsl_bench.records import Facts

TIMEOUT_S = 120.0
#: bytes a local load or store moves, by the width in its opcode
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
#: shared memory that the system reserves in each block on sm_90 and later; cuobjdump counts it in
_RESERVED_SMEM = 1024

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*([^;]*);",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"^\s+Function : (\S+)\s*$", re.MULTILINE)
_USAGE = re.compile(r"^ Function (\S+):\s*\n\s*(REG:.*)$", re.MULTILINE)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\b")
_ENDS = frozenset({"EXIT", "RET", "KILL", "BRX", "BRXU", "JMX", "JMXU"})
_JUMPS = frozenset({"BRA", "JMP"})


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: byte address, base opcode, its modifiers, operands, whether it is predicated."""

    address: int
    opcode: str
    modifiers: tuple[str, ...]
    operands: str
    predicated: bool


def cubin_facts(
    path: Path,
    entry: str = "",
    *,
    threads: int = -1,
    smem_dynamic: int = -1,
    assembler: str = "",
) -> Facts:
    """Facts of the kernel ``entry`` in the cubin at ``path`` (the only one where ``entry`` is "").

    ``spill_stores`` and ``spill_loads`` are the bytes of all local stores and loads in the SASS: what ptxas
    reports as spills, plus local arrays. Raises KernelFault ``unavailable`` where cuobjdump is missing and
    ``compile_error`` where the file cannot be read or has no such kernel."""
    text = _dump(path, "-res-usage", "-sass")
    usage = dict(_USAGE.findall(text))
    bodies = _functions(text)
    name = _pick(entry, sorted(bodies), path)
    code = list(parse(bodies[name]))
    counts = Counter(i.opcode for i in code)
    used = {k: int(v) for k, v in re.findall(r"([A-Z]+):(\d+)", usage.get(name, ""))}
    data = path.read_bytes()
    return Facts(
        registers=used.get("REG", -1),
        stack=used.get("STACK", -1),
        spill_stores=_local_bytes(code, "STL"),
        spill_loads=_local_bytes(code, "LDL"),
        smem_static=_static_smem(used.get("SHARED", -1), data),
        smem_dynamic=smem_dynamic,
        threads=threads,
        sass=dict(sorted(counts.items())),
        loop_local=loop_local(code),
        assembler=assembler,
        cubin_bytes=len(data),
    )


def sass(path: Path, entry: str = "") -> str:
    """The SASS of ``entry`` in the cubin at ``path``, one instruction a line without its encoding."""
    bodies = _functions(_dump(path, "-sass"))
    body = bodies[_pick(entry, sorted(bodies), path)]
    lines = (re.sub(r"\s*/\* 0x[0-9a-f]+ \*/\s*$", "", line) for line in body.splitlines())
    return "\n".join(line for line in lines if line.strip())


def parse(body: str) -> Iterator[Instruction]:
    """The instructions in one function's listing, in order."""
    for address, predicate, opcode, modifiers, operands in _INSTRUCTION.findall(body):
        yield Instruction(
            int(address, 16), opcode, tuple(modifiers.split(".")[1:]), operands.strip(), bool(predicate)
        )


def loop_local(code: Sequence[Instruction]) -> int:
    """Local loads and stores that lie on a cycle of the control flow graph.

    The span between a backward branch and its target would be simpler, but the assembler moves the wait for
    a barrier behind the end of the kernel, and the jump back from there spans all that lies between."""
    if not any(i.opcode in ("LDL", "STL") for i in code):
        return 0
    blocks, edges = _blocks(code)
    cyclic = _cyclic(edges)
    return sum(
        instruction.opcode in ("LDL", "STL")
        for block, (start, stop) in enumerate(blocks)
        if cyclic[block]
        for instruction in code[start:stop]
    )


def _jump(instruction: Instruction) -> int | None:
    """The address an instruction may jump to, where it names one."""
    if instruction.opcode not in _JUMPS and instruction.opcode != "CALL":
        return None
    found = _TARGET.findall(instruction.operands)
    return int(found[-1], 16) if found else None


def _falls_through(instruction: Instruction) -> bool:
    if instruction.predicated:
        return True
    if instruction.opcode in _JUMPS:
        # BRA.DIV and BRA.U carry their condition as an operand before the target
        return not instruction.operands.startswith(("0x", "`"))
    return instruction.opcode not in _ENDS


def _blocks(code: Sequence[Instruction]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Basic blocks as index ranges into ``code``, and each block's successors."""
    index = {instruction.address: k for k, instruction in enumerate(code)}
    leaders = {0}
    for k, instruction in enumerate(code):
        target = _jump(instruction)
        if target is not None and target in index:
            leaders.add(index[target])
        if (target is not None or instruction.opcode in _ENDS) and k + 1 < len(code):
            leaders.add(k + 1)
    starts = sorted(leaders)
    blocks = list(zip(starts, [*starts[1:], len(code)], strict=True))
    number = {start: b for b, (start, _) in enumerate(blocks)}
    edges: list[list[int]] = []
    for b, (_, stop) in enumerate(blocks):
        last = code[stop - 1]
        target = _jump(last)
        out = [number[index[target]]] if target is not None and target in index else []
        if _falls_through(last) and b + 1 < len(blocks):
            out.append(b + 1)
        edges.append(out)
    return blocks, edges


def _cyclic(edges: Sequence[Sequence[int]]) -> list[bool]:
    """Which nodes lie on a cycle (Tarjan's strongly connected components, without recursion)."""
    n = len(edges)
    order, low, on_stack, cyclic = [-1] * n, [0] * n, [False] * n, [False] * n
    stack: list[int] = []
    count = 0
    for root in range(n):
        if order[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            node, child = work.pop()
            if child == 0:
                order[node] = low[node] = count
                count += 1
                stack.append(node)
                on_stack[node] = True
            if child < len(edges[node]):
                work.append((node, child + 1))
                after = edges[node][child]
                if order[after] < 0:
                    work.append((after, 0))
                elif on_stack[after]:
                    low[node] = min(low[node], order[after])
                continue
            if low[node] == order[node]:
                _close(node, stack, on_stack, cyclic, edges)
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
    return cyclic


def _close(
    root: int, stack: list[int], on_stack: list[bool], cyclic: list[bool], edges: Sequence[Sequence[int]]
) -> None:
    """Take the finished component that ends at ``root`` off the stack."""
    cut = stack.index(root)
    members = stack[cut:]
    del stack[cut:]
    for member in members:
        on_stack[member] = False
        cyclic[member] = len(members) > 1 or member in edges[member]


def _local_bytes(code: Sequence[Instruction], opcode: str) -> int:
    return sum(next((_WIDTHS[m] for m in i.modifiers if m in _WIDTHS), 4) for i in code if i.opcode == opcode)


def _static_smem(shared: int, data: bytes) -> int:
    if shared >= _RESERVED_SMEM and b".nv.shared.reserved." in data:
        return shared - _RESERVED_SMEM
    return shared


def _functions(text: str) -> dict[str, str]:
    parts = _FUNCTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _pick(entry: str, names: Sequence[str], path: Path) -> str:
    if entry in names:
        return entry
    if not entry and len(names) == 1:
        return names[0]
    wanted = f"no kernel {entry!r}" if entry else "no single kernel"
    raise KernelFault(
        "compile_error", f"{path.name} has {wanted}; it has {', '.join(names) or 'none'}", "codegen"
    )


def _dump(path: Path, *options: str) -> str:
    tool = find_tool("cuobjdump")
    folders = [str(tool.parent), os.environ.get("PATH", "")]
    # cuobjdump may call nvdisasm, which need not lie beside it
    nvdisasm = _locate("nvdisasm")
    if nvdisasm is not None:
        folders.insert(1, str(nvdisasm.parent))
    env = {**os.environ, "PATH": os.pathsep.join(folders)}
    try:
        done = subprocess.run(
            [str(tool), *options, str(path)], capture_output=True, text=True, timeout=TIMEOUT_S, env=env
        )
    except subprocess.TimeoutExpired:
        raise KernelFault(
            "compile_error", f"{tool} took over {TIMEOUT_S:.0f} s on {path.name}", "codegen"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = said[-1] if said else f"exit status {done.returncode}"
        raise KernelFault("compile_error", f"{tool} cannot read {path.name}: {reason}", "codegen")
    return done.stdout


def find_tool(name: str) -> Path:
    """The path of an NVIDIA binary tool; KernelFault ``unavailable`` with a hint where there is none.

    Looked for on PATH, in CUDA_HOME and CUDA_PATH, in /usr/local/cuda, in pip's nvidia wheels and in the
    Triton wheel, in this order."""
    found = _locate(name)
    if found is None:
        raise KernelFault(
            "unavailable",
            f"{name} was not found, so nothing can be read from a cubin; "
            f"pip install nvidia-cuda-{name} (or set CUDA_HOME to a toolkit that has bin/{name})",
            "codegen",
        )
    return found


@functools.cache
def _locate(name: str) -> Path | None:
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    for folder in _tool_folders():
        if os.access(folder / name, os.X_OK):
            return folder / name
    return None


def _tool_folders() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin"
    yield Path("/usr/local/cuda/bin")
    for root in _package_folders("nvidia"):
        for version in ("cu13", "cuda_cuobjdump", "cuda_nvdisasm", "cuda_nvcc"):
            yield root / version / "bin"
    for root in _package_folders("triton"):
        yield root / "backends" / "nvidia" / "bin"


def _package_folders(name: str) -> list[Path]:
    """Where a package lies, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
