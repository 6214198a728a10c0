// What the attention kernels need beyond ptx.cuh: wgmma with A in registers and B stored row by row (V), its
// descriptor, one-sided named barriers, exp2, and an online softmax on wgmma's fragments.
#pragma once

#include "ptx.cuh"

// ---- wgmma: D[64,N] += A[64,16] · B[16,N] ------------------------------------------------------------

// A is a warpgroup's fragment: for lane l of warp w, a[0] holds row 16w + l/4, columns 2(l%4) and the next one,
// a[1] the same columns of the row 8 below, a[2] and a[3] the columns 8 further on. B lies in shared memory with
// N contiguous, which is what the last operand, "transpose B", says.
template <int N>
struct WgmmaRows;

#define WGMMA_ROWS(N, REGISTERS, BINDINGS, A0, A1, A2, A3, B, KEEP)                                         \
    template <>                                                                                             \
    struct WgmmaRows<N> {                                                                                   \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const u32* a, u64 b) {                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" REGISTERS            \
                         "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 1;\n}\n"           \
                         : BINDINGS                                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));                     \
        }                                                                                                   \
    };

WGMMA_ROWS(64, R32, F32, 32, 33, 34, 35, 36, 37)
WGMMA_ROWS(128, R64, F64, 64, 65, 66, 67, 68, 69)
WGMMA_ROWS(256, R128, F128, 128, 129, 130, 131, 132, 133)

// Descriptor of a B tile of rows along K and N contiguous, in the 128-byte swizzle: columns lie in chunks of 64
// (one 128-byte row), each a block of its own. Here the leading offset is that from one chunk to the next, the
// stride that from 8 rows to the next 8, 1024 bytes. Add 128 to step 16 rows along K.
__device__ __forceinline__ u64 rows_descriptor(u32 address, u32 chunk_bytes) {
    constexpr u64 SWIZZLE_128B = 1ull << 62;
    constexpr u64 ATOM_STRIDE = u64(1024 >> 4) << 32;
    return SWIZZLE_128B | ATOM_STRIDE | (u64(chunk_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// The descriptor of what lies `bytes` further on.
__device__ __forceinline__ u64 advance(u64 descriptor, u32 bytes) {
    return descriptor + (bytes >> 4);
}

// Keeps what reads a register after a wait from being moved before it: to the compiler a wgmma's sums are there
// as soon as it is issued.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int N>
__device__ __forceinline__ void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = 0.0f;
}

// ---- barriers and shared memory ------------------------------------------------------------------------

// Counts this warp in at hardware barrier `id` of `threads` threads and goes on.
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ int4 load_shared4(u32 address) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// What is the same in all lanes, in a uniform register: that is where the reduction leaves it, and what is computed
// from it stays there.
__device__ __forceinline__ u32 uniform(u32 x) {
    return __reduce_or_sync(~0u, x);
}

__device__ __forceinline__ void store_shared4(u32 address, int4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// ---- online softmax ------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

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
// largest score: it follows only where that has grown by more than 8, so that most tiles need no rescaling. What
// is then up to 256 instead of 1 keeps its relative precision in bf16, fp16 and fp32. `sum` covers this thread's
// columns; `alpha` is what earlier sums are to be scaled by.
struct Softmax {
    static constexpr float SLACK = 8.0f;
    float top[2] = {-1e30f, -1e30f};  // finite, so that a row without a visible key makes no NaN
    float sum[2] = {0.0f, 0.0f};
    float alpha[2] = {1.0f, 1.0f};

    // s = exp2(s · scale - top); alpha and sum follow. s[4n], s[4n+1] belong to the first row, the other two
    // to the second.
    template <int N>
    __device__ __forceinline__ void update(float (&s)[N], float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
            for (int i = 4; i < N; i += 4) {
                even = fmaxf(even, s[i + 2 * r]);
                odd = fmaxf(odd, s[i + 2 * r + 1]);
            }
            const float best = quad_max(fmaxf(even, odd)) * scale;
            const float before = top[r];
            top[r] = best > before + SLACK ? best : before;
            alpha[r] = exp2_fast(before - top[r]);
            sum[r] *= alpha[r];
        }
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

    // o *= alpha, where any row of this warp needs it.
    template <int N>
    __device__ __forceinline__ void rescale(float (&o)[N]) const {
        if (!__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
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
