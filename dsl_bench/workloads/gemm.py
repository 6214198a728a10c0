"""GEMM: C[M,N] = A[M,K] · B[N,K]ᵀ, bf16 or fp16 in and out, accumulated in fp32.

Both operands are K-contiguous (the layout of a linear layer's activations and weights).
FLOPs: 2·M·N·K. Bytes: A, B and C once each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dsl_bench.plugin import Case, TensorSpec, UsageError, Workload, positive_int

Size = tuple[int, int, int]

SMOKE: tuple[Size, ...] = (
    (128, 128, 64),
    (64, 128, 128),
    (16, 128, 64),
    (72, 104, 40),
    (33, 61, 47),
    (1, 128, 64),
)
SQUARE: tuple[Size, ...] = tuple((n, n, n) for n in (1024, 2048, 4096, 8192, 16384))
#: (N, K) of projections in Llama-3 8B and 70B and DeepSeek-V3, at M = 4096 tokens
LLM: tuple[Size, ...] = tuple(
    (4096, n, k)
    for n, k in (
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (10240, 8192),
        (8192, 8192),
        (57344, 8192),
        (8192, 28672),
        (2112, 7168),
        (24576, 1536),
        (7168, 16384),
        (4096, 7168),
        (7168, 2048),
    )
)
SKINNY: tuple[Size, ...] = tuple(
    (m, n, k) for m in (1, 16, 64, 128) for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
)
#: no tile divides them, yet every row starts on 16 bytes
RAGGED: tuple[Size, ...] = (
    (4000, 4104, 4072),
    (1000, 3000, 5000),
    (3333, 2728, 8200),
    (2049, 8200, 4104),
    (517, 10248, 2056),
    (7777, 1544, 3336),
)
#: odd N and K: rows start on 2 bytes only
UNALIGNED: tuple[Size, ...] = ((1023, 1021, 1019), (2047, 2049, 2051), (4095, 4097, 4099), (128, 8191, 4097))
QUICK: tuple[Size, ...] = (
    (4096, 4096, 4096),
    (4096, 2112, 7168),
    (16, 6144, 4096),
    (4000, 4104, 4072),
    (2047, 2049, 2051),
)

_GROUPS: tuple[tuple[str, tuple[Size, ...], tuple[str, ...]], ...] = (
    ("smoke", SMOKE, ("fp16",)),
    ("quick", QUICK, ("bf16",)),
    ("square", SQUARE, ("bf16", "fp16")),
    ("llm", LLM, ("bf16",)),
    ("skinny", SKINNY, ("bf16",)),
    ("ragged", RAGGED, ("bf16",)),
    ("unaligned", UNALIGNED, ("bf16",)),
)


def _sizes() -> Iterator[tuple[str, Size, str]]:
    for group, sizes, dtypes in _GROUPS:
        for dtype in dtypes:
            for size in sizes:
                yield group, size, dtype


def _case(size: Size, dtype: str, groups: Iterable[str]) -> Case:
    m, n, k = size
    return Case("gemm", f"{m}x{n}x{k}-{dtype}", {"m": m, "n": n, "k": k}, dtype, tuple(groups))


class Gemm(Workload):
    """C[M,N] = A[M,K] · B[N,K]ᵀ."""

    name = "gemm"
    baselines = ("vendor/cublas", "vendor/cublaslt")
    param_names = ("m", "n", "k")

    def cases(self) -> Sequence[Case]:
        """Every named size once, with all the groups it belongs to."""
        groups: dict[tuple[Size, str], list[str]] = {}
        for group, size, dtype in _sizes():
            groups.setdefault((size, dtype), []).append(group)
        return [_case(size, dtype, names) for (size, dtype), names in groups.items()]

    def parse_case(self, given: Mapping[str, str]) -> Case:
        """A case from ``m``, ``n``, ``k`` and optionally ``dtype`` (bf16 by default)."""
        values = dict(given)
        dtype = values.pop("dtype", "bf16")
        if dtype not in ("bf16", "fp16"):
            raise UsageError(f"gemm: dtype={dtype!r} is not supported; known: bf16, fp16")
        missing = [p for p in self.param_names if p not in values]
        extra = sorted(set(values) - set(self.param_names))
        if missing or extra:
            wrong = [f"unknown {', '.join(extra)}"] if extra else []
            wrong += [f"missing {', '.join(missing)}"] if missing else []
            raise UsageError(f"gemm: a case takes m, n, k, dtype; {'; '.join(wrong)}")
        m, n, k = (positive_int("gemm", p, values[p]) for p in self.param_names)
        named = {(c["m"], c["n"], c["k"], c.dtype): c for c in self.cases()}
        return named.get((m, n, k, dtype)) or _case((m, n, k), dtype, ("own",))

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        """a[M,K], b[N,K] and the output c[M,N]."""
        m, n, k = case["m"], case["n"], case["k"]
        return (
            TensorSpec("a", (m, k), case.dtype, "value"),
            TensorSpec("b", (n, k), case.dtype, "value"),
            TensorSpec("c", (m, n), case.dtype, "output"),
        )

    def reference(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A·Bᵀ in float64, by blocks of rows so that the float64 copies stay small."""
        import torch

        a, b = inputs["a"], inputs["b"]
        b64 = b.double().t()
        out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.float64, device=a.device)
        rows = 2048
        for start in range(0, a.shape[0], rows):
            torch.mm(a[start : start + rows].double(), b64, out=out[start : start + rows])
        return {"c": out}

    def flops(self, case: Case) -> float:
        """2·M·N·K."""
        return 2.0 * case["m"] * case["n"] * case["k"]

    def bytes(self, case: Case) -> float:
        """A, B and C once."""
        return float(sum(spec.nbytes for spec in self.specs(case)))


WORKLOAD = Gemm()
