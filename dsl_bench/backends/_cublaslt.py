"""A thin ctypes binding of cublasLt: one matmul of row-major bf16 or fp16 matrices, by heuristic index.

Prefers the library that torch has loaded, so that both baselines run the same cuBLAS.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from dsl_bench.plugin import KernelFault

#: split-K algorithms that reduce in float32 get this much room; torch's own default is 32 MiB
WORKSPACE_BYTES = 64 << 20
#: algorithms asked of the heuristic
REQUESTED = 32

_CUDA_R_32F, _CUDA_R_16F, _CUDA_R_16BF = 0, 2, 14
_COMPUTE_32F = 68
_OP_N, _OP_T = 0, 1
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_PREF_WORKSPACE, _PREF_REDUCTION_MASK = 1, 3
_PREF_ALIGN_A, _PREF_ALIGN_B, _PREF_ALIGN_C, _PREF_ALIGN_D = 5, 6, 7, 8
#: partial sums in the compute type (float32), never in the output's type
_REDUCE_IN_COMPUTE_TYPE = 2
_NOT_SUPPORTED = 15

_STATUS = {
    1: "not initialised",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def find_library() -> Path | None:
    """The cublasLt of this process, else that of pip's nvidia wheels, else None."""
    loaded = _loaded()
    if loaded is not None:
        return loaded
    for folder in _wheel_folders():
        found = sorted(folder.glob("libcublasLt.so.*"))
        if found:
            return found[-1]
    return None


def _loaded() -> Path | None:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*libcublasLt\.so\S*)", maps)
    return Path(found.group(1)) if found else None


def _wheel_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root) / "cu13" / "lib"
        yield Path(root) / "cublas" / "lib"


class CublasLt:
    """The library, with a handle and a workspace once they are needed; its version needs no GPU.
    Raises KernelFault ``unavailable`` where it cannot be loaded."""

    def __init__(self) -> None:
        path = find_library()
        try:
            self._lib: Any = ctypes.CDLL(str(path) if path else "libcublasLt.so.13")
        except OSError as fault:
            raise KernelFault("unavailable", f"cublasLt cannot be loaded: {fault}", "library") from None
        self._declare()
        self._workspaces: dict[Any, Any] = {}

    def _declare(self) -> None:
        lib, pointer = self._lib, c_void_p
        lib.cublasLtGetVersion.restype = c_size_t
        lib.cublasLtGetVersion.argtypes = []
        for name, arguments in {
            "cublasLtCreate": [pointer],
            "cublasLtMatmulDescCreate": [pointer, c_int, c_int],
            "cublasLtMatmulDescSetAttribute": [pointer, c_int, pointer, c_size_t],
            "cublasLtMatrixLayoutCreate": [pointer, c_int, c_uint64, c_uint64, c_int64],
            "cublasLtMatmulPreferenceCreate": [pointer],
            "cublasLtMatmulPreferenceSetAttribute": [pointer, c_int, pointer, c_size_t],
            "cublasLtMatmulAlgoGetHeuristic": [*[pointer] * 7, c_int, pointer, pointer],
            # handle, desc, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algo,
            # workspace, its size, stream
            "cublasLtMatmul": [*[pointer] * 14, c_size_t, pointer],
            "cublasLtMatmulDescDestroy": [pointer],
            "cublasLtMatrixLayoutDestroy": [pointer],
            "cublasLtMatmulPreferenceDestroy": [pointer],
        }.items():
            function = getattr(lib, name)
            function.restype = c_int
            function.argtypes = arguments

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``name``; KernelFault ``launch_error`` where it does not succeed."""
        status = getattr(self._lib, name)(*arguments)
        if status != 0:
            raise KernelFault("launch_error", f"{name}: {_said(status)}", "cublasLt")

    @functools.cached_property
    def _handle(self) -> c_void_p:
        made = c_void_p()
        self.call("cublasLtCreate", byref(made))
        return made

    def workspace(self, device: Any) -> Any:
        """The scratch memory of a device, shared by all calls on its current stream, as torch's own is."""
        import torch

        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[device]

    @property
    def version(self) -> str:
        """``13.1.0``."""
        number = int(self._lib.cublasLtGetVersion())
        return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"

    def _layout(self, dtype: int, rows: int, columns: int, leading: int) -> c_void_p:
        made = c_void_p()
        self.call("cublasLtMatrixLayoutCreate", byref(made), dtype, rows, columns, leading)
        return made

    def plan(self, a: Any, b: Any, c: Any, workspace: Any) -> Plan:
        """C[M,N] = A[M,K] · B[N,K]ᵀ for contiguous CUDA tensors of one 16-bit type, as cublasLt sees it:
        column-major Cᵀ[N,M] = op(B) · A with op the transposition. Accumulates in float32."""
        return Plan(self, a, b, c, workspace)

    def heuristics(self, plan: Plan) -> list[Heuristic]:
        """The algorithms that the heuristic offers for ``plan``, best guess first."""
        preference = c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            for attribute, value in plan.preferences():
                self.call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    attribute,
                    byref(value),
                    ctypes.sizeof(value),
                )
            results, count = (Heuristic * REQUESTED)(), c_int()
            layouts = (plan.layout_b, plan.layout_a, plan.layout_c, plan.layout_c)
            status = self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, plan.desc, *layouts, preference, REQUESTED, results, byref(count)
            )
        finally:
            self.call("cublasLtMatmulPreferenceDestroy", preference)
        if status not in (0, _NOT_SUPPORTED):
            reason = f"cublasLtMatmulAlgoGetHeuristic: {_said(status)}"
            raise KernelFault("launch_error", reason, "cublasLt")
        return [results[k] for k in range(count.value) if results[k].state == 0]

    def runner(self, plan: Plan, algo: Heuristic, stream: Callable[[], int]) -> Callable[[], None]:
        """A function that enqueues ``plan`` with ``algo`` on ``stream()`` and does nothing else."""
        matmul = self._lib.cublasLtMatmul
        before, after = plan.arguments(self._handle, algo)

        def run() -> None:
            status = matmul(*before, *after, stream())
            if status != 0:
                raise KernelFault("launch_error", f"cublasLtMatmul: {_said(status)}", "cublasLt")

        return run


class Plan:
    """Descriptors and pointers of one matmul; frees the descriptors at its end."""

    def __init__(self, lib: CublasLt, a: Any, b: Any, c: Any, workspace: Any) -> None:
        self._lib = lib
        (m, k), n = a.shape, b.shape[0]
        dtype = _CUDA_R_16BF if str(a.dtype) == "torch.bfloat16" else _CUDA_R_16F
        self._pointers = (b.data_ptr(), a.data_ptr(), c.data_ptr())
        self._leading = (k, k, n)
        self._workspace = workspace
        self._alpha, self._beta = c_float(1.0), c_float(0.0)
        self.desc = c_void_p()
        lib.call("cublasLtMatmulDescCreate", byref(self.desc), _COMPUTE_32F, _CUDA_R_32F)
        for attribute, value in ((_DESC_TRANSA, _OP_T), (_DESC_TRANSB, _OP_N)):
            number = c_int32(value)
            lib.call("cublasLtMatmulDescSetAttribute", self.desc, attribute, byref(number), 4)
        self.layout_b = lib._layout(dtype, k, n, k)
        self.layout_a = lib._layout(dtype, k, m, k)
        self.layout_c = lib._layout(dtype, n, m, n)

    def preferences(self) -> Iterator[tuple[int, Any]]:
        """Workspace, reduction in float32 only, and how the operands are really aligned: an odd leading
        dimension leaves every other column on 2 bytes."""
        yield _PREF_WORKSPACE, c_uint64(self._workspace.numel() * self._workspace.element_size())
        yield _PREF_REDUCTION_MASK, c_uint32(_REDUCE_IN_COMPUTE_TYPE)
        b, a, c = (alignment(p, 2 * ld) for p, ld in zip(self._pointers, self._leading, strict=True))
        for attribute, value in (
            (_PREF_ALIGN_A, b),
            (_PREF_ALIGN_B, a),
            (_PREF_ALIGN_C, c),
            (_PREF_ALIGN_D, c),
        ):
            yield attribute, c_uint32(value)

    def arguments(self, handle: c_void_p, algo: Heuristic) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All of cublasLtMatmul's arguments but the stream, in two halves. They refer to this plan, which
        must outlive them."""
        self._algo = algo
        b, a, c = (c_void_p(p) for p in self._pointers)
        before = (handle, self.desc, ctypes.addressof(self._alpha), b, self.layout_b, a, self.layout_a)
        scratch = (c_void_p(self._workspace.data_ptr()), c_size_t(algo.workspace))
        beta, chosen = ctypes.addressof(self._beta), ctypes.addressof(algo)
        after = (beta, c, self.layout_c, c, self.layout_c, chosen)
        return tuple(map(_pointer, before)), (*map(_pointer, after), *scratch)

    def __del__(self) -> None:
        lib = self._lib._lib
        for layout in (getattr(self, n, None) for n in ("layout_a", "layout_b", "layout_c")):
            if layout:
                lib.cublasLtMatrixLayoutDestroy(layout)
        if getattr(self, "desc", None):
            lib.cublasLtMatmulDescDestroy(self.desc)


def _said(status: int) -> str:
    return _STATUS.get(status, f"status {status}")


def _pointer(value: Any) -> c_void_p:
    return value if isinstance(value, c_void_p) else c_void_p(value)


def alignment(pointer: int, row_bytes: int) -> int:
    """The greatest power of two, up to 256 bytes, on which every row begins."""
    both = pointer | row_bytes | 256
    return both & -both


@functools.cache
def library() -> CublasLt:
    """The library, loaded once a process."""
    return CublasLt()
