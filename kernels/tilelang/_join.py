"""The kernel that adds up what parts of a sequence left: weighted by their log-sum-exps, in the order of the
parts, so that results repeat bit by bit. A block a row; 16 parts are loaded at a time."""

from typing import Any

import tilelang.language as T
from dsl_bench.kernels.tilelang import _attention as host

#: parts that are added up at a time, their loads in flight together
CHUNK = 16


def build(dv: int, dtype: str) -> Any:
    """The prim_func: cuts [n, 4] int32 (sequence, first slot, parts, nothing), sums [slots, rows, dv] and lse
    [slots, rows] fp32, o [batch, rows, dv]."""
    batch, rows, slots, n = (T.dynamic(x) for x in ("batch", "rows", "slots", "n"))

    @T.prim_func
    def join(
        cuts: T.Tensor((n, 4), "int32"),
        sums: T.Tensor((slots, rows, dv), "float32"),
        lse: T.Tensor((slots, rows), "float32"),
        o: T.Tensor((batch, rows, dv), dtype),
    ):
        with T.Kernel(rows, n, threads=dv // 4) as (row, cut):
            many = T.alloc_local((CHUNK, 4), "float32")
            marks = T.alloc_local((CHUNK,), "float32")
            joined = T.alloc_local((4,), "float32")
            seq, base, parts = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            source, held = T.alloc_var("int32", init=0), T.alloc_var("int32")
            peak, keep = T.alloc_var("float32", init=host.LOWEST), T.alloc_var("float32")
            norm, weight = T.alloc_var("float32", init=0.0), T.alloc_var("float32")
            column = T.get_thread_binding() * 4
            seq, base, parts = cuts[cut, 0], cuts[cut, 1], cuts[cut, 2]
            for x in range(4):
                joined[x] = 0.0
            while source < parts:
                for i in range(CHUNK):
                    held = base + T.min(source + i, parts - 1)
                    marks[i] = lse[held, row]
                    for x in T.vectorized(4):
                        many[i, x] = sums[held, row, column + x]
                keep = peak
                for i in range(CHUNK):
                    peak = T.max(peak, marks[i])
                keep = T.exp2(keep - peak)
                norm = norm * keep
                for x in range(4):
                    joined[x] = joined[x] * keep
                for i in range(CHUNK):
                    weight = T.if_then_else(source + i < parts, T.exp2(marks[i] - peak), T.float32(0))
                    norm = norm + weight
                    for x in range(4):
                        joined[x] = joined[x] + many[i, x] * weight
                source = source + CHUNK
            weight = T.if_then_else(norm > 0, 1 / norm, T.float32(0))
            for x in T.vectorized(4):
                o[seq, row, column + x] = joined[x] * weight

    return join
