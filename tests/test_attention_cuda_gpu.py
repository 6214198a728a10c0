"""CUDA attention of prompts on a device. Run with ``-m gpu``.

In the order in which a broken kernel is taken apart: the second product alone (all probabilities equal), the
first alone (one key takes all), then whole cases against the reference.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from dsl_bench.kernels.cuda.attention_prefill import KERNELS, TILES

from dsl_bench import check
from dsl_bench.backends.cuda import BACKEND
from dsl_bench.plugin import Case
from dsl_bench.workloads.attention_prefill import WORKLOAD

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

(KERNEL,) = KERNELS
FORMS = [(d, tile) for d, tiles in TILES.items() for tile in tiles]
EDGES = [case for case in WORKLOAD.cases() if {"smoke", "edge"} & set(case.groups)]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of a specialisation, compiled once."""
    made: dict[Any, Any] = {}

    def get(case: Case, config: Any) -> Any:
        static = KERNEL.static(case, config)
        key = tuple(sorted(static.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("build")
            made[key] = BACKEND.load(BACKEND.compile(KERNEL.source(static, "sm_90a"), "sm_90a", folder))
        return made[key]

    return get


def own_case(lens: str, d: int, causal: int) -> Case:
    return WORKLOAD.parse_case({"lens": lens, "heads": "4/2", "d": str(d), "causal": str(causal)})


def tensors(case: Case, kind: str = "normal") -> tuple[dict[str, Any], dict[str, Any]]:
    """Drawn inputs and the poisoned output of a case."""
    generator = torch.Generator("cuda").manual_seed(1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    inputs, outputs = {}, {}
    for spec in WORKLOAD.specs(case):
        if spec.role == "index":
            continue
        tensor = torch.empty(spec.shape, dtype=dtype, device="cuda")
        if spec.role == "output":
            outputs[spec.name] = tensor
        else:
            check.draw(tensor, kind, generator)
            inputs[spec.name] = tensor
    check.poison(outputs)
    return inputs, outputs


def usual(case: Case, tile: str) -> dict[str, Any]:
    """The default with another tile; chained where that can be."""
    config = {**KERNEL.default(case), "tile": tile, "chain": 1}
    return config if KERNEL.valid(case, config) is None else {**config, "chain": 0}


def run(load: Any, case: Case, config: Any, inputs: Any, outputs: Any, times: int = 1) -> Any:
    call = KERNEL.bind(load(case, config), case, config, inputs, outputs)
    for _ in range(times):
        call.run()
    torch.cuda.synchronize()
    return outputs["o"]


@pytest.mark.parametrize(("d", "tile"), FORMS)
def test_equal_probabilities_give_the_mean_of_the_values(load: Any, d: int, tile: str) -> None:
    case = own_case("16+300", d, 0)
    config = usual(case, tile)
    inputs, outputs = tensors(case)
    inputs["q"].zero_()
    # the value of a token and column is told by either alone
    token = torch.arange(316, device="cuda")[:, None, None] % 32
    inputs["v"].copy_(token + torch.arange(d, device="cuda")[None, None, :] / 2)
    got = run(load, case, config, inputs, outputs).double()
    v = inputs["v"].double().repeat_interleave(2, dim=1)
    for start, stop in ((0, 16), (16, 316)):
        expected = v[start:stop].mean(dim=0, keepdim=True)
        assert (got[start:stop] - expected).abs().max() < 1.0


@pytest.mark.parametrize(("d", "tile"), FORMS)
def test_one_key_that_takes_all_gives_its_value(load: Any, d: int, tile: str) -> None:
    case = own_case("256", d, 0)
    config = usual(case, tile)
    inputs, outputs = tensors(case)
    # query i points at key 255 - i, whose direction is a code of ±1 that no other key has
    signs = torch.randint(0, 2, (256, 1, d), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    code = signs.double() * 2 - 1
    inputs["k"].copy_(code * math.sqrt(math.sqrt(d) * 40 / d))
    inputs["q"].copy_(inputs["k"].flip(0)[:, :1] * 4)
    got = run(load, case, config, inputs, outputs).double()
    expected = inputs["v"].double().flip(0).repeat_interleave(2, dim=1)
    assert (got - expected).abs().max() < 0.02


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("case", EDGES, ids=lambda c: c.name)
def test_small_cases_are_right(load: Any, case: Case, schedule: str) -> None:
    for tile in TILES[case["d"]]:
        for change in ({}, {"pingpong": 0}, {"chain": 0}):
            config = {**usual(case, tile), "schedule": schedule, **change}
            if KERNEL.valid(case, config):
                continue
            inputs, outputs = tensors(case)
            before = check.fingerprint(inputs)
            reference = WORKLOAD.reference(case, inputs)
            yard = check.measure(reference, WORKLOAD.yardstick(case, inputs), "normal")
            run(load, case, config, inputs, outputs, times=3)
            check.verify(WORKLOAD, case, reference, outputs, inputs, before, "normal", vendor=yard)


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [1, 0])
def test_longer_batches_are_right(load: Any, d: int, causal: int, kind: str) -> None:
    case = WORKLOAD.parse_case(
        {"lens": "2049+700*3+1+4096", "heads": "8/2", "d": str(d), "causal": str(causal)}
    )
    for tile in TILES[d]:
        for order in ("longest", "groups"):
            config = {**usual(case, tile), "order": order}
            inputs, outputs = tensors(case, kind)
            before = check.fingerprint(inputs)
            reference = WORKLOAD.reference(case, inputs)
            yard = check.measure(reference, WORKLOAD.yardstick(case, inputs), kind)
            run(load, case, config, inputs, outputs, times=2)
            check.verify(WORKLOAD, case, reference, outputs, inputs, before, kind, vendor=yard)
