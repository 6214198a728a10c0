"""CUDA attention of prompts without a GPU: what nvcc makes of it, tiles, masks, layouts."""

import random
import struct

import numpy as np
import pytest
from dsl_bench.kernels.cuda import _tma
from dsl_bench.kernels.cuda import attention_prefill as prefill

from dsl_bench.backends.cuda import BACKEND
from dsl_bench.codegen import cubin_facts, sass
from dsl_bench.plugin import Case
from dsl_bench.workloads.attention_prefill import WORKLOAD

(KERNEL,) = prefill.KERNELS
CASES = {case.name: case for case in WORKLOAD.cases()}
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129, 175, 176, 177, 300, 513)


def case_of(lens, d=128, causal=1, heads=(4, 2), dtype="bf16"):
    params = {"lens": "+".join(map(str, lens)), "hq": heads[0], "hkv": heads[1], "d": d, "causal": causal}
    return Case("attention_prefill", "own", params, dtype)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compiles a specialisation; the artifact and its facts."""
    state = BACKEND.probe("compile")
    if not state.ready:
        pytest.skip(f"{state.reason} ({state.hint})")

    def get(case, config):
        folder = tmp_path_factory.mktemp("build")
        artifact = BACKEND.compile(KERNEL.source(KERNEL.static(case, config), "sm_90a"), "sm_90a", folder)
        return artifact, cubin_facts(folder / artifact.cubin, artifact.entry)

    return get


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", [1, 0])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_spills_and_the_products_stay_asynchronous(build, d, causal):
    case = case_of((300,), d, causal)
    config = dict(KERNEL.default(case))
    artifact, facts = build(case, config)
    assert artifact.meta["advisories"] == []  # C7510 and the like: wgmma serialised
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert artifact.meta["registers"] * artifact.meta["threads"] <= 65536
    bn = prefill.parse_tile(config["tile"])[1]
    assert facts.sass["HGMMA"] % (d // 16 + bn // 16) == 0
    assert facts.sass.get("HMMA", 0) == 0
    assert facts.sass["UTMASTG"] >= 1


def exponentials_before_the_wait(text):
    """In every loop: exponentials between the wait for the first product and that for the second."""
    lines = text.splitlines()
    found = []
    for i, line in enumerate(lines):
        if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line:
            end = next(j for j in range(i, len(lines)) if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in lines[j])
            found.append(sum("MUFU.EX2" in x for x in lines[i:end]))
    return found


def test_the_softmax_runs_beneath_the_second_product(build):
    case = case_of((300,))
    for overlap in (1, 0):
        artifact, _ = build(case, {**KERNEL.default(case), "overlap": overlap})
        before = exponentials_before_the_wait(sass(artifact.folder / artifact.cubin, artifact.entry))
        assert len(before) == 1
        # 64 scores, two to judge the maxima by, and two factors of earlier sums where these move
        assert before[0] == 68 if overlap else before[0] < 68


def test_guesses_are_valid_and_every_case_has_one():
    for case in CASES.values():
        guesses = [dict(KERNEL.default(case)), *map(dict, KERNEL.seeds(case))]
        assert all(KERNEL.valid(case, g) is None for g in guesses), case.name
        assert len({tuple(sorted(g.items())) for g in guesses}) == len(guesses), case.name
        assert all(g[name] in values for g in guesses for name, values in KERNEL.space.items()), case.name
        assert sum(KERNEL.valid(case, c) is None for c in KERNEL.configs()) <= 90
        assert all(KERNEL.cost(case, g) > 0 for g in guesses)


def test_refusals_give_a_reason():
    case = CASES["1x8192-h32-8-d128-causal-bf16"]
    first = dict(KERNEL.default(case))
    wrong = ({"tile": "192x128"}, {"pingpong": 0, "overlap": 0}, {"order": "groups"})
    assert all(KERNEL.valid(case, {**first, **change}) for change in wrong)
    assert "section" in KERNEL.valid(case_of((64,)), {**first, "order": "sections"})
    wide = case_of((64,), 256)
    assert "place of Q" in KERNEL.valid(wide, {**KERNEL.default(wide), "tile": "128x80", "chain": 1})


def test_every_tile_fits_in_shared_memory():
    for d, tiles in prefill.TILES.items():
        for tile in tiles:
            room = prefill.layout(d, *prefill.parse_tile(tile))
            assert room is not None, (d, tile)
            assert room.smem <= prefill.SMEM_LIMIT


# ---- the list of tiles ---------------------------------------------------------------------------


def random_batch(rng):
    lens = (*(rng.choice(LENGTHS) for _ in range(rng.randint(1, 6))), rng.randint(1, 400))
    hkv = rng.choice([1, 2, 4])
    return prefill.Batch(lens, hkv * rng.choice([1, 3, 4]), hkv, 64, rng.random() < 0.5)


def block_lists(blocks, table):
    """The items of each block as the static schedule walks them: up to the first empty one or the end."""
    for b in range(blocks):
        mine = [tuple(item) for item in table[b::blocks].tolist()]
        end = next((i for i, item in enumerate(mine) if item[1] == 0), len(mine))
        assert all(item[1] == 0 for item in mine[end:])
        yield mine[:end]


@pytest.mark.parametrize("schedule", ["dynamic", "static"])
@pytest.mark.parametrize("order", ["longest", "sections", "groups"])
def test_every_row_of_every_head_is_in_one_tile(order, schedule):
    rng = random.Random(3)
    for _ in range(40):
        batch = random_batch(rng)
        bm, bn, sms = rng.choice([128, 192]), rng.choice([80, 128, 176]), rng.choice([1, 7, 132])
        blocks, table = prefill.work(batch, bm, bn, order, schedule, sms)
        assert 1 <= blocks <= sms
        lists = list(block_lists(blocks, table)) if schedule == "static" else [table.tolist()]
        seen = set()
        for start, length, row, heads in (tuple(item) for items in lists for item in items):
            head, kv = heads & 0xFFFF, heads >> 16
            assert kv == head // (batch.hq // batch.hkv)
            assert (start, length) in zip(np.cumsum((0, *batch.lens)), batch.lens, strict=False)
            new = {(start + r, head) for r in range(row, min(row + bm, length))}
            assert new
            assert not new & seen
            seen |= new
        assert len(seen) == sum(batch.lens) * batch.hq


def test_long_tiles_come_first_and_blocks_are_even():
    batch = prefill.batch_of(CASES["1x8192-h32-8-d128-causal-bf16"])
    items, costs = prefill.ordered(batch, 128, 128, "longest")
    assert costs == sorted(costs, reverse=True)
    loads = []
    for mine in block_lists(132, np.array(prefill.dealt(items, costs, 132))):
        loads.append(sum(row // 128 + 1 + prefill.TILE_OVERHEAD for _, _, row, _ in mine))
    assert max(loads) / (sum(loads) / 132) < 1.01


def test_sections_fit_in_the_cache_and_groups_stay_together():
    batch = prefill.batch_of(CASES["1x32768-h32-8-d128-causal-bf16"])
    parts = batch.sections("sections")
    assert len(parts) == 8  # 16 MiB each
    items, _ = prefill.ordered(prefill.batch_of(CASES["16x512-h32-8-d128-causal-bf16"]), 128, 128, "groups")
    for i in range(0, len(items), 16):
        assert len({(start, heads >> 16) for start, _, _, heads in items[i : i + 16]}) == 1


# ---- the walk over the keys ----------------------------------------------------------------------


def visible(length, row, bm, bn, causal, owner):
    """Which keys a warpgroup's rows see, as attention_prefill.cu walks and masks: [64, tiles · bn]."""
    tiles = prefill.steps(length, row, bm, bn, causal)
    seen = np.zeros((64, tiles * bn), dtype=bool)
    whole = (min(row + 64 * owner + 1, length) if causal else length) // bn
    for j in range(tiles - 1, -1, -1):
        masked = j >= whole
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            first = j * bn + lane % 4 * 2
            at = row + 64 * owner + 16 * warp + lane // 4
            ends = (length - first,) * 2
            if causal:
                ends = min(ends[0], at + 1 - first), min(ends[1], at + 9 - first)
            for i in range(bn // 2):
                column, second = i // 4 * 8 + i % 2, i // 2 % 2
                if not masked or column < ends[second]:
                    seen[at - row - 64 * owner + 8 * second, first + column] = True
    return seen


@pytest.mark.parametrize(("bm", "bn"), [(128, 128), (128, 176), (192, 128), (128, 80), (128, 64), (128, 192)])
def test_masks_leave_what_each_row_sees(bm, bn):
    rng = random.Random(bm + bn)
    for causal in (True, False):
        for length in (*rng.sample(LENGTHS[1:], 4), bn, bm + 1):
            row = rng.randrange(0, length, bm)
            owner = rng.randrange(bm // 64)
            seen = visible(length, row, bm, bn, causal, owner)
            keys = np.arange(seen.shape[1])
            for r in range(64):
                at = row + 64 * owner + r
                if at < length:  # other rows are not stored
                    assert (seen[r] == (keys < (at + 1 if causal else length))).all(), (length, row, at)


# ---- layouts -------------------------------------------------------------------------------------


def swizzled(offset):
    """Where TMA puts the byte at ``offset`` of a box of 128-byte rows, and where wgmma looks for it."""
    return offset ^ (offset >> 7 & 7) << 4


def fields(descriptor):
    """Address, leading offset, stride in bytes, swizzle mode."""
    return (
        (descriptor & 0x3FFF) << 4,
        (descriptor >> 16 & 0x3FFF) << 4,
        (descriptor >> 32 & 0x3FFF) << 4,
        descriptor >> 62,
    )


def rows_descriptor(address, chunk_bytes):
    """attention.cuh's rows_descriptor."""
    return 1 << 62 | (1024 >> 4) << 32 | (chunk_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4


@pytest.mark.parametrize(("d", "bn"), [(64, 192), (128, 176), (256, 80)])
def test_the_second_product_finds_the_values(d, bn):
    base = 96 * 1024
    for step in range(bn // 16):
        descriptor = rows_descriptor(base, bn * 128) + (step * 16 * 128 >> 4)
        address, leading, stride, swizzle = fields(descriptor)
        assert swizzle == 1
        assert address % 1024 == 0
        for k in range(16):
            for n in range(0, d, 8):
                # wgmma, N contiguous: 64 columns a row, 8 rows an atom, then strides
                linear = n // 64 * leading + k // 8 * stride + k % 8 * 128 + n % 64 * 2
                # TMA: a box of 64 columns and bn rows for every 64 columns
                key = step * 16 + k
                stored = base + n // 64 * bn * 128 + swizzled(key * 128 + n % 64 * 2)
                assert swizzled(address + linear) == stored


def test_probabilities_become_the_fragments_of_the_next_product():
    bn = 80
    for lane in range(32):
        # columns and rows (0: first, 1: 8 below) of the sums that a thread holds, and how they are packed
        held = [(i // 4 * 8 + lane % 4 * 2 + i % 2, i // 2 % 2) for i in range(bn // 2)]
        packed = [(held[2 * i], held[2 * i + 1]) for i in range(bn // 4)]
        for step in range(bn // 16):
            for register, (low, high) in enumerate(packed[4 * step : 4 * step + 4]):
                column = 16 * step + lane % 4 * 2 + (8 if register >= 2 else 0)
                assert low == (column, register % 2)
                assert high == (column + 1, register % 2)


# ---- the launch ----------------------------------------------------------------------------------


class FakeModule:
    """Records the launch that bind asks for."""

    sms = 132

    def scratch(self, name, nbytes):
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8)

    def launcher(self, grid, args):
        self.grid, self.args = grid, args
        return lambda: None


def test_bind_passes_what_the_kernel_takes(monkeypatch):
    torch = pytest.importorskip("torch")
    boxes = []

    def fake(address, dtype, shape, pitch, box, swizzle):
        boxes.append((shape, pitch, box, swizzle))
        return b"x" * 128

    monkeypatch.setattr(_tma, "tensor_map", fake)
    case = case_of((5, 0, 300), 128)
    tensors = {name: torch.zeros(305, heads, 128) for name, heads in (("q", 4), ("k", 2), ("v", 2), ("o", 4))}
    for schedule, dynamic in (("dynamic", 1), ("static", 0)):
        module, config = FakeModule(), {**KERNEL.default(case), "schedule": schedule}
        boxes.clear()
        KERNEL.bind(module, case, config, tensors, tensors)
        assert module.grid == (16,)  # 1 + 3 tiles of 4 heads
        assert [len(a) for a in module.args] == [128, 128, 128, 128, 40]
        assert boxes == [
            ((305, 512), 1024, (128, 64), 128),
            ((305, 256), 512, (128, 64), 128),
            ((305, 256), 512, (128, 64), 128),
            ((305, 512), 1024, (16, 64), 128),
        ]
        numbers = struct.unpack("<3Q4i", module.args[-1])
        assert numbers[0] == tensors["o"].data_ptr()
        assert numbers[3:] == (16, 512, dynamic, 0)
