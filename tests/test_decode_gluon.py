"""``triton/attention_decode_gluon`` without a GPU: what the compiler makes of it, how sequences are cut."""

import pytest

from dsl_bench.workload import Case
from dsl_bench.workloads.attention_decode import MIXED, ONE_LONG, UNEVEN, WORKLOAD

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(600)

CASES = {case.name: case for case in WORKLOAD.cases()}


def kernel():
    from dsl_bench.kernels.triton.attention_decode_gluon import KERNEL

    return KERNEL


def facts_of(compiled, case: Case, config: dict):
    return compiled(kernel().id, kernel().static(case, config))


def test_space() -> None:
    """Every case has a valid default; seeds are valid points of a small space."""
    for case in CASES.values():
        good = [config for config in kernel().configs() if kernel().valid(case, config) is None]
        assert 1 <= len(good) <= 60, (case.name, len(good))
        assert dict(kernel().default(case)) in good
        for config in kernel().seeds(case):
            assert config in good, (case.name, config)


def test_default_compiles(compiled) -> None:
    """16-byte asynchronous copies, 16 products a warp and tile for either operand, and nothing spilled."""
    case = CASES["1x8192-h32-8-p16-bf16"]
    config = dict(kernel().default(case))
    artifact, facts = facts_of(compiled, case, config)
    assert facts.sass["HMMA"] == 32
    assert facts.sass["LDSM"] == 16
    assert facts.sass["LDGSTS"] == 16 * (config["stages"] + 1)
    assert (facts.stack, facts.spill_stores, facts.spill_loads) == (0, 0, 0)
    # the warps' sums lie in what was the ring
    assert artifact.meta["smem"] == config["stages"] * config["warps"] * 16 * 128 * 4


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["1x8192-h32-8-p16-bf16", "16x32768-h64-8-p64-bf16", "32x4096-h32-32-p16-bf16"]
)
def test_seeds_compile(name: str, compiled) -> None:
    """As many blocks fit on an SM as a config says, without spills."""
    for config in kernel().seeds(CASES[name]):
        artifact, facts = facts_of(compiled, CASES[name], dict(config))
        assert (facts.spill_stores, facts.spill_loads) == (0, 0), config
        assert facts.registers * 32 * config["warps"] * config["blocks"] <= 65536, config
        assert (artifact.meta["smem"] + 1024) * config["blocks"] <= 233472, config


@pytest.mark.parametrize(
    "lengths",
    [
        (1,),
        (0,),
        (0, 0, 5),
        (1024,),
        (8192,),
        (32768,),
        (8192,) * 4,
        (8192,) * 64,
        ONE_LONG,
        MIXED,
        UNEVEN,
    ],
)
@pytest.mark.parametrize(("tile", "blocks"), [(64, 33), (128, 16), (64, 16), (64, 1)])
def test_pieces(lengths: tuple[int, ...], tile: int, blocks: int) -> None:
    """Every tile once, in slots of their own, pieces of a sequence even and the slots' work too."""
    from dsl_bench.kernels.triton.attention_decode_gluon import pieces

    plan = pieces(lengths, tile, blocks)
    seen: dict[int, list[tuple[int, int]]] = {}
    slots = []
    for seq, begin, end, tokens, slot, cut, first, count in plan.items:
        assert tokens == lengths[seq]
        seen.setdefault(seq, []).append((begin, end))
        if slot >= 0:
            assert plan.cuts[cut] == (seq, first, count)
            assert first <= slot < first + count
            assert begin < end
            slots.append(slot)
        else:
            assert count == 1
    assert sorted(slots) == list(range(plan.slots))
    for seq, tokens in enumerate(lengths):
        at = 0
        for begin, end in sorted(seen[seq]):
            assert begin == at
            at = end
        assert at == -(-tokens // tile)
        sizes = [end - begin for begin, end in seen[seq]]
        assert max(sizes) - min(sizes) <= 1
    if lengths == (8192,) and (tile, blocks) == (64, 33):
        assert len(plan.items) == 32
