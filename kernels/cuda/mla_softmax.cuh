// The softmax of mla_decode.cu: the scores of 64 rows and 64 tokens, as wgmma leaves them in a warpgroup.
#pragma once

#include "mla.cuh"

// The softmax of two rows of a lane's quad. `reference` is what P is scaled with, times the scale of the scores.
struct Softmax {
    float reference[2], total[2];
};

// Scales the scores of one block for P: afterwards P is 2^(s·scale - shift). `shrink` is what the sums so far have to
// be multiplied by. Tokens from `limit` on (of each row) do not count.
__device__ __forceinline__ void rate(float (&s)[32], float (&shift)[2], float (&shrink)[2], Softmax& state,
                                     const int (&limit)[2], bool masked, float scale, int lane) {
    if (masked) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= limit[i / 2 % 2]) s[i] = minus_infinity();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float part[4];  // short chains: a warp is alone on its scheduler here
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
#pragma unroll
        for (int i = 8; i < 16; ++i) part[i / 2 % 4] = fmaxf(part[i / 2 % 4], s[i / 2 * 4 + 2 * r + i % 2]);
        const float top = quad_max(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]))) * scale;
        const bool grown = top > state.reference[r] + SLACK;
        shrink[r] = grown ? exp2_fast(state.reference[r] - top) : 1.f;
        if (grown) state.reference[r] = top;
        shift[r] = state.reference[r] == minus_infinity() ? 0.f : state.reference[r];
    }
}

// P of tokens 16·k to 16·k + 15 as a fragment of wgmma.
__device__ __forceinline__ void weigh(const float (&s)[32], u32 (&p)[4], int k, const float (&shift)[2], float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* const x = &s[8 * k + 2 * i];
        p[i] = pack(exp2_fast(fmaf(x[0], scale, -shift[i % 2])), exp2_fast(fmaf(x[1], scale, -shift[i % 2])));
    }
}

// Adds up P as rounded: a weight that dominates its row and is not a power of two then cancels its own rounding.
__device__ __forceinline__ void add_weights(const u32 (&p)[4][4], const float (&shrink)[2], Softmax& state) {
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i % 2] += low_half(p[k][i]) + high_half(p[k][i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) state.total[r] = fmaf(state.total[r], shrink[r], total[r]);
}
