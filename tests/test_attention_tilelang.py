"""The TileLang attention kernels without a GPU: work lists, models of their loops, three compilations."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math

import pytest

from dsl_bench.backends.tilelang import BACKEND
from dsl_bench.workload import int_list

READY = BACKEND.probe("compile")
pytestmark = pytest.mark.skipif(not READY.ready, reason=READY.reason or "ready")

WORKLOADS = ("attention_prefill", "attention_decode", "mla_decode")
LOG2E = math.log2(math.e)
#: whether any lane's maximum has moved; its arguments are easily mixed up, the mask comes first
VOTE = "__any_sync((uint)4294967295, (moved != 0))"
#: the greatest P of a tile as it was rounded, less as it was
REPAID = "(((float)((bfloat16_t)peak["


def workload(name):
    return importlib.import_module(f"dsl_bench.workloads.{name}").WORKLOAD


def kernel(name):
    return next(k for k in BACKEND.kernels() if k.id == f"tilelang/{name}")


def module(name):
    BACKEND.kernels()
    return importlib.import_module(f"dsl_bench.kernels.tilelang.{name}")


def small(name):
    return [case for case in workload(name).cases() if {"smoke", "edge"} & set(case.groups)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_first_guesses_are_valid_and_of_the_space(name):
    own = kernel(name)
    for case in workload(name).cases():
        usable = [c for c in own.configs() if own.valid(case, c) is None]
        assert len(usable) <= 40, "more points than a search tries"
        for config in (own.default(case), *own.seeds(case)):
            assert own.valid(case, config) is None, (case.name, config)
            assert config in usable, (case.name, config)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_binary_depends_on_lengths_or_the_mask(name):
    own = kernel(name)
    for config in itertools.islice(own.configs(), 4):
        statics: dict[tuple, set[str]] = {}
        for case in workload(name).cases():
            shape = tuple(v for k, v in case.params.items() if k in ("d", "page"))
            group = case["hq"] // case["hkv"] if name == "attention_decode" else 0
            found = statics.setdefault((shape, group, case.dtype), set())
            found.add(repr(sorted(own.static(case, config).items())))
        assert all(len(found) == 1 for found in statics.values())


@pytest.mark.parametrize("extra", [1, 4])
@pytest.mark.parametrize("blocks", [1, 7, 132, 264])
@pytest.mark.parametrize(
    "tiles", [[1], [0], [0, 1, 0, 3], [128] * 64, [1024, *[16] * 31], [16] * 256, [512], [3] * 1000, [0, 0]]
)
def test_split_covers_every_tile_once(tiles, blocks, extra):
    host = module("_attention")
    plan = host.split(tiles, blocks, extra)
    assert len(plan.bounds) <= blocks + 1 and plan.bounds[-1] == len(plan.pieces)
    done = [[] for _ in tiles]
    slots: list[int] = []
    for piece in plan.pieces:
        done[piece.unit] += range(piece.first, piece.first + piece.tiles)
        if piece.parts > 1:
            assert piece.base <= piece.slot < piece.base + piece.parts
            slots.append(piece.slot)
    assert [sorted(d) for d in done] == [list(range(n)) for n in tiles]
    assert {p.unit for p in plan.pieces} == set(range(len(tiles))), "an empty unit has a piece, for its zeros"
    assert sorted(slots) == list(range(plan.slots)), "every slot is written by one piece"
    loads = [sum(p.tiles + extra for p in plan.pieces[a:b]) for a, b in itertools.pairwise(plan.bounds)]
    even = (sum(tiles) + extra * len(plan.pieces)) / blocks
    assert max(loads) <= even + extra + 1, "no block has much more than an even share"


def test_schedule_deals_every_tile_once_and_evenly():
    own, prefill = kernel("attention_prefill"), module("attention_prefill")
    for case in workload("attention_prefill").cases():
        config = own.default(case)
        lists = prefill.plan(case, config, 132)
        bm = 64 * config["groups"]
        found = sorted((t.start, t.query, t.head) for block in lists for t in block)
        expected, start = [], 0
        for n in int_list(str(case.params["lens"])):
            expected += [(start, x, h) for x in range(0, n, bm) for h in range(case["hq"])]
            start += n
        assert found == sorted(expected), case.name
        loads = [sum(t.cost for t in block) for block in lists]
        assert max(loads) <= sum(loads) / len(lists) + max(t.cost for block in lists for t in block)


def fused(a, scale, b):
    """a · scale − b as one FMA does it: the product is not rounded."""
    return (a.double() * scale - b.double()).float()


def softmax_step(torch, s, v, top, total, acc, scale, lazy=True, repaid=True):
    """One tile as the kernels do it: (top, total, acc) with P rounded to the type of ``v``. ``lazy``: what a
    row is scaled by follows its maximum only beyond the slack. ``repaid``: the greatest P of the tile is
    rounded in the row's sum too."""
    scale = torch.tensor(scale, dtype=torch.float32)
    peak = new = torch.maximum(top, s.amax(1))
    if lazy:
        new = torch.where((new - top) * scale > module("_attention").SLACK, new, top)
    most = torch.where(peak > new, torch.exp2(fused(peak, scale.double(), new * scale)), 1)
    fade = torch.exp2((top - new) * scale)
    p = torch.exp2(fused(s, scale.double(), (new * scale)[:, None]))
    total = total * fade + p.sum(1)
    if repaid:
        total = total + (most.to(v.dtype).float() - most)
    acc = acc * fade[:, None] + p.to(v.dtype).float() @ v.float()
    return new, total, acc


@pytest.mark.parametrize("lazy", [True, False])
def test_a_row_that_sees_nothing_stays_finite(lazy):
    """Both maxima are LOWEST then: the difference of two products, fused, would be the rounding of one."""
    torch = pytest.importorskip("torch")
    lowest, scale = torch.full((4,), module("_attention").LOWEST), torch.tensor(LOG2E / 24)
    wrong = fused(lowest, scale.double(), lowest * scale)
    assert (wrong.abs() > 1e6).all(), "2 to this power is infinite or zero, not one"
    nothing, v = torch.full((4, 64), float("-inf")), torch.randn(64, 8)
    top, total, acc = softmax_step(
        torch, nothing, v, lowest, torch.zeros(4), torch.zeros(4, 8), LOG2E / 24, lazy
    )
    assert (top == lowest).all() and (total == 0).all() and (acc == 0).all()
    top, total, acc = softmax_step(torch, torch.randn(4, 64), v, top, total, acc, LOG2E / 24, lazy)
    assert torch.isfinite(acc).all() and (total > 0).all()


@pytest.mark.parametrize("name", ["attention_prefill", "mla_decode"])
def test_lazy_sums_are_within_the_bound_where_a_key_dominates(name):
    """A key of a later tile has nearly all the weight and by far the largest values, but its row's maximum
    has not grown by the slack: P of it is no power of two, and what its rounding costs shows in the worst
    element, unless the row's sum takes it as rounded. Exact maxima are the yardstick."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    rows, scale = 512, LOG2E / 24
    s = torch.full((rows, 128), -20.0) / scale
    s[:, 0] = 0
    s[:, 64] = (6 + 1.9 * torch.rand(rows, generator=generator)) / scale  # in powers of two, below the slack
    v = torch.randn(128, 64, generator=generator).bfloat16()
    v[64] = (64 + 64 * torch.rand(64, generator=generator)).bfloat16()
    exact = torch.softmax(s.double() * (scale / LOG2E), 1) @ v.double()

    def worst(lazy, repaid):
        top, total, acc = torch.full((rows,), -1e30), torch.zeros(rows), torch.zeros(rows, 64)
        for t in (0, 1):
            at = slice(64 * t, 64 * t + 64)
            step = torch, s[:, at], v[at], top, total, acc, scale, lazy, repaid
            top, total, acc = softmax_step(*step)
        return ((acc / total[:, None]).bfloat16().double() - exact).abs().max().item()

    bound, yard = workload(name).bound.worst, worst(False, False)
    assert worst(True, False) > bound * yard, "the case is one that tells the two apart"
    assert worst(True, True) < 1.2 * yard
    text = " ".join(inspect.getsource(module(name)).split())
    assert 'total[i] += T.cast(T.cast(peak[i], dtype), "float32") - peak[i]' in text, "as the model does it"


def test_exact_maxima_are_among_the_first_guesses_of_mla():
    own = kernel("mla_decode")
    for case in workload("mla_decode").cases():
        assert any(not config["lazy"] for config in own.seeds(case)), case.name


def inputs_of(torch, load, case, seed=0):
    """Tensors on the CPU: values of the normal distribution, and the workload's indices."""
    import numpy as np

    from dsl_bench.workload import TensorSpec

    torch.manual_seed(seed)
    index = load.index(case, np.random.default_rng(seed))
    found = {}
    spec: TensorSpec
    for spec in load.specs(case):
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec.dtype)
        if spec.role == "value":
            found[spec.name] = torch.randn(spec.shape).to(kind)
        elif spec.role == "index":
            found[spec.name] = torch.from_numpy(index[spec.name])
    return found


def close(torch, found, reference):
    assert torch.isfinite(found).all()
    error = (found.double() - reference).abs().max().item()
    assert error <= 0.02 * max(1.0, reference.abs().max().item()), error


@pytest.mark.parametrize("case", small("attention_prefill"), ids=lambda c: c.name)
def test_model_of_prefill(case):
    """Steps, masks and the split of a tile over warpgroups, in the kernel's arithmetic."""
    torch = pytest.importorskip("torch")
    load, own, prefill = (
        workload("attention_prefill"),
        kernel("attention_prefill"),
        module("attention_prefill"),
    )
    data = inputs_of(torch, load, case)
    q, k, v = data["q"], data["k"], data["v"]
    out = torch.full(q.shape, float("nan"))
    scale, reach = LOG2E / math.sqrt(case["d"]), 0 if case["causal"] else prefill.ALL
    eager = {**own.default(case), "lazy": False}
    for config in (own.default(case), *own.seeds(case)[:2], eager):
        bn, groups = config["bn"], config["groups"]
        for tile in itertools.chain(*prefill.plan(case, config, 5)):
            steps = -(-min(tile.length, tile.query + 64 * groups + reach) // bn)
            kv = tile.head // (case["hq"] // case["hkv"])
            for group in range(groups):
                rows = tile.query + 64 * group + torch.arange(64)
                clear = min(tile.length, tile.query + 64 * group + 1 + reach) // bn
                queries = q[(tile.start + rows).clamp(max=q.shape[0] - 1), tile.head].float()
                top, total = torch.full((64,), float("-inf")), torch.zeros(64)
                acc = torch.zeros(64, case["d"])
                for step in range(steps):
                    keys = step * bn + torch.arange(bn)
                    at = (tile.start + keys).clamp(max=k.shape[0] - 1)
                    s = queries @ k[at, kv].float().T
                    if step >= max(clear, 1) or clear == 0:
                        seen = (keys[None] <= rows[:, None] + reach) & (keys[None] < tile.length)
                        s = s.masked_fill(~seen, float("-inf"))
                    top, total, acc = softmax_step(
                        torch, s, v[at, kv], top, total, acc, scale, config["lazy"]
                    )
                valid = rows < tile.length
                out[tile.start + rows[valid], tile.head] = (acc / total[:, None])[valid]
        close(torch, out, load.reference(case, data)["o"])


def join(torch, parts):
    """Parts (output, log-sum-exp) weighted as the kernels do it; rows that saw nothing become zeros."""
    peak = torch.full_like(parts[0][1], -1e30)
    for _, lse in parts:
        peak = torch.maximum(peak, lse)
    weights = [torch.exp2(lse - peak) for _, lse in parts]
    norm = sum(weights)
    total = sum(w[:, None] * o for w, (o, _) in zip(weights, parts, strict=True))
    return torch.where(norm[:, None] > 0, total / norm.clamp_min(1e-30)[:, None], 0.0)


def attend(torch, queries, keys, values, first, tiles, seen, scale, lazy=True):
    """Output and log-sum-exp of a piece: tiles of 64 tokens from ``first``; a row sees ``seen`` tokens."""
    rows = queries.shape[0]
    top, total, acc = torch.full((rows,), -1e30), torch.zeros(rows), torch.zeros(rows, values.shape[1])
    for t in range(first, first + tiles):
        at = t * 64 + torch.arange(64)
        s = (queries @ keys[at].float().T).masked_fill(at[None] >= seen[:, None], float("-inf"))
        top, total, acc = softmax_step(torch, s, values[at], top, total, acc, scale, lazy)
    out = torch.where(total[:, None] > 0, acc / total.clamp_min(1e-30)[:, None], 0.0)
    return out, top * scale + torch.log2(total)


def paged(cache, table, length, page):
    """The tokens of whole tiles of 64, as the producers load them: pages past the end repeat the last."""
    last = max(0, -(-length // page) - 1)
    pages = [int(table[min(i, last)]) for i in range(-(-length // 64) * 64 // page)]
    return cache[pages].flatten(0, 1)


@pytest.mark.parametrize("case", small("attention_decode"), ids=lambda c: c.name)
def test_model_of_decode(case):
    torch = pytest.importorskip("torch")
    load, decode, host = workload("attention_decode"), module("attention_decode"), module("_attention")
    data = inputs_of(torch, load, case)
    group = case["hq"] // case["hkv"]
    for blocks in (2, 264):
        cut, units = decode.plan(case, blocks)
        out = torch.full(data["q"].shape, float("nan"))
        slots: dict[int, tuple] = {}
        for seq, head, first, tiles, length, slot, parts, base in host.piece_rows(cut, units):
            k, v = (
                paged(data[x][:, :, head], data["page_table"][seq], length, case["page"])
                for x in ("k_cache", "v_cache")
            )
            heads = slice(head * group, head * group + group)
            seen = torch.full((group,), length)
            scale = LOG2E / math.sqrt(case["d"])
            slots[slot] = attend(torch, data["q"][seq, heads].float(), k, v, first, tiles, seen, scale)
            if parts == 1:
                out[seq, heads] = slots[slot][0]
            elif all(base + i in slots for i in range(parts)):
                out[seq, heads] = join(torch, [slots[base + i] for i in range(parts)])
        close(torch, out, load.reference(case, data)["o"])


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("case", small("mla_decode"), ids=lambda c: c.name)
def test_model_of_mla(case, lazy):
    torch = pytest.importorskip("torch")
    load, mla = workload("mla_decode"), module("mla_decode")
    data = inputs_of(torch, load, case)
    rows, sq = case["h"] * case["sq"], case["sq"]
    q = data["q"].view(-1, rows, 576).float()
    for sms in (3, 132):
        table, bounds, cuts, slots = mla.plan(case, 1, sms)
        assert bounds[-1] == len(table) and len(bounds) <= max(sms, -(-rows // 64)) + 1
        out, parts_of = torch.full((len(q), rows, 512), float("nan")), {}
        for seq, band, first, tiles, length, slot, parts, _ in table:
            mine = band * 64 + torch.arange(64)
            mine = mine[mine < rows]
            seen = torch.clamp(length - sq + 1 + mine // case["h"], max=length)
            tokens = paged(data["kv_cache"], data["page_table"][seq], length, 64)
            scale = LOG2E / math.sqrt(576)
            done = attend(torch, q[seq, mine], tokens, tokens[:, :512], first, tiles, seen, scale, lazy)
            if parts == 1:
                out[seq, mine] = done[0]
            parts_of.setdefault((slot if parts > 1 else -1, band), done)
        for seq, base, parts, _ in cuts:
            for band in range(-(-rows // 64)):
                mine = slice(band * 64, min(rows, band * 64 + 64))
                out[seq, mine] = join(torch, [parts_of[base + i, band] for i in range(parts)])
        assert {s for s, _ in parts_of} - {-1} == set(range(slots))
        close(torch, out.view((*data["q"].shape[:3], 512)), load.reference(case, data)["o"])


def facts_of(name, case, config, compiled):
    own = kernel(name)
    assert own.valid(case, config) is None
    artifact, facts = compiled(own.id, own.static(case, config))
    return facts, artifact.meta, (artifact.folder / "kernel.cu").read_text()


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_decode_compiles_without_spills(compiled):
    case = workload("attention_decode").parse_case({"lens": "100*4"})
    facts, meta, text = facts_of("attention_decode", case, {"stages": 3, "resident": 2}, compiled)
    assert facts.stack == 0 and facts.registers <= 204, "two blocks of 160 threads an SM"
    assert meta["threads"] == 160 and 2 * (meta["smem"] + 1024 + 128) <= 233472
    assert facts.sass["UTMALDG"] == 16 and facts.sass["HGMMA"] == 12
    assert text.count("__syncthreads") == 1, "a barrier of the whole block after the roles part would hang"


@pytest.mark.slow
def test_prefill_overlaps_products_and_softmax(compiled):
    case = workload("attention_prefill").parse_case({"lens": "512"})
    config = {"bn": 128, "groups": 2, "stages": 2, "turns": True, "lazy": True}
    facts, meta, text = facts_of("attention_prefill", case, config, compiled)
    assert facts.stack == 0 and facts.sass["USETMAXREG"] == 2 and meta["threads"] == 384
    # one fence and one wait a product; where ptxas serialises, every HGMMA gets both
    assert facts.sass["HGMMA"] == 48 and facts.sass["WARPGROUP"] <= 12
    assert text.count("wait_wgmma<1>") == 2 and text.count("__syncthreads") == 1
    assert text.count(VOTE) == 2


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_mla_keeps_both_warpgroups_in_registers(compiled):
    case = workload("mla_decode").parse_case({"lens": "100*2"})
    facts, meta, text = facts_of(
        "mla_decode", case, {"lazy": True, "after": True, "passing": True, "extra": 4}, compiled
    )
    assert facts.stack <= 16 and facts.sass.get("LDL", 0) <= 4, "spills outside the loops only"
    assert facts.sass["HGMMA"] == 84 and facts.sass["WARPGROUP"] <= 14 and facts.sass["UTMALDG"] >= 18
    assert text.count(VOTE) == 3
    assert text.count(REPAID) == 2
    assert "wait_wgmma<3>" in text and text.count("__syncthreads") == 1 and meta["smem"] <= 232448 - 256
