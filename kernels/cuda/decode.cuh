// What the decode kernels share: the items of their lists, reductions over lanes, the joining of partial results.
#pragma once

#include "decode_ptx.cuh"

// One piece of one sequence's work, written by the host (kernels/cuda/_pieces.py). Its results go to the output
// where it is the only one (`count` 1), else to slot `slot` of the workspace; the pieces of one sequence have the
// slots from `first` on.
struct Item {
    int row, head;   // the sequence; the first of the heads (or the tile of query rows)
    int begin, end;  // its tokens (or blocks)
    int slot, first, count;
    int tokens;      // of the sequence
};

__device__ __forceinline__ Item load_item(const int4* items, int at) {
    const int4 a = __ldg(items + 2 * at), b = __ldg(items + 2 * at + 1);
    return Item{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Adds `count` partial results in their order, BATCH pieces' loads in flight. A result is normalised; its scale is
// log2 of what it was divided by, -inf where it saw no token. `stride` counts results from one piece to the next,
// each of which is `width` float4 wide; a lane adds WIDE of them, 32 apart. Zeros where no piece saw a token.
template <int BATCH, int WIDE>
__device__ __forceinline__ void join_pieces(float4 (&out)[WIDE], const float* scales, const float4* sums, int count,
                                            int stride, int width) {
    float top = minus_infinity(), total = 0.f;
#pragma unroll
    for (int w = 0; w < WIDE; ++w) out[w] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int base = 0; base < count; base += BATCH) {
        float scale[BATCH];
        float4 part[BATCH][WIDE];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const size_t piece = size_t(min(base + i, count - 1)) * stride;
            scale[i] = __ldcg(scales + piece);
#pragma unroll
            for (int w = 0; w < WIDE; ++w) part[i][w] = __ldcg(sums + piece * width + 32 * w);
            if (base + i >= count) scale[i] = minus_infinity();
        }
        float next = top;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) next = fmaxf(next, scale[i]);
        if (next == minus_infinity()) continue;
        const float shrink = exp2_fast(top - next);
        top = next;
        total *= shrink;
#pragma unroll
        for (int w = 0; w < WIDE; ++w)
            out[w].x *= shrink, out[w].y *= shrink, out[w].z *= shrink, out[w].w *= shrink;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float weight = exp2_fast(scale[i] - top);
            total += weight;
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                out[w].x = fmaf(part[i][w].x, weight, out[w].x), out[w].y = fmaf(part[i][w].y, weight, out[w].y);
                out[w].z = fmaf(part[i][w].z, weight, out[w].z), out[w].w = fmaf(part[i][w].w, weight, out[w].w);
            }
        }
    }
    const float inverse = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
    for (int w = 0; w < WIDE; ++w) out[w].x *= inverse, out[w].y *= inverse, out[w].z *= inverse, out[w].w *= inverse;
}
