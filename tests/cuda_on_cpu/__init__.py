"""CUDA kernels compiled by g++ for the CPU, with headers that give what they call other bodies."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: how a kernel declares its shared memory, and what stands for that here
SHARED = ("extern __shared__ unsigned char raw[];", "unsigned char* const raw = dynamic_shared_memory();")


def tensor_map(sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], address: int = 0) -> bytes:
    """What the headers take for a tensor map (machine.h): innermost first, strides in bytes."""
    fives = [(*given, *[rest] * (5 - len(given))) for given, rest in ((sizes, 1), (strides, 0), (box, 1))]
    packed = struct.pack("<Qi4x5q5q5i4x", address, len(sizes), *fives[0], *fives[1], *fives[2])
    return packed.ljust(128, b"\0")


def gather(folder: Path, first: Iterable[Path] = ()) -> None:
    """Copies ``first``, then the headers here, which replace any of the same name."""
    for file in (*first, *HERE.glob("*.h"), *HERE.glob("*.cuh")):
        shutil.copy(file, folder)


def shared_library(text: str, folder: Path, defines: Mapping[str, Any] | None = None) -> Path:
    """Compiles ``text`` beside what was gathered in ``folder``; returns the library's path."""
    (folder / "kernel.cpp").write_text(text)
    given = [f"-D{name}={value}" for name, value in (defines or {}).items()]
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-w", "-o", "kernel.so"]
    command = ["g++", *given, *flags, "kernel.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return folder / "kernel.so"


def written_kernel(source: Any, run: str, folder: Path) -> Path:
    """A kernel's own source (a ``CudaSource``), with ``run``, the function that launches it, as a library."""
    gather(folder, source.file.parent.glob("*.cuh"))
    text = source.file.read_text()
    assert text.count(SHARED[0]) == 1
    return shared_library(text.replace(*SHARED) + run, folder, source.defines)
