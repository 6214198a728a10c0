// The PTX that the decode kernels need beyond ptx.cuh: mma.sync and its fragments, copies of rank 5 and with a hint
// to several blocks, base-2 exponentials, wgmma whose operands have k as the outermost dimension in memory.
#pragma once

#include "ptx.cuh"

// 2^x; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x) of a normal number.
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// bar.arrive on hardware barrier `id`: as named_sync, without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int a, int b, int c, int d, int e,
                                            u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "l"(policy)
        : "memory");
}

// Four 8x8 matrices; lane 8·i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// d[16,8] += a[16,16] · b[16,8]. A lane holds rows lane/4 and lane/4 + 8 of d, columns 2·(lane%4) and the next.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
                 " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- wgmma -----------------------------------------------------------------------------------------

// d[64,256] (+)= a[64,16] · b[16,256], a in registers: rows lane/4 and lane/4 + 8 of the warp's 16, columns
// 2·(lane%4) and the next, then the same 8 columns later. `keep` 0 overwrites d.
__device__ __forceinline__ void multiply_values(float (&d)[128], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16" WGMMA_TYPES " {" R128
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        : F128
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// The same with a in shared memory, as tile_descriptor describes it.
__device__ __forceinline__ void multiply_values(float (&d)[128], u64 a, u64 b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16" WGMMA_TYPES " {" R128 "}, %128, %129, p, 1, 1, 0, 1;\n}\n"
        : F128
        : "l"(a), "l"(b), "r"(keep));
}

// d[64,16] += aᵀ·bᵀ: a[16 tokens][64 columns] as value_descriptor describes it, b[16][16 tokens] as tile_descriptor.
__device__ __forceinline__ void multiply_transposed(float (&d)[8], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16" WGMMA_TYPES " {" R8 "}, %8, %9, 1, 1, 1, 1, 0;\n"
                 : F8
                 : "l"(a), "l"(b));
}

// The same for b[32][16 tokens].
__device__ __forceinline__ void multiply_transposed(float (&d)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16" WGMMA_TYPES " {" R16 "}, %16, %17, 1, 1, 1, 1, 0;\n"
                 : F16
                 : "l"(a), "l"(b));
}

// To the compiler a wgmma's results are there when it is issued: this keeps what reads them behind the wait before.
template <int N>
__device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The numbers in the halves of a word.
__device__ __forceinline__ float low_half(u32 word) {
#if BF16
    return __uint_as_float(word << 16);
#else
    float x;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(x) : "r"(word));
    return x;
#endif
}

__device__ __forceinline__ float high_half(u32 word) {
#if BF16
    return __uint_as_float(word & 0xFFFF0000u);
#else
    return low_half(word >> 16);
#endif
}

// Writes the box, and signals the barrier, at the same offsets in every block whose bit is set in `blocks`.
__device__ __forceinline__ void tma_multicast_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 blocks,
                                                   u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "h"(blocks), "l"(policy)
        : "memory");
}

__device__ __forceinline__ uint4 load_shared_quad(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
