// The PTX of attention_decode's loads beyond decode_ptx.cuh: cp.async.
#pragma once

#include "decode_ptx.cuh"

// 16 bytes past L1, to be evicted first by `policy`; L2 fetches BYTES around what it misses (0: what it likes).
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 dst, const void* src, u64 policy) {
    static_assert(BYTES == 0 || BYTES == 128, "what the host may choose");
    if constexpr (BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                     "l"(policy)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
                     : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
