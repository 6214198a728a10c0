"""Attention of prompts by hand: softmax(Q·Kᵀ/√D)·V over a ragged batch, bf16 or fp16, sums in fp32. Device
code: attention_prefill.cu.

FlashAttention's online softmax on a persistent, warp-specialised kernel: one warpgroup loads by TMA, two or
three multiply by wgmma, each hiding its softmax beneath its own second product and, taking turns, beneath the
products of the others. What limits it: the tensor cores at D 128 and 256 (and the clock they leave), exp2 at
D 64, half-empty tiles where sequences are short. A binary serves all batches: the tiles are an argument.
"""

import heapq
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from dsl_bench.kernels.cuda import _tma

from dsl_bench.backends.cuda import CudaSource
from dsl_bench.plugin import Call, Case, Config, Kernel, Needs, int_list

#: rows of Q x keys of a tile, the first the usual one; 192 rows take a third warpgroup
TILES: dict[int, tuple[str, ...]] = {
    64: ("192x128", "128x192", "128x128"),
    128: ("128x128", "128x176", "128x160"),
    256: ("128x64", "128x80"),
}
#: pingpong, overlap, chain: see attention_prefill.cu. order, longest: the longest tiles first;
#: sections: the same within parts of the batch whose keys and values stay in L2; groups: all tiles of a KV
#: head of a sequence, then the next. schedule, dynamic: a block takes the first tile that nobody has; static:
#: the host has dealt them out.
SPACE: dict[str, Sequence[Any]] = {
    "tile": tuple(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles)),
    "pingpong": (1, 0),
    "overlap": (1, 0),
    "chain": (1, 0),
    "order": ("longest", "sections", "groups"),
    "schedule": ("dynamic", "static"),
}
SMEM_LIMIT = 232448
#: bytes of keys and values that a section holds, of 50 MB of L2; twice as much still needs none
SECTION_BYTES = 16 << 20
#: tokens of the longest sequence whose tiles may follow each other as a group
GROUP_TOKENS = 3072
#: what a tile costs beside its steps, in steps: for dealing tiles out
TILE_OVERHEAD = 1.5
#: bytes of a store buffer: 64 rows of 64 elements
STORE_BYTES = 64 * 64 * 2
#: the SMs that the cost model thinks of, their clock in MHz, and fp32 FLOPs a clock of one's tensor cores
SMS, CLOCK, TENSOR = 132, 1500, 4096

#: tokens of the shortest sequence from which on more keys a tile pay beneath the diagonal, too
LONG_TOKENS = 8192

Items = tuple[tuple[int, int, int, int], ...]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def parse_tile(text: str) -> tuple[int, int]:
    """``"128x176"`` as rows and keys."""
    bm, bn = text.split("x")
    return int(bm), int(bn)


@dataclass(frozen=True)
class Layout:
    """Shared memory of a tile: stages of each ring, buffers of Q, store buffers a warpgroup (0: the rows of O
    take the place of Q), bytes in all."""

    stages: int
    q_buffers: int
    o_buffers: int
    smem: int


def layout(d: int, bm: int, bn: int) -> Layout | None:
    """The roomiest layout that fits, or None. Sizes as in attention_prefill.cu."""
    chunks = d // 64
    stores = [n for n in (4, 2, 1) if chunks % n == 0]
    choices = [(2, 2, n) for n in stores] + [(2, 1, n) for n in (*stores, 0)]
    for stages, q_buffers, o_buffers in ((4, 2, chunks), *choices):
        tiles = q_buffers * bm * d * 2 + 2 * stages * bn * d * 2
        staged = bm // 64 * o_buffers * STORE_BYTES
        smem = 1024 + tiles + staged + 4 * 16 + 8 * (2 * q_buffers + 4 * stages)
        if smem <= SMEM_LIMIT:
            return Layout(stages, q_buffers, o_buffers, smem)
    return None


def layout_of(d: int, tile: str) -> Layout:
    """The layout of a tile; ValueError where none fits."""
    found = layout(d, *parse_tile(tile))
    if found is None:
        raise ValueError(f"no room in shared memory for {tile} at D {d}")
    return found


# ---- the list of tiles ----------------------------------------------------------------------------------


def steps(length: int, row: int, bm: int, bn: int, causal: bool) -> int:
    """Tiles of keys that the rows from ``row`` on see."""
    return cdiv(min(length, row + bm) if causal else length, bn)


@dataclass(frozen=True)
class Batch:
    """What the list of tiles depends on."""

    lens: tuple[int, ...]
    hq: int
    hkv: int
    d: int
    causal: bool

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all sequences."""
        return 4 * self.d * self.hkv * sum(self.lens)

    def sections(self, order: str) -> list[list[tuple[int, int]]]:
        """Parts of the batch, as (sequence, KV head), in the order of their work."""
        groups = [(s, h) for s, n in enumerate(self.lens) if n for h in range(self.hkv)]
        if order == "longest":
            return [groups]
        groups.sort(key=lambda g: -self.lens[g[0]])
        if order == "groups":
            return [[g] for g in groups]
        parts: list[list[tuple[int, int]]] = [[]]
        held = 0
        for group in groups:
            size = 4 * self.d * self.lens[group[0]]
            if parts[-1] and held + size > SECTION_BYTES:
                parts.append([])
                held = 0
            parts[-1].append(group)
            held += size
        return parts


def batch_of(case: Case) -> Batch:
    """The batch of a case."""
    lens = int_list(str(case.params["lens"]))
    return Batch(lens, case["hq"], case["hkv"], case["d"], bool(case["causal"]))


def ordered(batch: Batch, bm: int, bn: int, order: str) -> tuple[Items, list[int]]:
    """All tiles as (first token of the sequence, its length, first row in it, heads), and their steps.
    ``heads`` is the query head, plus the KV head times 65536. Heads that share keys are neighbours."""
    starts = np.concatenate(([0], np.cumsum(batch.lens))).tolist()
    share = batch.hq // batch.hkv
    items, costs = [], []
    for section in batch.sections(order):
        found = [
            (-steps(n, row, bm, bn, batch.causal), s, kv, row)
            for s, kv in section
            for n in (batch.lens[s],)
            for row in range(0, n, bm)
        ]
        for cost, s, kv, row in sorted(found):
            for head in range(kv * share, (kv + 1) * share):
                items.append((starts[s], batch.lens[s], row, head | kv << 16))
                costs.append(-cost)
    return tuple(items), costs


def dealt(items: Items, costs: Sequence[int], blocks: int) -> Items:
    """The items so that block b's are b, b + blocks, b + 2·blocks, …: each in turn to the block that has
    least to do. Zeros fill up."""
    lists: list[list[tuple[int, int, int, int]]] = [[] for _ in range(blocks)]
    heap = [(0.0, b) for b in range(blocks)]
    for item, cost in zip(items, costs, strict=True):
        load, block = heap[0]
        lists[block].append(item)
        heapq.heapreplace(heap, (load + cost + TILE_OVERHEAD, block))
    rounds = max(map(len, lists))
    return tuple(part[i] if i < len(part) else (0, 0, 0, 0) for i in range(rounds) for part in lists)


@lru_cache(maxsize=64)
def work(batch: Batch, bm: int, bn: int, order: str, schedule: str, sms: int) -> tuple[int, Any]:
    """Blocks to launch and the list of items, int32 [n, 4]."""
    items, costs = ordered(batch, bm, bn, order)
    blocks = min(sms, len(items))
    if schedule == "static":
        items = dealt(items, costs, blocks)
    return blocks, np.array(items, dtype=np.int32)


# ---- the contract ---------------------------------------------------------------------------------------


def valid(case: Case, config: Config) -> str | None:
    """None, or why ``case`` cannot or need not be done with ``config``."""
    d, tile = case["d"], str(config["tile"])
    if tile not in TILES.get(d, ()):
        known = ", ".join(TILES.get(d, ())) or "none: D is 64, 128 or 256"
        return f"no {tile} tile for D {d}; known: {known}"
    in_place = layout_of(d, tile).o_buffers == 0
    if config["chain"] and in_place:
        return "rows of O take the place of Q, which the next item would want before they are stored"
    if not config["pingpong"] and not (config["overlap"] and (config["chain"] or in_place)):
        return "without turns nothing else that hides the softmax may be missing"
    if tile == "192x128" and not config["pingpong"]:
        return "three warpgroups without turns spill registers"
    if case["hq"] >= 1 << 16 or case["hkv"] >= 1 << 15:
        return "a tile's entry holds 16 bits of each head"
    batch = batch_of(case)
    tiles = case["hq"] * sum(cdiv(n, parse_tile(tile)[0]) for n in batch.lens)
    if sum(batch.lens) >= 1 << 30 or tiles >= 1 << 27:
        return "more tokens or tiles than the list of tiles counts"
    if config["order"] == "sections" and batch.kv_bytes <= 2 * SECTION_BYTES:
        return "no use in sections: all keys and values stay in L2"
    if config["order"] == "groups" and max(batch.lens) > GROUP_TOKENS:
        return f"groups of more than {GROUP_TOKENS} tokens leave blocks idle at the end"
    return None


def static(case: Case, config: Config) -> dict[str, Any]:
    """All that is baked in: D, the tile, the mask, the schedule within a block, the type."""
    bm, bn = parse_tile(str(config["tile"]))
    return {
        "d": case["d"],
        "bn": bn,
        "consumers": bm // 64,
        "causal": int(case["causal"]),
        "pingpong": int(config["pingpong"]),
        "overlap": int(config["overlap"]),
        "chain": int(config["chain"]),
        "bf16": int(case.dtype == "bf16"),
    }


def source(static: Mapping[str, Any], arch: str) -> CudaSource:
    """attention_prefill.cu with its macros."""
    consumers = static["consumers"]
    room = layout_of(static["d"], f"{64 * consumers}x{static['bn']}")
    defines = {name.upper(): value for name, value in static.items()} | {
        "STAGES": room.stages,
        "Q_BUFFERS": room.q_buffers,
        "O_BUFFERS": room.o_buffers,
        "SMEM_BYTES": room.smem,
    }
    file = Path(__file__).with_name("attention_prefill.cu")
    return CudaSource(file, "attention_prefill", defines, (), room.smem, 128 * (consumers + 1))


def bind(
    module: Any, case: Case, config: Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Call:
    """Tensor maps, the list of tiles on the device, the launch."""
    import torch

    bm, bn = parse_tile(str(config["tile"]))
    batch, schedule = batch_of(case), str(config["schedule"])
    q, k, v, o = inputs["q"], inputs["k"], inputs["v"], outputs["o"]
    blocks, table = work(batch, bm, bn, str(config["order"]), schedule, module.sms)
    items = torch.from_numpy(table).to(q.device)
    counters = module.scratch("counters", 8)

    def rows(tensor: Any, box_rows: int) -> bytes:
        tokens, heads, d = tensor.shape
        shape = (tokens, heads * d)
        return _tma.rows_map(tensor.data_ptr(), case.dtype, shape, tensor.stride(0), (box_rows, 64))

    pointers = (o.data_ptr(), items.data_ptr(), counters.data_ptr())
    numbers = (len(table), o.stride(0), int(schedule == "dynamic"), 0)
    args = [rows(q, bm), rows(k, bn), rows(v, bn), rows(o, 16), struct.pack("<3Q4i", *pointers, *numbers)]
    return Call(module.launcher((blocks,), args), keep=(items, counters, q, k, v, o))


# ---- where to begin -------------------------------------------------------------------------------------


def default(case: Case) -> Config:
    """The usual tile; at D 128 one of more keys where no or few tiles are cut by the mask."""
    few_cut = not case["causal"] or min(batch_of(case).lens) >= LONG_TOKENS
    wide = case["d"] == 128 and few_cut
    return _config("128x176" if wide else TILES.get(case["d"], ("128x128",))[0])


def _config(tile: str, **changes: Any) -> dict[str, Any]:
    """``tile`` as it is usually run."""
    first = {"tile": tile, "pingpong": 1, "overlap": 1, "chain": 0, "order": "longest"}
    return {**first, "schedule": "dynamic", **changes}


def seeds(case: Case) -> Sequence[Config]:
    """One change each: the chain, the order, the dealing, the tile, the assembler's order."""
    first = default(case)
    tile = str(first["tile"])
    found = [_config(tile, chain=1)]
    found += [_config(tile, order="groups"), _config(tile, schedule="static")]
    found += [_config(other) for other in TILES.get(case["d"], ()) if other != tile]
    found += [_config(tile, order="sections"), _config(tile, overlap=0)]
    return [c for c in found if valid(case, c) is None]


@lru_cache(maxsize=4096)
def _clocks(batch: Batch, tile: str) -> float:
    """Clocks of one SM on its share: the products at nine tenths, or exp2 where that takes longer."""
    bm, bn = parse_tile(tile)
    product = 4 * bm * bn * batch.d / TENSOR / 0.9
    step = max(product, bm * bn / 16 / 0.9)
    count = tiles = 0
    for n in batch.lens:
        for row in range(0, n, bm):
            count += steps(n, row, bm, bn, batch.causal)
            tiles += 1
    return batch.hq * (count * step + tiles * (TILE_OVERHEAD * step + 500)) / SMS


def cost(case: Case, config: Config) -> float:
    """A rough time in µs; what it does not know costs a little."""
    time = _clocks(batch_of(case), str(config["tile"])) / CLOCK
    odd = sum(not config[name] for name in ("pingpong", "overlap", "chain"))
    return time * (1 + 0.02 * (odd + (config["order"] == "sections")))


FILES = (
    "attention_prefill.cu",
    "prefill.cuh",
    "softmax.cuh",
    "attention.cuh",
    "ptx.cuh",
    "wgmma.cuh",
    "_tma.py",
)

KERNELS = (
    Kernel(
        id="cuda/attention_prefill",
        workload="attention_prefill",
        space=SPACE,
        default=default,
        seeds=seeds,
        valid=valid,
        static=static,
        source=source,
        bind=bind,
        needs=Needs(archs=("sm_90a",)),
        files=FILES,
        summary="persistent, warp-specialised; P in registers, softmax beneath the products, turns",
        cost=cost,
    ),
)
