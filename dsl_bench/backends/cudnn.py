"""cuDNN's attention through torch's scaled_dot_product_attention, where all sequences have one length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsl_bench.backends._baseline import Library, baseline, version
from dsl_bench.plugin import Call, Case, Config, KernelFault, int_list


def _bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """torch's call with every other kernel switched off; inputs are views, and so must the output be."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows = len(int_list(str(case.params["lens"])))
    q, k, v = (
        inputs[name].view(rows, -1, *inputs[name].shape[1:]).transpose(1, 2) for name in ("q", "k", "v")
    )
    shape, causal, scale = outputs["o"].shape, bool(case["causal"]), 1 / math.sqrt(case["d"])
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> dict[str, Any]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        return {"o": o.transpose(1, 2).view(shape)}

    try:
        run()
    except RuntimeError as fault:
        raise KernelFault("launch_error", f"cuDNN refuses {case.name}: {fault}", "bind") from fault
    return Call(run, allocates=True)


def _valid(case: Case, config: Config) -> str | None:
    lens = set(int_list(str(case.params["lens"])))
    if len(lens) > 1:
        return "torch's call takes sequences of one length only"
    return "torch offers no cuDNN kernel for a single token" if lens == {1} else None


class Cudnn(Library):
    """cuDNN, as torch brings it."""

    name = "cudnn"
    package = "torch"
    module = "torch"
    install = "pip install torch (with CUDA)"
    offers = (baseline("cudnn/sdpa", "attention_prefill", _bind, "torch's SDPA on cuDNN alone", _valid),)

    def versions(self) -> dict[str, str]:
        """cuDNN's version as torch loads it, and torch's."""
        import torch

        number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return {"cudnn": str(number or "none"), "torch": version("torch")}


BACKEND = Cudnn()
