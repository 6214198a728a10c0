// The PTX that the kernels here need and CUDA C++ does not name: TMA, mbarrier, wgmma, clusters.
// Written for sm_90a. Shared-memory addresses are 32-bit (shared::cta window) throughout.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#ifndef BF16
#define BF16 1
#endif

// What cuTensorMapEncodeTiled fills in; opaque here, so that cuda.h is not needed.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 smem_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- mbarrier ------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives at the barrier with the same address in block `rank` of the cluster. It orders no ordinary memory
// accesses between blocks (release at cluster scope costs a MEMBAR): what it guards is read by wgmma alone.
__device__ __forceinline__ void barrier_arrive_at(u32 bar, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(bar),
        "r"(rank)
        : "memory");
}

// Returns once the phase of parity `parity` has completed. A fresh barrier counts parity 1 as completed.
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra passed;\n"
        "bra again;\n"
        "passed:\n"
        "}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}

// bar.sync of `threads` threads on hardware barrier `id` (0 is __syncthreads).
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA -----------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ u64 policy_evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 policy_evict_last() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            dst),
        "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "l"(policy)
        : "memory");
}

// Writes the box, and signals the barrier, at the same offsets in every block whose bit is set in `blocks`.
__device__ __forceinline__ void tma_multicast(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, u32 src, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src),
                 "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's store groups still read shared memory.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Orders ordinary shared-memory writes of this thread before later accesses by TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters and registers ------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- epilogue --------------------------------------------------------------------------------------

// Two floats as packed bf16 or fp16, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 out;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
    return out;
}

__device__ __forceinline__ void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

// Stores two elements; `p` is a multiple of 4.
__device__ __forceinline__ void store_pair(u16* p, u32 word) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}

// ---- dependent launches ------------------------------------------------------------------------------

// Lets the next kernel of the stream start, if it was launched as a dependent, once all blocks have said so.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernels that this one depends on have ended; nothing to wait for in an ordinary launch.
__device__ __forceinline__ void wait_for_prerequisites() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- wgmma -----------------------------------------------------------------------------------------

// Descriptor of a K-major tile of 128-byte rows in the 128-byte swizzle: 8 rows a swizzle atom, so the
// stride between atoms is 1024 bytes; the leading offset is not used in this mode. Add 2 to step 16
// elements along K, 512 to step 64 rows.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    constexpr u64 SWIZZLE_128B = 1ull << 62;
    constexpr u64 ATOM_STRIDE = u64(1024 >> 4) << 32;
    constexpr u64 LEADING_UNUSED = 1ull << 16;
    return SWIZZLE_128B | ATOM_STRIDE | LEADING_UNUSED | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING committed groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#include "wgmma.cuh"
