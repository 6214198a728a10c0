// What attention_prefill.cu needs beyond ptx.cuh: wgmma with A in registers and B stored row by row (V), its
// descriptor, one-sided named barriers, exp2 and the reciprocal.
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

// ---- numbers ------------------------------------------------------------------------------------------

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
