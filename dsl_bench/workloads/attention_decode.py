"""Attention of one new token a sequence against a paged KV cache, grouped query heads, head size 128.

q [batch, hq, d]; k_cache and v_cache [pool, page, hkv, d], of which ``page_table`` [batch, widest] names each
sequence's pages in order (shuffled over the pool; entries beyond the end are 0) and ``lengths`` [batch] its
tokens, the new one included; o [batch, hq, d], zeros for a sequence without tokens; scale 1/√d.
FLOPs: 4·hq·d a token. Bytes: each token's K and V once, q and o once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsl_bench.plugin import Bound, Case, TensorSpec, Workload, int_list
from dsl_bench.workloads import _attention as common

Lengths = tuple[int, ...]
PAGES = (16, 32, 64)


@dataclass(frozen=True)
class Size:
    """One case before it has a name."""

    lens: Lengths
    hq: int = 32
    hkv: int = 8
    page: int = 16
    d: int = 128
    dtype: str = "bf16"


#: one sequence far longer than the rest
ONE_LONG: Lengths = int_list("65536+1024*31")
#: log-uniform from 1 to 8192, in the order in which they were drawn
MIXED: Lengths = int_list(
    "801+3+6200+97+1+2744+413+17+8192+55+1290+8+350+4021+29+176+7003+640+2+1868+5333+12+970+220+3107+71+"
    "488+1500+5+2311+140+4700"
)
#: a server's batch in mid-flight: all long, none equal
UNEVEN: Lengths = tuple(2000 + 37 * ((29 * i) % 128) for i in range(128))
_LABELS = {ONE_LONG: "one-long", MIXED: "mixed", UNEVEN: "uneven"}

_GROUPS: tuple[tuple[str, tuple[Size, ...]], ...] = (
    (
        "smoke",
        (
            Size((0, 1, 15, 16, 17, 100), 4, 1, dtype="fp16"),
            Size((33,), 8, 2, 64, dtype="fp16"),
            Size((70, 5), 2, 2, dtype="fp16"),
        ),
    ),
    (
        "edge",
        (
            Size((1,)),
            Size((0, 1, 15, 16, 17, 0, 63, 64, 65, 129)),
            Size((0, 1, 63, 64, 65, 127, 129, 0), 64, 8, 64),
            Size((1, 15, 17, 0, 257), 32, 32),
        ),
    ),
    ("quick", (Size((8192,) * 64), Size((8192,)), Size(ONE_LONG))),
    (
        "throughput",
        (Size((8192,) * 64), Size((1024,) * 256), Size((4096,) * 128), Size((32768,) * 16, 64, 8, 64)),
    ),
    ("latency", (Size((1024,)), Size((8192,)), Size((32768,)), Size((8192,) * 4))),
    ("mha", (Size((4096,) * 32, 32, 32),)),
    ("ragged", (Size(ONE_LONG), Size(MIXED), Size(UNEVEN))),
)
_DEFAULTS = {"lens": "", "heads": "32/8", "page": "16", "d": "128", "dtype": "bf16"}


def _case(size: Size, groups: Sequence[str]) -> Case:
    params: dict[str, int | str] = {
        "lens": common.canonical(size.lens),
        "hq": size.hq,
        "hkv": size.hkv,
        "page": size.page,
        "d": size.d,
    }
    label = _LABELS.get(size.lens) or common.label(size.lens)
    name = f"{label}-h{size.hq}-{size.hkv}-p{size.page}-{size.dtype}"
    return Case("attention_decode", name, params, size.dtype, tuple(groups))


def lengths(case: Case) -> Lengths:
    """The sequences' lengths in order."""
    return int_list(str(case.params["lens"]))


class AttentionDecode(Workload):
    """softmax(q·kᵀ/√d)·v of one query token a sequence, K and V in pages."""

    name = "attention_decode"
    baselines = ("flashinfer/decode-tc", "flashinfer/decode-cores", "flashinfer/decode-xqa")
    param_names = ("lens", "heads", "page", "d")
    metric: Literal["tflops", "gbps"] = "gbps"
    bound = Bound("vendor", rms=1.25, worst=2.0)

    def cases(self) -> Sequence[Case]:
        """Every named size once, with all the groups it belongs to."""
        groups: dict[Size, list[str]] = {}
        for group, sizes in _GROUPS:
            for size in sizes:
                groups.setdefault(size, []).append(group)
        return [_case(size, names) for size, names in groups.items()]

    def parse_case(self, given: Mapping[str, str]) -> Case:
        """A case from ``lens`` (``512*16+8192``) and optionally ``heads`` (32/8), ``page`` (16, 32 or 64),
        ``d`` (128) and ``dtype``."""
        values = common.take(self.name, given, _DEFAULTS)
        hq, hkv = common.parse_heads(self.name, values["heads"])
        size = Size(
            common.parse_lengths(self.name, values["lens"]),
            hq,
            hkv,
            common.one_of(self.name, "page", values["page"], PAGES),
            common.one_of(self.name, "d", values["d"], (128,)),
            values["dtype"],
        )
        own = _case(size, ("own",))
        return {c.name: c for c in self.cases()}.get(own.name, own)

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        """q, the two caches, the pages, and the output o."""
        lens, page = lengths(case), case["page"]
        rows, hq, hkv, d = len(lens), case["hq"], case["hkv"], case["d"]
        cache = (common.pool_pages(lens, page), page, hkv, d)
        return (
            TensorSpec("q", (rows, hq, d), case.dtype, "value"),
            TensorSpec("k_cache", cache, case.dtype, "value"),
            TensorSpec("v_cache", cache, case.dtype, "value"),
            TensorSpec("page_table", (rows, common.table_width(lens, page)), "int32", "index"),
            TensorSpec("lengths", (rows,), "int32", "index"),
            TensorSpec("o", (rows, hq, d), case.dtype, "output"),
        )

    def index(self, case: Case, rng: Any) -> dict[str, Any]:
        """The pages of each sequence, shuffled, and the lengths."""
        lens, page = lengths(case), case["page"]
        return common.page_index(lens, page, common.pool_pages(lens, page), rng)

    def reference(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float64 attention, sequence by sequence."""
        return self._attention(case, inputs, low=False)

    def yardstick(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float32 attention with probabilities rounded to the inputs' type, rounded to the output's."""
        return self._attention(case, inputs, low=True)

    def _attention(self, case: Case, inputs: Mapping[str, Any], low: bool) -> dict[str, Any]:
        import torch

        q, table = inputs["q"], inputs["page_table"]
        o = torch.empty(q.shape, dtype=q.dtype if low else torch.float64, device=q.device)
        for row, length in enumerate(lengths(case)):
            k, v = (common.gather(inputs[name], table[row], length) for name in ("k_cache", "v_cache"))
            o[row] = common.attend(q[row : row + 1], k, v, 1 / math.sqrt(case["d"]), False, low)[0]
        return {"o": o}

    def flops(self, case: Case) -> float:
        """Two products over every token."""
        return 4.0 * case["hq"] * case["d"] * sum(lengths(case))

    def bytes(self, case: Case) -> float:
        """Each token's K and V, q and o, once."""
        lens = lengths(case)
        return 2.0 * case["d"] * (2 * case["hkv"] * sum(lens) + 2 * case["hq"] * len(lens))


WORKLOAD = AttentionDecode()
