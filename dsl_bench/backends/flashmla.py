"""FlashMLA's dense decode for Hopper as a baseline of MLA, its combine kernel inside the clock.

The wheel on the index is ``sgl-flash-mla``; it asks for a newer torch than it needs, hence ``--no-deps``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsl_bench.backends._baseline import Library, baseline
from dsl_bench.plugin import Call, Case, Config, int_list


def _bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """One eager call fills the scheduler's metadata, which later calls of the same lengths reuse."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    q, cache = inputs["q"], inputs["kv_cache"].unsqueeze(2)
    table, lengths = inputs["page_table"], inputs["lengths"]
    latent = outputs["o"].shape[-1]
    plan, _ = get_mla_metadata()
    scale, causal = 1 / math.sqrt(q.shape[-1]), case["sq"] > 1

    def run() -> dict[str, Any]:
        o, _ = flash_mla_with_kvcache(
            q, cache, table, lengths, latent, plan, softmax_scale=scale, causal=causal, use_legacy=True
        )
        return {"o": o}

    run()
    return Call(run, allocates=True, keep=(plan,))


def _valid(case: Case, config: Config) -> str | None:
    if case.dtype not in ("bf16", "fp16"):
        return f"{case.dtype} is not supported"
    if 0 in int_list(str(case.params["lens"])):
        return "an empty sequence is out of its contract"
    return None


class FlashMla(Library):
    """FlashMLA, as installed."""

    name = "flashmla"
    package = "sgl-flash-mla"
    module = "flash_mla"
    install = "pip install --no-deps sgl-flash-mla"
    offers = (
        baseline(
            "flashmla/dense",
            "mla_decode",
            _bind,
            "dense decode for Hopper, combine included",
            _valid,
            ("sm_90a",),
        ),
    )


BACKEND = FlashMla()
