"""``triton/mla_decode_gluon`` compiled for sm_90a without a GPU: its roles, registers and products."""

import json
import re
from pathlib import Path

import pytest

from dsl_bench.workloads.mla_decode import WORKLOAD

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(600)

CASES = {case.name: case for case in WORKLOAD.cases()}


@pytest.mark.parametrize("early", [True, False])
def test_compiles(early: bool, tmp_path: Path) -> None:
    """36 products for a tile's logits and 8 for a consumer's sums, one wait a group; 240 registers for each
    consumer and 24 for the producer; what is spilled are addresses."""
    from dsl_bench.kernels.triton.mla_decode_gluon import KERNEL

    from dsl_bench.backends.triton import BACKEND
    from dsl_bench.plugin import cubin_facts

    case = CASES["128x4096-h128-q1-bf16"]
    config = {**KERNEL.default(case), "early": early}
    assert KERNEL.valid(case, config) is None
    static = json.loads(json.dumps(dict(KERNEL.static(case, config))))
    artifact = BACKEND.compile(KERNEL.source(static, "sm_90a"), "sm_90a", tmp_path / "a")
    facts = cubin_facts(artifact.folder / artifact.cubin, artifact.entry)
    # a consumer multiplies queries and keys in two places, weights and values in four
    assert facts.sass["HGMMA"] == 2 * (2 * 36 + 4 * 8)
    assert facts.sass["WARPGROUP"] <= facts.sass["HGMMA"] // 4
    assert facts.loop_local <= 320
    assert artifact.meta["smem"] <= 232448
    ptx = (artifact.folder / "kernel.ptx").read_text()
    counts = {int(n) for n in re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)}
    assert {24, 240} <= counts
