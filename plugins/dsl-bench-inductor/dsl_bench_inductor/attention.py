"""Attention: prefill by flex_attention, the decode workloads in plain operators that Inductor fuses.

Every query head reads its KV head; scores and sums are in float32. Tensors are those of the workloads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsl_bench.plugin import Call, Case, Config, Kernel, int_list
from dsl_bench_inductor.gemm import no_source, whole_case

#: bytes that intermediates of a decode step may take
MOST_SCRATCH = 16 << 30
VALUE = 512


def prefill(o: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> None:
    """softmax(scale · q·kᵀ)·v of all sequences as one of ``tokens``, of which ``mask`` keeps the pairs."""
    from torch.nn.attention.flex_attention import flex_attention

    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    found = flex_attention(*heads, block_mask=mask, scale=scale, enable_gqa=True)
    o.copy_(found[0].transpose(0, 1))


def decode(o: Any, q: Any, k_cache: Any, v_cache: Any, table: Any, lengths: Any, scale: float) -> None:
    """One query token a sequence: products on the CUDA cores, which Inductor fuses with reading the pages."""
    import torch

    b, hq, d = q.shape
    hkv = k_cache.shape[2]
    k, v = (cache[table].flatten(1, 2)[:, :, :, None].float() for cache in (k_cache, v_cache))
    scores = (q.view(b, 1, hkv, hq // hkv, d).float() * k).sum(-1) * scale
    seen = torch.arange(k.shape[1], device=q.device)[None, :] < lengths[:, None]
    weights = _softmax(scores, seen[:, :, None, None], 1)
    o.copy_((weights[..., None] * v).sum(1).view(b, hq, d))


def mla(o: Any, q: Any, cache: Any, table: Any, lengths: Any, scale: float) -> None:
    """A few query tokens a sequence, all heads on one latent cache: two batched products."""
    import torch

    b, sq, h, _ = q.shape
    latent = cache[table].flatten(1, 2)
    rows, keys = q.flatten(1, 2), latent.transpose(1, 2)
    # rounded scores would cost the result its accuracy; float32 inputs (on the CPU) need not say so
    wide = {} if q.dtype == torch.float32 else {"out_dtype": torch.float32}
    scores = torch.bmm(rows, keys, **wide) * scale
    last = lengths[:, None] - sq + torch.arange(sq, device=q.device)[None, :]
    place = torch.arange(latent.shape[1], device=q.device)
    seen = (place[None, None, :] <= last[:, :, None]).repeat_interleave(h, 1)
    weights = _softmax(scores, seen, 2).to(q.dtype)
    o.copy_(torch.bmm(weights, latent[:, :, :VALUE]).view(b, sq, h, VALUE))


def _softmax(scores: Any, seen: Any, dim: int) -> Any:
    """Over what is seen; zeros where nothing is."""
    top = scores.masked_fill(~seen, -1e30).amax(dim, keepdim=True)
    weights = (scores - top).exp().masked_fill(~seen, 0.0)
    return weights / weights.sum(dim, keepdim=True).clamp_min(1e-30)


def _document_mask(case: Case, bounds: Any) -> Any:
    """The block mask of a ragged batch: a token sees those of its own sequence, causally or all."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = int(bounds[-1])
    places = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
    owner = torch.searchsorted(bounds, places, right=True)
    causal = bool(case["causal"])

    def kept(batch: Any, head: Any, query: Any, key: Any) -> Any:
        same = owner[query] == owner[key]
        return same & (query >= key) if causal else same

    return create_block_mask(kept, None, None, tokens, tokens, device=bounds.device)


def _bind_prefill(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    if "mask" not in module.kept:
        # the bounds belong to the case: every buffer set has the same
        module.kept["mask"] = _document_mask(case, inputs["cu_seqlens"])
    mask, scale = module.kept["mask"], 1 / math.sqrt(case["d"])
    return Call(module.call(prefill, outputs["o"], inputs["q"], inputs["k"], inputs["v"], mask, scale))


def _bind_decode(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    names = ("q", "k_cache", "v_cache", "page_table", "lengths")
    scale = 1 / math.sqrt(case["d"])
    return Call(module.call(decode, outputs["o"], *(inputs[n] for n in names), scale))


def _bind_mla(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    q, cache = inputs["q"], inputs["kv_cache"]
    scale = 1 / math.sqrt(q.shape[-1])
    return Call(module.call(mla, outputs["o"], q, cache, inputs["page_table"], inputs["lengths"], scale))


def _padded(case: Case) -> int:
    """Tokens of the batch with all sequences as long as the longest: plain tensors are not ragged."""
    lengths = int_list(str(case.params["lens"]))
    return len(lengths) * max(lengths)


def _scratch_reason(nbytes: int) -> str | None:
    if nbytes <= MOST_SCRATCH:
        return None
    return (
        f"the padded batch takes {nbytes / 2**30:.0f} GiB beside the tensors, more than {MOST_SCRATCH >> 30}"
    )


def _valid_decode(case: Case, config: Config) -> str | None:
    """Scores and weights in float32; and, should Inductor not fuse them, both caches by sequence."""
    each = 2 * 4 * case["hq"] + 2 * 2 * case["hkv"] * case["d"]
    return _scratch_reason(_padded(case) * each)


def _valid_mla(case: Case, config: Config) -> str | None:
    """Scores and weights, and the latent cache by sequence."""
    return _scratch_reason(_padded(case) * (6 * case["h"] * case["sq"] + 2 * 576))


def _kernel(workload: str, bind: Any, summary: str, valid: Any = None) -> Kernel:
    return Kernel(
        id=f"inductor/{workload}",
        workload=workload,
        space={},
        default=lambda case: {},
        valid=valid or (lambda case, config: None),
        static=whole_case,
        source=no_source,
        bind=bind,
        files=("attention.py", "compiler.py"),
        summary=summary,
    )


KERNELS = (
    _kernel("attention_prefill", _bind_prefill, "flex_attention with a block mask of the sequences"),
    _kernel("attention_decode", _bind_decode, "pages gathered, products and sums fused", _valid_decode),
    _kernel("mla_decode", _bind_mla, "pages gathered, two batched products", _valid_mla),
)
