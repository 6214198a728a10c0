"""Multi-head latent attention in decode form: all heads read one latent cache, as keys and as values.

q [batch, sq, h, 576] (512 latent and 64 rotary components); kv_cache [pool, 64, 576], of which
``page_table`` [batch, widest] names each sequence's pages in order (shuffled; entries beyond the end are 0)
and ``lengths`` [batch] its tokens, the new ones included; the first 512 components of a token are its value;
o [batch, sq, h, 512]; scale 1/√576. With sq > 1 the mask is causal, aligned to the bottom right.
FLOPs: 2·h·sq·(576 + 512) a token. Bytes: the latent cache once.
Source: DeepSeek-V2 (Liu et al., 2024), the absorbed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsl_bench.plugin import Bound, Case, TensorSpec, Workload, int_list, positive_int
from dsl_bench.workloads import _attention as common

Lengths = tuple[int, ...]
D_QK, D_V, PAGE = 576, 512, 64


@dataclass(frozen=True)
class Size:
    """One case before it has a name."""

    lens: Lengths
    heads: int = 128
    sq: int = 1
    dtype: str = "bf16"


#: one sequence far longer than the rest
ONE_LONG: Lengths = int_list("32768+1024*31")
#: log-uniform from 1 to 8192, in the order in which they were drawn
MIXED: Lengths = int_list(
    "512+2+7311+88+1023+1+4120+300+29+8192+650+5+1777+115+3002+47+2350+9+880+5600+16+1290+200+3700"
)
#: a server's batch in mid-flight: all long, none equal
UNEVEN: Lengths = tuple(1000 + 61 * ((23 * i) % 64) for i in range(64))
_LABELS = {ONE_LONG: "one-long", MIXED: "mixed", UNEVEN: "uneven"}

_GROUPS: tuple[tuple[str, tuple[Size, ...]], ...] = (
    (
        "smoke",
        (
            Size((0, 1, 63, 64, 65), 16, dtype="fp16"),
            Size((3, 100), 16, 2, dtype="fp16"),
            Size((70,), 64, dtype="fp16"),
        ),
    ),
    (
        "edge",
        (
            Size((1,)),
            Size((0, 1, 63, 64, 65, 129, 0, 200), 128),
            Size((2, 63, 64, 65, 0, 128), 64, 2),
            Size((0, 1, 63, 64, 65, 300), 16),
        ),
    ),
    ("quick", (Size((4096,) * 128), Size((4096,) * 64, 16), Size((8192,) * 4))),
    ("compute", (Size((4096,) * 128), Size((8192,) * 32), Size((4096,) * 64, 64, 2))),
    ("memory", tuple(Size((4096,) * 64, h) for h in (16, 32, 64))),
    ("latency", (Size((32768,)), Size((8192,) * 4))),
    ("ragged", (Size(ONE_LONG), Size(MIXED), Size(UNEVEN, 64))),
)
_DEFAULTS = {"lens": "", "heads": "128", "sq": "1", "dtype": "bf16"}


def _case(size: Size, groups: Sequence[str]) -> Case:
    params: dict[str, int | str] = {"lens": common.canonical(size.lens), "h": size.heads, "sq": size.sq}
    label = _LABELS.get(size.lens) or common.label(size.lens)
    name = f"{label}-h{size.heads}-q{size.sq}-{size.dtype}"
    return Case("mla_decode", name, params, size.dtype, tuple(groups))


def lengths(case: Case) -> Lengths:
    """The sequences' lengths in order."""
    return int_list(str(case.params["lens"]))


class MlaDecode(Workload):
    """softmax(q·cᵀ/√576)·c[:, :512] of one or a few query tokens a sequence."""

    name = "mla_decode"
    baselines = ("flashmla/dense", "flashinfer/mla-fa3")
    param_names = ("lens", "heads", "sq")
    bound = Bound("vendor", rms=1.25, worst=2.0)

    def cases(self) -> Sequence[Case]:
        """Every named size once, with all the groups it belongs to."""
        groups: dict[Size, list[str]] = {}
        for group, sizes in _GROUPS:
            for size in sizes:
                groups.setdefault(size, []).append(group)
        return [_case(size, names) for size, names in groups.items()]

    def parse_case(self, given: Mapping[str, str]) -> Case:
        """A case from ``lens`` (``4096*64``) and optionally ``heads`` (128), ``sq`` (1) and ``dtype``."""
        values = common.take(self.name, given, _DEFAULTS)
        size = Size(
            common.parse_lengths(self.name, values["lens"]),
            positive_int(self.name, "heads", values["heads"]),
            positive_int(self.name, "sq", values["sq"]),
            values["dtype"],
        )
        own = _case(size, ("own",))
        return {c.name: c for c in self.cases()}.get(own.name, own)

    def specs(self, case: Case) -> tuple[TensorSpec, ...]:
        """q, the latent cache, the pages, and the output o."""
        lens = lengths(case)
        rows, sq, h = len(lens), case["sq"], case["h"]
        return (
            TensorSpec("q", (rows, sq, h, D_QK), case.dtype, "value"),
            TensorSpec("kv_cache", (common.pool_pages(lens, PAGE), PAGE, D_QK), case.dtype, "value"),
            TensorSpec("page_table", (rows, common.table_width(lens, PAGE)), "int32", "index"),
            TensorSpec("lengths", (rows,), "int32", "index"),
            TensorSpec("o", (rows, sq, h, D_V), case.dtype, "output"),
        )

    def index(self, case: Case, rng: Any) -> dict[str, Any]:
        """The pages of each sequence, shuffled, and the lengths."""
        lens = lengths(case)
        return common.page_index(lens, PAGE, common.pool_pages(lens, PAGE), rng)

    def reference(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float64 attention, sequence by sequence."""
        return self._attention(case, inputs, low=False)

    def yardstick(self, case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Float32 attention with probabilities rounded to the inputs' type, rounded to the output's."""
        return self._attention(case, inputs, low=True)

    def _attention(self, case: Case, inputs: Mapping[str, Any], low: bool) -> dict[str, Any]:
        import torch

        q, table = inputs["q"], inputs["page_table"]
        shape = (*q.shape[:3], D_V)
        o = torch.empty(shape, dtype=q.dtype if low else torch.float64, device=q.device)
        for row, length in enumerate(lengths(case)):
            latent = common.gather(inputs["kv_cache"], table[row], length)[:, None]
            o[row] = common.attend(q[row], latent, latent[..., :D_V], 1 / math.sqrt(D_QK), True, low)
        return {"o": o}

    def flops(self, case: Case) -> float:
        """Two products over every token, the mask's few pairs not taken off."""
        return 2.0 * case["h"] * case["sq"] * (D_QK + D_V) * sum(lengths(case))

    def bytes(self, case: Case) -> float:
        """The latent cache of every token once."""
        return 2.0 * D_QK * sum(lengths(case))


WORKLOAD = MlaDecode()
