// The PTX that mla_held.cu needs beyond decode_ptx.cuh.
#pragma once

#include "decode_ptx.cuh"

// d[64,64] (+)= a[64,16] · b[64,16]ᵀ, a in registers as multiply_values takes it, b as tile_descriptor describes it.
// `keep` 0 overwrites d.
__device__ __forceinline__ void multiply_keys(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES " {" R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : F32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

__device__ __forceinline__ void tma_load_3d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

// As tma_multicast, of rank 3 and with a hint.
__device__ __forceinline__ void tma_multicast_3d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z,
                                                 u16 blocks, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(blocks), "l"(policy)
        : "memory");
}

// Asks L2 for a box that will be loaded later.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
