"""FlashInfer as a baseline of the attention workloads: plans are made in ``bind``, ``run()`` is one call.

Its kernels are compiled on first use unless the package brings them prebuilt (``flashinfer/data/aot``,
``flashinfer-jit-cache``). The plan's workspace is the library's own business and lies outside the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from dsl_bench.backends._baseline import Library, baseline
from dsl_bench.plugin import Call, Case, Config, KernelFault, int_list

#: bytes of scratch that the library asks its users for
WORKSPACE = 256 << 20
HOPPER = ("sm_90a",)


@cache
def _workspace(device: Any, kind: str) -> Any:
    """Scratch for the partial results of one call; calls follow each other on a stream, so all share it."""
    import torch

    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def _lengths(case: Case) -> tuple[int, ...]:
    return int_list(str(case.params["lens"]))


def _torch_type(case: Case) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]


# -- prefill ---------------------------------------------------------------------------------------------


def _bind_prefill(backend: str) -> Any:
    def bind(
        module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> Call:
        """The ragged-batch wrapper, planned for this batch."""
        from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

        q, k, v, o = inputs["q"], inputs["k"], inputs["v"], outputs["o"]
        bounds = inputs["cu_seqlens"]
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(q.device, "prefill"), "NHD", backend=backend
        )
        wrapper.plan(
            bounds,
            bounds,
            case["hq"],
            case["hkv"],
            case["d"],
            causal=bool(case["causal"]),
            sm_scale=1 / math.sqrt(case["d"]),
            q_data_type=_torch_type(case),
            kv_data_type=_torch_type(case),
        )

        def run() -> None:
            wrapper.run(q, k, v, out=o)

        return Call(run, keep=(wrapper, bounds))

    return bind


def _where_fa3_cannot(case: Case, config: Config) -> str | None:
    """Its Hopper sibling does these head sizes, and faster; at 128 both race, for short sequences' sake."""
    return None if case["d"] == 128 else f"head size {case['d']} is the Hopper kernel's"


def _bind_single(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The call for a single sequence, which returns its own output."""
    from flashinfer.prefill import single_prefill_with_kv_cache

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    causal, scale = bool(case["causal"]), 1 / math.sqrt(case["d"])

    def run() -> dict[str, Any]:
        o = single_prefill_with_kv_cache(q, k, v, causal=causal, sm_scale=scale, backend="fa3")
        return {"o": o}

    return Call(run, allocates=True)


def _single_only(case: Case, config: Config) -> str | None:
    count = len(_lengths(case))
    return None if count == 1 else f"a single sequence only, this batch has {count}"


# -- decode ----------------------------------------------------------------------------------------------


def _page_lists(inputs: Mapping[str, Any], case: Case, page: int) -> tuple[Any, Any, Any]:
    """Bounds of each sequence's pages, the pages one after the other, and the tokens of the last of each."""
    import torch

    lens = _lengths(case)
    counts = [-(-n // page) for n in lens]
    bounds = torch.zeros(len(lens) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(counts).cumsum(0)
    table = inputs["page_table"].cpu()
    pages = torch.cat([table[row, :count] for row, count in enumerate(counts)])
    last = [n - (count - 1) * page if count else 0 for n, count in zip(lens, counts, strict=True)]
    return bounds, pages.to(inputs["page_table"].device), torch.tensor(last, dtype=torch.int32)


def _bind_decode(tensor_cores: bool) -> Any:
    def bind(
        module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> Call:
        """The paged decode wrapper, planned for this batch."""
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        q, o = inputs["q"], outputs["o"]
        cache = (inputs["k_cache"], inputs["v_cache"])
        bounds, pages, last = _page_lists(inputs, case, case["page"])
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            _workspace(q.device, "decode"), "NHD", use_tensor_cores=tensor_cores, backend="auto"
        )
        wrapper.plan(
            bounds,
            pages,
            last,
            case["hq"],
            case["hkv"],
            case["d"],
            case["page"],
            sm_scale=1 / math.sqrt(case["d"]),
            q_data_type=_torch_type(case),
            kv_data_type=_torch_type(case),
        )

        def run() -> None:
            wrapper.run(q, cache, out=o)

        return Call(run, keep=(wrapper, cache, bounds, pages, last))

    return bind


def _bind_xqa(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """XQA, which takes the page table as it is."""
    import torch
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    q, o = inputs["q"], outputs["o"]
    cache = (inputs["k_cache"], inputs["v_cache"])
    table, lengths = inputs["page_table"], inputs["lengths"].to(torch.uint32)
    longest, scale = max(_lengths(case)), 1 / math.sqrt(case["d"])
    scratch = _workspace(q.device, "xqa")

    def run() -> None:
        xqa_batch_decode_with_kv_cache(q, cache, scratch, table, lengths, longest, bmm1_scale=scale, out=o)

    return Call(run, keep=(cache, table, lengths))


# -- MLA -------------------------------------------------------------------------------------------------


def _bind_mla(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """The paged MLA wrapper on views of the joint cache: 512 latent and 64 rotary components."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    q, cache, o = inputs["q"].flatten(0, 1), inputs["kv_cache"], outputs["o"].flatten(0, 1)
    latent, page, sq = outputs["o"].shape[-1], cache.shape[1], case["sq"]
    rows = len(_lengths(case))
    bounds, pages, _ = _page_lists(inputs, case, page)
    queries = torch.arange(0, (rows + 1) * sq, sq, dtype=torch.int32, device=q.device)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(q.device, "mla"), backend="fa3")
    wrapper.plan(
        queries,
        bounds.to(q.device),
        pages,
        inputs["lengths"],
        case["h"],
        latent,
        q.shape[-1] - latent,
        page,
        True,
        1 / math.sqrt(q.shape[-1]),
        _torch_type(case),
        _torch_type(case),
    )
    parts = (q[..., :latent], q[..., latent:], cache[..., :latent], cache[..., latent:])

    def run() -> None:
        wrapper.run(*parts, out=o)

    return Call(run, keep=(wrapper, pages, queries))


def _needs_tokens(case: Case, config: Config) -> str | None:
    return "an empty sequence is out of its contract" if 0 in _lengths(case) else None


class FlashInfer(Library):
    """FlashInfer, as installed."""

    name = "flashinfer"
    package = "flashinfer-python"
    module = "flashinfer"
    install = "pip install 'dsl-bench[vendor]'"
    offers = (
        baseline(
            "flashinfer/prefill-fa3",
            "attention_prefill",
            _bind_prefill("fa3"),
            "ragged batch prefill, Hopper kernel",
            archs=HOPPER,
        ),
        baseline(
            "flashinfer/prefill-fa2",
            "attention_prefill",
            _bind_prefill("fa2"),
            "ragged batch prefill, Ampere kernel",
            _where_fa3_cannot,
        ),
        baseline(
            "flashinfer/prefill-single",
            "attention_prefill",
            _bind_single,
            "prefill of a single sequence, Hopper kernel",
            _single_only,
            HOPPER,
        ),
        baseline(
            "flashinfer/decode-tc",
            "attention_decode",
            _bind_decode(True),
            "paged decode on tensor cores",
        ),
        baseline(
            "flashinfer/decode-cores",
            "attention_decode",
            _bind_decode(False),
            "paged decode on CUDA cores",
        ),
        baseline("flashinfer/decode-xqa", "attention_decode", _bind_xqa, "XQA decode", _needs_tokens),
        baseline("flashinfer/mla-fa3", "mla_decode", _bind_mla, "paged MLA, Hopper kernel", archs=HOPPER),
    )

    def load(self, artifact: Any) -> Any:
        """The library itself, so that a broken installation is told once."""
        try:
            import flashinfer
        except Exception as fault:
            raise KernelFault("unavailable", f"flashinfer does not import: {fault}", "import") from fault
        return flashinfer


BACKEND = FlashInfer()
