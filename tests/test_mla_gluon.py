"""``triton/mla_decode_gluon`` without a GPU: compiled for sm_90a, and its table of items."""

import json
import re
from itertools import pairwise

import pytest

from dsl_bench.workloads.mla_decode import WORKLOAD

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(600)

CASES = {case.name: case for case in WORKLOAD.cases()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("lag", "prefetch"), [(False, True), (True, True), (False, False)])
def test_compiles(lag: bool, prefetch: bool, compiled) -> None:
    """36 products for a tile's logits and 8 for the left sums, in two places, and 8 for the right ones; one
    wait a group; 240 registers for each half and 24 for the producer; nothing spilled."""
    from dsl_bench.kernels.triton.mla_decode_gluon import KERNEL

    case = CASES["128x4096-h128-q1-bf16"]
    config = {**KERNEL.default(case), "lag": lag, "prefetch": prefetch}
    assert KERNEL.valid(case, config) is None
    artifact, facts = compiled(KERNEL.id, KERNEL.static(case, config))
    assert facts.sass["HGMMA"] == 2 * (36 + 8) + 8
    # a group begins with one and waits are six: more would be products that wait for one another
    assert facts.sass["WARPGROUP"] <= 2 * (5 + 2) + 2 + 6
    assert (facts.spill_loads, facts.spill_stores, facts.loop_local) == (0, 0, 0)
    # addresses of loads stay in uniform registers: none is looked for lane by lane
    assert facts.sass["R2UR"] <= 64
    assert artifact.meta["smem"] <= 232448
    ptx = (artifact.folder / "kernel.ptx").read_text()
    counts = {int(n) for n in re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)}
    assert {24, 240} <= counts
    assert ("prefetch.global.L2" in ptx) == prefetch
    second = json.loads((artifact.folder / "extra0" / "kernel.json").read_text())
    assert second["launch_pdl"]
    assert "griddepcontrol.wait" in (artifact.folder / "extra0" / "kernel.ptx").read_text()


@pytest.mark.parametrize("name", list(CASES))
def test_items_are_all_tiles_once(name: str) -> None:
    """A share's items end with the one that no other follows, and all shares together have every tile."""
    from dsl_bench.kernels.triton import _attention as attention
    from dsl_bench.kernels.triton.mla_decode_gluon import KERNEL, shares

    from dsl_bench.plugin import int_list

    case = CASES[name]
    lens = int_list(str(case.params["lens"]))
    blocks = -(-case["h"] * case["sq"] // 64)
    for config in KERNEL.seeds(case):
        table = shares(attention.plan(lens, 64, 132 // blocks, config["overhead"]))
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for row in table:
            assert len(row) == len(table[0])
            used = next(i for i, item in enumerate(row) if not item[5]) + 1
            assert not any(map(any, row[used:]))
            for seq, start, end, tokens, slot, *_ in row[:used]:
                assert tokens == lens[seq]
                seen.setdefault(seq, []).append((start, end, slot))
        for seq, tokens in enumerate(lens):
            runs = sorted(seen[seq])
            assert (runs[0][0], runs[-1][1]) == (0, -(-tokens // 64))
            assert all(a[1] == b[0] for a, b in pairwise(runs))
            assert (len(runs) == 1) == (runs[0][2] < 0)
        slots = [slot for runs in seen.values() for _, _, slot in runs if slot >= 0]
        assert sorted(slots) == list(range(len(slots)))
