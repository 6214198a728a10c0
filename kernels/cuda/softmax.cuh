// The online softmax of two rows a thread, on the fragments that wgmma leaves and takes.
#pragma once

#include "attention.cuh"

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The state of a thread's two rows, l/4 and the one 8 below. `top` is in units of log2 and need not be the
// largest score: a warp moves its tops up only where the best new weight is large beside the row's sum, so that
// most tiles need no rescaling. `sum` covers this thread's columns; where `moved`, `alpha` is what earlier sums are
// to be scaled by.
//
// Why this rule: a weight of exactly 1 is rounded by nothing, another by up to 2^-8 of itself in bf16, while the
// sum that it is divided by does not round. Where one key has nearly all of its row's weight, nothing averages that
// out: O would be off by up to twice as much as its own rounding. So a key may stay above the top only if it has at
// most a third of the weight: each of the four threads of a row has half of it in its sum already.
struct Softmax {
    // What a new weight may be: so many times a thread's sum, and never more than MOST, since fp16 ends at 65504.
    static constexpr float SHARE = 2.0f, MOST = 256.0f;
    float top[2] = {-1e30f, -1e30f};  // finite, so that a row without a visible key makes no NaN
    float sum[2] = {0.0f, 0.0f};
    float alpha[2] = {1.0f, 1.0f};
    bool moved = false;  // the same in all lanes

    // Moves the tops of all of the warp's rows that have a greater score, if one of them needs it. best[r] is in
    // units of log2 and the same in a row's four lanes.
    __device__ __forceinline__ void follow(const float (&best)[2]) {
        bool high = false;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            high |= exp2_fast(best[r] - top[r]) > fminf(fmaxf(SHARE * sum[r], 1.0f), MOST);
        moved = __any_sync(~0u, high);
        if (!moved) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float before = top[r];
            top[r] = fmaxf(before, best[r]);
            alpha[r] = exp2_fast(before - top[r]);
            sum[r] *= alpha[r];
        }
    }

    // s = exp2(s · scale - top); alpha and sum follow. s[4n], s[4n+1] belong to the first row, the other two
    // to the second.
    template <int N>
    __device__ __forceinline__ void update(float (&s)[N], float scale) {
        float best[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
            for (int i = 4; i < N; i += 4) {
                even = fmaxf(even, s[i + 2 * r]);
                odd = fmaxf(odd, s[i + 2 * r + 1]);
            }
            best[r] = quad_max(fmaxf(even, odd)) * scale;
        }
        follow(best);
        float even[2] = {sum[0], sum[1]}, odd[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < N; i += 4)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& x = s[i + 2 * r];
                float& y = s[i + 2 * r + 1];
                x = exp2_fast(fmaf(x, scale, -top[r]));
                y = exp2_fast(fmaf(y, scale, -top[r]));
                even[r] += x;
                odd[r] += y;
            }
        sum[0] = even[0] + odd[0];
        sum[1] = even[1] + odd[1];
    }

    // Ends a basic block on what all of update's exponentials went into. The assembler moves a wait for wgmma up
    // past arithmetic, but not past a branch; this one is never taken.
    __device__ __forceinline__ void settle() const {
        if (sum[0] + sum[1] < 0.0f) __trap();
    }

    // o *= alpha, where the last update moved a top of this warp.
    template <int N>
    __device__ __forceinline__ void rescale(float (&o)[N]) const {
        if (!moved) return;
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] *= alpha[i / 2 % 2];
    }
};

// o /= the whole rows' sums, of which each thread of a quad holds a part.
template <int N>
__device__ __forceinline__ void divide(float (&o)[N], const float (&sums)[2]) {
    const float inverse[2] = {reciprocal(quad_sum(sums[0])), reciprocal(quad_sum(sums[1]))};
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= inverse[i / 2 % 2];
}

// Probabilities as the A fragments of the second product, rounded once: p[4k … 4k+3] is k-step k.
template <int N>
__device__ __forceinline__ void to_fragments(const float (&s)[N], u32 (&p)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// Hides the columns from `end[r]` on in this thread's two rows; `end` counts from the thread's first column.
template <int N>
__device__ __forceinline__ void hide(float (&s)[N], int first_end, int second_end) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int column = i / 4 * 8 + i % 2;
        if (column >= (i / 2 % 2 ? second_end : first_end)) s[i] = -INFINITY;
    }
}
