"""What the attention kernels share: cutting sequences into equal shares, and adding up parts of a softmax.

A part of a sequence leaves three things a row: the largest logit (base 2), the sum of 2**(logit - largest),
and the sum of values with these weights, all fp32. Parts lie in slots of ``part`` [slots, rows, D] and
``stat`` [slots, 2, rows] (largest, sum), ``rows`` being all query rows of a sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

#: int32 numbers an item of a plan takes
ITEM = 8


@triton.jit
def softmax_step(s, top, total):
    """One block of logits s [M, N] (base 2, -inf where hidden): weights, new largest, new sum, and the factor
    of what was summed before. Rows that have seen no key keep a largest of -inf and a sum of 0."""
    new = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(top - base)
    return p, new, total * alpha + tl.sum(p, 1), alpha


@triton.jit
def merge(
    o, part, stat, seq, slot, slots, row, stop,
    ROWS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Rows row … row + R - 1 (below ``stop``) of sequence ``seq`` of o [seqs, ROWS, D] from its parts in
    ``slots`` slots from ``slot`` on, C at a time and in their order."""
    rows = row + tl.arange(0, R)
    cols = tl.arange(0, D)
    top = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, D), tl.float32)
    for begin in range(0, slots, C):
        index = begin + tl.arange(0, C)
        live = (index[:, None] < slots) & (rows[None, :] < stop)
        at = (slot + index[:, None]).to(tl.int64) * ROWS + rows[None, :]
        m = tl.load(
            stat + at + (slot + index[:, None]) * ROWS, mask=live, other=float("-inf"), cache_modifier=".cg"
        )
        x = tl.load(
            stat + at + (slot + index[:, None] + 1) * ROWS, mask=live, other=0.0, cache_modifier=".cg"
        )
        v = tl.load(
            part + at[:, :, None] * D + cols[None, None, :],
            mask=live[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new = tl.maximum(top, tl.max(m, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - base)
        w = tl.exp2(m - base[None, :])
        total = total * alpha + tl.sum(w * x, 0)
        acc = acc * alpha[:, None] + tl.sum(w[:, :, None] * v, 0)
        top = new
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    into = (seq.to(tl.int64) * ROWS + rows[:, None]) * D + cols[None, :]
    tl.store(o + into, out.to(o.dtype.element_ty), mask=rows[:, None] < stop)


@triton.jit
def combine(
    o, part, stat, splits,
    ROWS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Adds the parts of every cut sequence: splits int32 [cuts, 3] (sequence, first slot, slots)."""
    BLOCKS: tl.constexpr = (ROWS + R - 1) // R
    cut = tl.program_id(0) // BLOCKS
    row = tl.program_id(0) % BLOCKS * R
    seq = tl.load(splits + cut * 3)
    slot = tl.load(splits + cut * 3 + 1)
    slots = tl.load(splits + cut * 3 + 2)
    merge(o, part, stat, seq, slot, slots, row, ROWS, ROWS, R, D, C)


@dataclass(frozen=True)
class Plan:
    """Shares of about equal cost. Share i works on ``items[first[i]:first[i + 1]]``, each a run of tiles of
    one sequence: (sequence, first tile, end, tokens, slot, cut, first slot of the cut, slots of the cut),
    slot and cut being -1 where the run is the whole sequence. ``cuts``: (sequence, first slot, slots)."""

    first: tuple[int, ...]
    items: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, int, int], ...]

    @property
    def shares(self) -> int:
        """How many shares have work."""
        return len(self.first) - 1

    @property
    def slots(self) -> int:
        """Slots for parts that the plan needs."""
        return sum(count for _, _, count in self.cuts)


def _fill(tiles: Sequence[int], cap: int, overhead: int) -> list[list[tuple[int, int, int]]]:
    """Runs (sequence, first tile, end) by share, none above ``cap`` where a run costs ``overhead`` more."""
    shares: list[list[tuple[int, int, int]]] = [[]]
    used = 0
    for seq, count in enumerate(tiles):
        at = 0
        while True:
            room = cap - used - overhead
            if shares[-1] and room < min(1, count):
                shares.append([])
                used = 0
                continue
            end = min(count, at + room)
            shares[-1].append((seq, at, end))
            used += end - at + overhead
            at = end
            if at == count:
                break
    return shares


def plan(lengths: Sequence[int], tile: int, shares: int, overhead: int) -> Plan:
    """At most ``shares`` shares of ``lengths`` tokens in tiles of ``tile``, the dearest as cheap as it can be
    when sequences are dealt out in order and each run costs ``overhead`` tiles beside its own."""
    tiles = [-(-n // tile) for n in lengths]
    low, high = overhead, sum(tiles) + overhead * len(tiles)
    while high - low > 1:
        cap = (low + high) // 2
        low, high = (low, cap) if len(_fill(tiles, cap, overhead)) <= shares else (cap, high)
    runs = _fill(tiles, high, overhead)
    parts = [seq for share in runs for seq, _, _ in share]
    slot, cuts, cut_of = 0, [], {}
    for seq in range(len(tiles)):
        count = parts.count(seq)
        if count > 1:
            cut_of[seq] = len(cuts)
            cuts.append((seq, slot, count))
            slot += count
    taken = dict.fromkeys(cut_of, 0)
    first, items = [0], []
    for share in runs:
        for seq, at, end in share:
            place = (-1, -1, 0, 1)
            if seq in cut_of:
                _, start, count = cuts[cut_of[seq]]
                place = (start + taken[seq], cut_of[seq], start, count)
                taken[seq] += 1
            items.append((seq, at, end, lengths[seq], *place))
        first.append(len(items))
    return Plan(tuple(first), tuple(items), tuple(cuts))


def tensors(plan: Plan, rows: int, d: int, groups: int, device: Any) -> Mapping[str, Any]:
    """What a plan's kernels take beside the operands: ``first``, ``items``, ``splits`` int32, ``part`` and
    ``stat`` fp32 for ``rows`` query rows a sequence, ``count`` int32 [cuts, groups], zero."""
    import torch

    def ints(values: Sequence[Any]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots, cuts = max(1, plan.slots), max(1, len(plan.cuts))
    return {
        "first": ints(plan.first),
        "items": ints(plan.items),
        "splits": ints(plan.cuts or ((0, 0, 0),)),
        "part": torch.empty((slots, rows, d), dtype=torch.float32, device=device),
        "stat": torch.empty((slots, 2, rows), dtype=torch.float32, device=device),
        "count": torch.zeros((cuts, groups), dtype=torch.int32, device=device),
    }


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())
