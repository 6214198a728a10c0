"""A GEMM that TileLang generated, run on the CPU: made a shared library with the headers beside this, then
launched into NaNs in a process of its own, and compared with a product in fp64."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_on_cpu import HERE, gather, shared_library, tensor_map

__all__ = ["check", "tensor_map"]


def library(text: str, dtype: str, maps: Sequence[str], folder: Path) -> tuple[Path, list[str]]:
    """Compiles the generated kernel; returns the library and the names of its parameters, in order."""
    names = re.findall(r"(\w+)(?=[,)])", re.search(r"gemm_kernel\((.*?)\) \{", text).group(1) + ")")
    body = "\n".join(x for x in text.splitlines() if not x.startswith("#"))
    body = re.sub(r"extern __shared__ .*\[\];", "unsigned char* const buf_dyn_shmem = tl_dynamic();", body)
    for i, name in enumerate(re.findall(r"auto (\w+) = reinterpret_cast<Barrier\*>", body)):
        body = body.replace(f"reinterpret_cast<Barrier*>({name}_mem)", f"tl_barriers({i})")
    given = ", ".join(f"maps[{maps.index(x)}]" if x in maps else f"numbers[{i}]" for i, x in enumerate(names))
    body = f'#define BF16 {int(dtype == "bf16")}\n#include "tilelang.h"\n#define __align__(x)\n{body}\n' + (
        'extern "C" void run(int grid, int cluster, int threads, int smem, int seed, TensorMap* maps, '
        "int* numbers) {\n    stores.clear();\n"
        f"    run_grid(grid, cluster, threads, smem, seed, [=] {{ gemm_kernel({given}); }});\n"
        "    for (const auto& [fiber, q] : stores)\n"
        '        demand(q.groups.empty() && q.open.empty(), "a store is left");\n'
        "}\n"
    )
    gather(folder)
    return shared_library(body, folder), names


def check(
    artifact: Any,
    case: Any,
    maps: Mapping[str, tuple[str, bytes]],
    values: Mapping[str, int],
    cluster: int,
    folder: Path,
) -> None:
    """One launch for each of two seeds. ``maps``: by the parameter's name, which of a, b and c a map is of,
    and the map. ``values``: the kernel's integers by name, ``blocks`` among them."""
    import torch

    made, names = library((artifact.folder / "kernel.cu").read_text(), case.dtype, list(maps), folder)
    m, n, k = case["m"], case["n"], case["k"]
    generator = torch.Generator().manual_seed(3)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    a, b = (torch.randn((x, k), generator=generator).to(kind) for x in (m, n))
    c = torch.full((m, n), float("nan"), dtype=kind)
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        (folder / name).write_bytes(tensor.view(torch.int16).numpy().tobytes())
    known = {"m": m, "n": n, "k": k, **values}
    job = {
        "library": str(made),
        "arrays": [str(folder / name) for name in "abc"],
        "maps": [text.hex() for _, text in maps.values()],
        "of": ["abc".index(name) for name, _ in maps.values()],
        "shape": [values["blocks"], cluster, artifact.meta["threads"], artifact.meta["smem"] + 2048],
        "numbers": [known.get(x, 0) for x in names],
        "seeds": [1, 2],
    }
    (folder / "job.json").write_text(json.dumps(job))
    launch = [sys.executable, str(HERE / "launch.py"), str(folder / "job.json")]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    want = a.double() @ b.double().T
    for seed in job["seeds"]:
        got = torch.frombuffer(bytearray((folder / f"out.{seed}").read_bytes()), dtype=kind).view(m, n)
        error = (got.double() - want).abs().max()
        assert error <= want.abs().max() * (2**-8 if case.dtype == "bf16" else 2**-11) + 1e-3, case.name
