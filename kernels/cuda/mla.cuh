// What mla_decode.cu needs of wgmma beyond wgmma.cuh: 256 columns whose B operand lies row by row, k outermost.
#pragma once

#include "decode.cuh"

// Descriptor of B[16·n tokens][64·m columns] whose rows are tokens: 64-column tiles of 128-byte rows in the 128-byte
// swizzle, `tile_bytes` from one tile to the next. Columns are the contiguous dimension ("MN-major"): the leading
// offset is that between tiles, the stride offset that between 8 tokens (1024 bytes). Add 128 to step 16 tokens.
__device__ __forceinline__ u64 value_descriptor(u32 address, u32 tile_bytes) {
    constexpr u64 SWIZZLE_128B = 1ull << 62;
    constexpr u64 GROUP_STRIDE = u64(1024 >> 4) << 32;
    return SWIZZLE_128B | GROUP_STRIDE | (u64(tile_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

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
