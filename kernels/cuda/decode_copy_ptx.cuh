// The PTX of attention_decode's loads beyond decode_ptx.cuh: a copy of rank 5 without a hint, and cp.async.
#pragma once

#include "decode_ptx.cuh"

__device__ __forceinline__ void tma_load_5d_plain(u32 dst, const TensorMap* map, u32 bar, int a, int b, int c, int d,
                                                  int e) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e)
        : "memory");
}

// 16 bytes past L1; L2 fetches BYTES around what it misses (0: what it likes), and follows `policy` where ONCE is 1.
template <int BYTES, int ONCE>
__device__ __forceinline__ void copy_async(u32 dst, const void* src, u64 policy) {
    static_assert(BYTES == 0 || BYTES == 128 || BYTES == 256, "L2 has prefetches of 128 and 256 bytes");
    if constexpr (ONCE && BYTES == 256)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                     "l"(policy)
                     : "memory");
    else if constexpr (ONCE && BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                     "l"(policy)
                     : "memory");
    else if constexpr (ONCE)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
                     : "memory");
    else if constexpr (BYTES == 256)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
    else if constexpr (BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
