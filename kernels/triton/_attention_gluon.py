"""What the Gluon attention kernels share: an order for the assembler, and tiles dealt out to blocks."""

import heapq
from collections.abc import Sequence

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

#: queries of a prefill tile
BM = 128
#: blocks of 128 keys' worth of time that starting and ending a tile costs
OVERHEAD = 1.5
#: Triton renamed it between 3.6 and 3.9
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def computed(x):
    """x, which is never negative; a branch on it keeps what follows behind its computation. The assembler
    moves a wait for wgmma ahead of all that it does not depend on, and the softmax would run after the
    products instead of beneath them. What is no number passes too."""
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.geu.f32 p, $1, 0f00000000; mov.f32 $0, $1; "
        "again: @p bra done; nanosleep.u32 100; bra again; done:}",
        "=f,f,~{memory}", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


Tile = tuple[int, int, int, int]


def deal(lengths: Sequence[int], heads: int, bn: int, causal: bool, blocks: int) -> list[list[Tile]]:
    """Tiles (first token of the sequence, its tokens, first query, head) of each block: the dearest first,
    each to the block that has least. Costs are in blocks of ``bn`` keys."""
    tiles, start = [], 0
    for tokens in lengths:
        for row in range(0, tokens, BM):
            end = min(tokens, row + BM) if causal else tokens
            tiles.append((-(-end // bn) + OVERHEAD * 128 / bn, (start, tokens, row)))
        start += tokens
    tiles.sort(key=lambda tile: -tile[0])
    loads = [(0.0, i) for i in range(min(blocks, len(tiles) * heads))]
    lists: list[list[Tile]] = [[] for _ in loads]
    for cost, tile in tiles:
        for head in range(heads):
            load, i = loads[0]
            lists[i].append((*tile, head))
            heapq.heapreplace(loads, (load + cost, i))
    return lists
