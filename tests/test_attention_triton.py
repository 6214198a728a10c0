"""The Triton attention kernels: compiled for sm_90a without a GPU, and run by Triton's interpreter.

The interpreter takes over every ``@triton.jit`` of its process, so it gets one of its own: this file, run as
a script with TRITON_INTERPRET=1 and the workloads' names.
"""

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dsl_bench.kernel import Kernel
from dsl_bench.workload import Case

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(600)

WORKLOADS = ("attention_prefill", "attention_decode", "mla_decode")
#: written in Gluon, which Triton's interpreter does not run
GLUON = ("triton/attention_prefill_gluon", "triton/mla_decode_gluon")
#: addresses spill with Triton 3.9 and not with 3.6
SPILLING = ("triton/mla_decode",)
#: a case each kernel is made for, and the fewest HGMMA, HMMA and UTMALDG instructions of its default
MADE_FOR = {
    "triton/attention_prefill": ("2x4096-h32-8-d128-causal-bf16", 24, 0, 8),
    "triton/attention_prefill_gluon": ("2x4096-h32-8-d128-causal-bf16", 64, 0, 4),
    "triton/attention_decode": ("64x8192-h32-8-p16-bf16", 0, 32, 0),
    "triton/mla_decode": ("128x4096-h128-q1-bf16", 52, 0, 9),
    "triton/mla_decode_gluon": ("128x4096-h128-q1-bf16", 96, 0, 10),
}


def kernels(workload: str) -> dict[str, Kernel]:
    from dsl_bench.backends.triton import BACKEND

    return {k.id: k for k in BACKEND.kernels() if k.workload == workload and k.id in MADE_FOR}


def cases(workload: str) -> dict[str, Case]:
    module = importlib.import_module(f"dsl_bench.workloads.{workload}")
    return {case.name: case for case in module.WORKLOAD.cases()}


def facts_of(compiled, kernel: Kernel, case: Case, config: dict):
    return compiled(kernel.id, kernel.static(case, config))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_spaces(workload: str) -> None:
    """Every case has a valid default; seeds are valid points of a space that a tuner can walk."""
    assert kernels(workload)
    for kernel in kernels(workload).values():
        for case in cases(workload).values():
            good = [config for config in kernel.configs() if kernel.valid(case, config) is None]
            assert 1 <= len(good) <= 60, (kernel.id, case.name, len(good))
            assert dict(kernel.default(case)) in good
            for config in kernel.seeds(case):
                assert config in good, (case.name, config)
                json.dumps(dict(kernel.static(case, config)))


@pytest.mark.parametrize("kernel_id", sorted(MADE_FOR))
def test_default_compiles(kernel_id: str, compiled) -> None:
    workload = next(w for w in WORKLOADS if kernel_id in kernels(w))
    kernel = kernels(workload)[kernel_id]
    name, hgmma, hmma, loads = MADE_FOR[kernel_id]
    case = cases(workload)[name]
    artifact, facts = facts_of(compiled, kernel, case, dict(kernel.default(case)))
    assert facts.sass.get("HGMMA", 0) >= hgmma
    assert facts.sass.get("HMMA", 0) >= hmma
    assert facts.sass.get("UTMALDG", 0) >= loads
    assert artifact.meta["smem"] <= 232448
    if kernel_id not in SPILLING:
        assert facts.loop_local == 0
    # an assembler that lets every wgmma wait for the one before puts an arrival and a wait around each
    assert facts.sass.get("WARPGROUP", 0) <= max(1, facts.sass.get("HGMMA", 0) // 2)


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 256])
def test_prefill_tiles(size: int, compiled) -> None:
    """The other head sizes: no spills, products in flight, and shared memory as estimated."""
    from dsl_bench.kernels.triton import attention_prefill as module

    case = next(c for c in cases("attention_prefill").values() if c["d"] == size and "smoke" not in c.groups)
    for config in module.KERNEL.seeds(case):
        artifact, facts = facts_of(compiled, module.KERNEL, case, dict(config))
        assert facts.loop_local == 0, config
        assert facts.sass["WARPGROUP"] <= facts.sass["HGMMA"] // 2, config
        assert artifact.meta["smem"] <= module._smem(case, config)


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_decode_seeds(compiled) -> None:
    """No spills, and as many tiles in flight as the estimate of shared memory says."""
    from dsl_bench.kernels.triton import attention_decode as module

    for name in ("64x8192-h32-8-p16-bf16", "16x32768-h64-8-p64-bf16"):
        case = cases("attention_decode")[name]
        for config in module.KERNEL.seeds(case):
            artifact, facts = facts_of(compiled, module.KERNEL, case, dict(config))
            assert facts.loop_local == 0, config
            estimate = module._smem(case, config)
            assert estimate - 4096 <= artifact.meta["smem"] <= estimate, config


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_mla_tiles(compiled) -> None:
    """Every tile for 16, 32 and 64 rows."""
    from dsl_bench.kernels.triton import mla_decode as module

    for heads in (16, 32, 64):
        case = cases("mla_decode")[f"64x4096-h{heads}-q1-bf16"]
        for config in module.KERNEL.seeds(case):
            artifact, facts = facts_of(compiled, module.KERNEL, case, dict(config))
            assert facts.loop_local == 0 or heads == 64, config
            assert artifact.meta["smem"] <= 232448
            assert facts.sass.get("WARPGROUP", 0) <= facts.sass.get("HGMMA", 0) // 2


LENGTHS = (
    (1,),
    (8192,) * 64,
    (1024,) * 256,
    (0, 1, 0, 63, 64, 65, 0),
    (65536, *(1024,) * 31),
    (0, 0, 5),
    (3, 0, 0),
    tuple(2000 + 37 * ((29 * i) % 128) for i in range(128)),
)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("shares", "overhead"), [(1, 1), (16, 1), (33, 2), (132, 5)])
def test_plan(lengths: tuple[int, ...], shares: int, overhead: int) -> None:
    """Every tile once, each sequence's in order, parts of cut ones in slots of their own, shares even."""
    from dsl_bench.kernels.triton._attention import plan

    p = plan(lengths, 64, shares, overhead)
    assert p.first[0] == 0
    assert p.first[-1] == len(p.items)
    assert all(a < b for a, b in itertools.pairwise(p.first)), "a share without work"
    assert p.shares <= shares
    seen: dict[int, list[tuple[int, int]]] = {}
    slots = []
    for seq, begin, end, tokens, slot, cut, first_slot, count in p.items:
        assert tokens == lengths[seq]
        seen.setdefault(seq, []).append((begin, end))
        if slot >= 0:
            assert p.cuts[cut] == (seq, first_slot, count)
            assert first_slot <= slot < first_slot + count
            slots.append(slot)
        else:
            assert (begin, end) == (0, -(-tokens // 64))
    assert sorted(slots) == list(range(p.slots))
    for seq, tokens in enumerate(lengths):
        runs = seen[seq]
        assert runs[0][0] == 0
        assert runs[-1][1] == -(-tokens // 64)
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(runs))
    costs = [sum(i[2] - i[1] + overhead for i in p.items[a:b]) for a, b in itertools.pairwise(p.first)]
    total = sum(-(-n // 64) + overhead for n in lengths)
    assert max(costs) <= -(-total // shares) + 2 * overhead + 1


@pytest.mark.parametrize("lengths", LENGTHS[:6])
@pytest.mark.parametrize("causal", [True, False])
def test_deal(lengths: tuple[int, ...], causal: bool) -> None:
    """Every tile of every head once, and no block that works much longer than the mean."""
    from dsl_bench.kernels.triton._attention_gluon import deal

    lists = deal(lengths[:8], 4, 128, causal, 132)
    starts = list(itertools.accumulate(lengths[:8], initial=0))
    tiles = {
        (s, n, row, h)
        for s, n in zip(starts, lengths[:8], strict=False)
        for row in range(0, n, 128)
        for h in range(4)
    }
    dealt = [tile for some in lists for tile in some]
    assert len(dealt) == len(tiles)
    assert set(dealt) == tiles
    assert all(lists)
    cost = [sum(-(-(min(n, r + 128) if causal else n) // 128) + 1.5 for _, n, r, _ in some) for some in lists]
    largest = max(-(-n // 128) + 1.5 for n in lengths[:8])
    assert max(cost) <= sum(cost) / len(cost) + largest


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_interpreter(workload: str) -> None:
    """Every form on the smoke cases, the default on the edge cases, fp16 against float64."""
    from dsl_bench.backends.triton import BACKEND

    got = BACKEND.probe("interpret")
    if not got.ready:
        pytest.skip(got.reason)
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__, workload], env=env, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert {r["kernel"] for r in results} == set(kernels(workload)) - set(GLUON)
    for r in results:
        first, *again = r["errors"]
        assert first <= 1.1, r
        assert all(e == first for e in again), f"not the same twice: {r}"


def _forms(kernel: Kernel, case: Case) -> list[dict]:
    """The default and one valid config for every value of every axis."""
    default = dict(kernel.default(case))
    found = [default]
    for config in kernel.configs():
        new = any(all(config[k] != c[k] for c in found) for k in config)
        if new and kernel.valid(case, config) is None:
            found.append(config)
    return found


def interpret(kernel: Kernel, case: Case, config: dict, sms: int, runs: int) -> dict:
    """RMS errors of one binding's runs, as multiples of the yardstick's."""
    import numpy as np
    import torch

    from dsl_bench.backends.triton import BACKEND

    workload = importlib.import_module(f"dsl_bench.workloads.{case.workload}").WORKLOAD
    torch.manual_seed(0)
    types = {"fp16": torch.float16, "int32": torch.int32}
    specs = {s.name: s for s in workload.specs(case)}
    index = workload.index(case, np.random.default_rng(1))
    inputs = {
        name: torch.from_numpy(index[name]) if name in index else torch.randn(s.shape).to(types[s.dtype])
        for name, s in specs.items()
        if s.role != "output"
    }
    outputs = {
        n: torch.full(s.shape, math.nan, dtype=types[s.dtype]) for n, s in specs.items() if s.role == "output"
    }
    static = json.loads(json.dumps(dict(kernel.static(case, config))))
    module = BACKEND.interpret(kernel.source(static, "sm_90a"))
    module.sms = sms
    call = kernel.bind(module, case, config, inputs, outputs)
    exact = workload.reference(case, inputs)["o"]
    yard = (workload.yardstick(case, inputs)["o"].double() - exact).norm()
    errors = []
    for _ in range(runs):
        outputs["o"].fill_(math.nan)
        call.run()
        error = float((outputs["o"].double() - exact).norm())
        errors.append(error / float(yard) if yard else 1.0 + error)
    return {"kernel": kernel.id, "case": case.name, "config": config, "sms": sms, "errors": errors}


def _all(workload: str) -> Iterator[dict]:
    """Every form on the smoke cases with few and many shares, twice; the default on the edge cases, in fp16:
    once, they are many times larger."""
    for kernel in kernels(workload).values():
        if kernel.id in GLUON:
            continue
        for case in cases(workload).values():
            if "smoke" in case.groups:
                for i, config in enumerate(_forms(kernel, case)):
                    yield interpret(kernel, case, config, (4, 40, 13)[i % 3], runs=2)
            elif "edge" in case.groups:
                small = replace(case, dtype="fp16")
                yield interpret(kernel, small, dict(kernel.default(small)), 24, runs=1)


def main() -> None:
    """Interpret the kernels of the workloads that are named; prints the results as JSON."""
    json.dump([r for workload in sys.argv[1:] for r in _all(workload)], sys.stdout)


if __name__ == "__main__":
    main()
