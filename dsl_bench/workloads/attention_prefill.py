"""Attention of a prompt: a ragged batch of sequences, each attending to itself, grouped query heads.

q [tokens, hq, d], k and v [tokens, hkv, d], sequences one after the other with bounds ``cu_seqlens``
[batch + 1]; o [tokens, hq, d]; scale 1/√d. FLOPs: 4·hq·d·S² a sequence in full, 2·hq·d·S·(S+1) causal.
Bytes: q, k, v and o once each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsl_bench.plugin import Bound, Case, TensorSpec, Workload, int_list
from dsl_bench.workloads import _attention as common

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """One case before it has a name."""

    lens: Lengths
    hq: int = 32
    hkv: int = 8
    d: int = 128
    causal: int = 1
    dtype: str = "bf16"


BATCHES: tuple[Lengths, ...] = (
    (512,) * 16,
    (1024,) * 8,
    (2048,) * 4,
    (4096,) * 2,
    (8192,),
    (16384,),
    (32768,),
)
#: log-uniform from 1 to 8192, in the order in which they were drawn
MIXED: Lengths = int_list(
    "23+1187+4410+2+311+7765+96+1+640+2873+51+8192+175+1522+9+3391+37+729+5870+14+2051+430+128+1009"
)
#: many short prompts behind one long
LONG_AND_SHORT: Lengths = int_list("8192+64*48+1*16+500*12")
#: lengths that no tile divides, of one order of magnitude
UNEVEN: Lengths = int_list("1025+999+2047+1+1536+777+1300+511+2049+1111+63+895+1777+1201+129+1903")

SMOKE = tuple(
    replace(base, causal=causal, dtype="fp16")
    for causal in (1, 0)
    for base in (
        Size((1, 0, 5, 64, 33), 4, 2, 64),
        Size((70,), 4, 1, 128),
        Size((17, 1), 2, 2, 256),
    )
)
#: what breaks kernels: single tokens, empty sequences, one more or less than any tile
EDGE = tuple(
    Size(lens, 8, 2, d, causal)
    for causal in (1, 0)
    for lens, d in (
        ((1,), 128),
        ((0, 1, 0, 127, 128, 129, 0), 128),
        ((63, 64, 65, 1, 255, 257), 64),
        ((1, 15, 0, 17, 79, 80, 81), 256),
    )
)
_GROUPS: tuple[tuple[str, tuple[Size, ...]], ...] = (
    ("smoke", SMOKE),
    ("edge", EDGE),
    ("quick", (Size((4096,) * 2), Size((2048,) * 4, causal=0), Size(UNEVEN))),
    ("causal_d128", tuple(Size(lens) for lens in BATCHES)),
    ("full_d128", tuple(Size(lens, causal=0) for lens in BATCHES)),
    ("d64", tuple(Size(lens, d=64, causal=c) for c in (1, 0) for lens in ((2048,) * 4, (8192,)))),
    ("d256", tuple(Size(lens, 16, 4, 256, c) for c in (1, 0) for lens in ((2048,) * 4, (8192,)))),
    ("heads", tuple(Size((4096,) * 2, hq, hkv) for hq, hkv in ((32, 32), (64, 8)))),
    ("ragged", tuple(Size(lens) for lens in (MIXED, LONG_AND_SHORT, UNEVEN))),
)
_LABELS = {MIXED: "mixed", LONG_AND_SHORT: "long-and-short", UNEVEN: "uneven"}
_DEFAULTS = {"lens": "", "heads": "32/8", "d": "128", "causal": "1", "dtype": "bf16"}


def _case(size: Size, groups: Sequence[str]) -> Case:
    name = _LABELS.get(size.lens) or common.label(size.lens)
    mask = "causal" if size.causal else "full"
    params: dict[str, int | str] = {
        "lens": common.canonical(size.lens),
        "hq": size.hq,
        "hkv": size.hkv,
        "d": size.d,
        "causal": size.causal,
    }
    name = f"{name}-h{size.hq}-{size.hkv}-d{size.d}-{mask}-{size.dtype}"
    return Case("attention_prefill", name, params, size.dtype, tuple(groups))


def lengths(case: Case) -> Lengths:
    """The sequences' lengths in order."""
    return int_list(str(case.params["lens"]))


class AttentionPrefill(Workload):
    """softmax(q·kᵀ/√d)·v over a ragged batch."""

    name = "attention_prefill"
    baselines = (
        "flashinfer/prefill-fa3",
        "flashinfer/prefill-fa2",
        "flashinfer/prefill-single",
        "cudnn/sdpa",
    )
    param_names = ("lens", "heads", "d", "causal")
    bound = Bound("vendor", rms=1.25, worst=2.0)

    def cases(self) -> Sequence[Case]:
        """Every named size once, with all the groups it belongs to."""
        groups: dict[Size, list[str]] = {}
        for group, sizes in _GROUPS:
            for size in sizes:
                groups.setdefault(size, []).append(group)
        return [_case(size, names) for size, names in groups.items()]

    def parse_case(self, given: Mapping[str, str]) -> Case:
        """A case from ``lens`` (``512*16+8192``) and optionally ``heads`` (32/8), ``d`` (64, 128 or 256),
        ``causal`` (1 or 0) and ``dtype``."""
        values = common.take(self.name, given, _DEFAULTS)
        hq, hkv = common.parse_heads(self.name, values["heads"])
        size = Size(
            common.parse_lengths(self.name, values["lens"]),
            hq,
            hkv,
            common.one_of(self.name, "d", values["d"], (64, 128, 256)),
            common.parse_flag(self.name, "causal", values["causal"]),
            values["dtype"],
        )
        own = _case(size, ("own",))
        return {c.name: c for c in self.cases()}.get(own.name, own)

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        """q, k, v, the sequences' bounds, and the output o."""
        lens = lengths(case)
        tokens, hq, hkv, d = sum(lens), case["hq"], case["hkv"], case["d"]
        return (
            TensorSpec("q", (tokens, hq, d), case.dtype, "value"),
            TensorSpec("k", (tokens, hkv, d), case.dtype, "value"),
            TensorSpec("v", (tokens, hkv, d), case.dtype, "value"),
            TensorSpec("cu_seqlens", (len(lens) + 1,), "int32", "index"),
            TensorSpec("o", (tokens, hq, d), case.dtype, "output"),
        )

    def index(self, case: Case, rng: Any) -> dict[str, Any]:
        """Where each sequence starts, and the end."""
        import numpy as np

        return {"cu_seqlens": np.cumsum([0, *lengths(case)]).astype(np.int32)}

    def reference(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float64 attention, sequence by sequence."""
        return self._attention(case, inputs, low=False)

    def yardstick(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float32 attention with probabilities rounded to the inputs' type, rounded to the output's."""
        return self._attention(case, inputs, low=True)

    def _attention(self, case: Case, inputs: Mapping[str, Any], low: bool) -> dict[str, Any]:
        import torch

        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        o = torch.empty(q.shape, dtype=q.dtype if low else torch.float64, device=q.device)
        start = 0
        for length in lengths(case):
            part = slice(start, start + length)
            o[part] = common.attend(
                q[part], k[part], v[part], 1 / math.sqrt(case["d"]), bool(case["causal"]), low
            )
            start += length
        return {"o": o}

    def flops(self, case: Case) -> float:
        """Two products over the pairs of query and key that the mask keeps."""
        pairs = sum(n * (n + 1) / 2 if case["causal"] else n * n for n in lengths(case))
        return 4.0 * case["hq"] * case["d"] * pairs

    def bytes(self, case: Case) -> float:
        """q, k, v and o once."""
        return float(sum(spec.nbytes for spec in self.specs(case)))


WORKLOAD = AttentionPrefill()
