// What TileLang's generated code calls (namespace tl and what its headers declare), on the machine of machine.h.
// Copies by TMA come late; a store reads shared memory when it is waited for, or at random before.
#pragma once

#include <cstdint>

#include "ptx.cuh"

using uchar = unsigned char;
using CUtensorMap = TensorMap;
using bfloat16_t = u16;
using half_t = u16;
struct __nv_bfloat162 { u16 x, y; };
using half2 = __nv_bfloat162;
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {to_low(v.x), to_low(v.y)}; }
inline half2 __float22half2_rn(float2 v) { return {to_low(v.x), to_low(v.y)}; }
struct uint1 { u32 x; };
template <class T>
T __shfl_sync(u32 mask, T x, int lane, int) { return __shfl_sync(mask, x, lane); }
inline u32 __pack_half2(u16 low, u16 high) { return low | u32(high) << 16; }

constexpr u32 DYNAMIC = 2048;  // where dynamic shared memory begins: on 1024 bytes, as TileLang asks for

inline unsigned char* tl_dynamic() { return machine.current->block->smem.data() + DYNAMIC; }

inline void __syncthreads() {
    meet(machine.current->block->named[0], machine.cluster_threads / int(machine.cluster.size()), true);
}

struct Barrier {
    uint64_t word;
    u32 address() const { return smem_address(this); }
    void init(u32 arrivals) { barrier_init(address(), arrivals); }
    void wait(u32 parity) { barrier_wait(address(), parity); }
    void arrive() { barrier_arrive(address()); }
    void arrive(u32 rank) { barrier_arrive_at(address(), rank); }
    void arrive_and_expect_tx(u32 bytes) { barrier_expect(address(), bytes); }
    void expect_transaction(u32 bytes) { mbarrier(machine.current->block, address()).bytes += bytes; }
};

// The `index`-th array of barriers of a kernel, at the end of shared memory.
inline Barrier* tl_barriers(int index) {
    auto& smem = machine.current->block->smem;
    return reinterpret_cast<Barrier*>(smem.data() + smem.size() / 64 * 64 - 512 + 128 * index);
}

struct StoreQueue {
    std::vector<Task> open;
    std::vector<std::vector<Task>> groups;
    void leave(size_t count) {
        for (; groups.size() > count; groups.erase(groups.begin()))
            for (const Task& task : groups.front()) task();
    }
};

inline std::map<const Fiber*, StoreQueue> stores;

namespace tl {

enum class DataType { kBFloat16, kFloat16, kFloat32 };

struct GmmaDescriptor {
    u64 word = 0;
    u64 operator+(int offset) const { return word + offset; }
};

template <int LAYOUT, int LEADING, int STRIDE, class T>
void initialize_wgmma_descriptor(GmmaDescriptor& d, T* start) {
    static_assert(LAYOUT == 1 && LEADING == 1 && STRIDE == 64, "another swizzle");
    demand(smem_address(start) % 1024 == 0, "an operand does not begin on a swizzle atom");
    d.word = tile_descriptor(smem_address(start));
}
template <class T>
void increase_descriptor_offset(GmmaDescriptor& d, T offset) {
    d.word += offset >> 4;
}

template <int THREADS>
bool tl_shuffle_elect() {
    __syncwarp();
    const int every = THREADS == 0 ? 1 << 20 : (THREADS + 31) / 32;
    return machine.current->lane() == 0 && machine.current->thread / 32 % every == 0;
}

inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void cluster_sync() { ::cluster_sync(); }
template <int REGISTERS>
void warpgroup_reg_alloc() {}
template <int REGISTERS>
void warpgroup_reg_dealloc() {}
inline void __sync_thread_partial(int id, int threads) { named_sync(id, threads); }

inline void load_later(const std::vector<Block*>& to, const CUtensorMap& map, Barrier& bar, const void* at,
                       std::array<int, 5> xyz) {
    const u32 dst = smem_address(at), signal = bar.address();
    machine.copies.emplace_back(int(machine.random() % 40), [=] { copy_box(to, dst, map, signal, xyz); });
    ++machine.progress;
}
inline void tma_load(const CUtensorMap& map, Barrier& bar, const void* at, int x, int y, int z) {
    load_later({machine.current->block}, map, bar, at, {x, y, z});
}
inline void tma_load(const CUtensorMap& map, Barrier& bar, const void* at, int x, int y) {
    tma_load(map, bar, at, x, y, 0);
}
inline void tma_load_multicast(const CUtensorMap& map, Barrier& bar, const void* at, uint16_t mask, int x, int y,
                               int z = 0) {
    demand(mask == (1 << machine.cluster.size()) - 1, "a multicast to another cluster");
    load_later(machine.cluster, map, bar, at, {x, y, z});
}

inline void write_box(Block* block, u32 src, const TensorMap& map, std::array<int, 3> at) {
    demand(src % 1024 == 0, "a box does not begin on a swizzle atom");
    for (int y = 0; y < map.box[1]; ++y)
        for (int x = 0; x < map.box[0]; ++x) {  // a row of a narrower box takes 128 bytes too
            const long i = at[0] + x, j = at[1] + y;
            if (i < map.size[0] && j < map.size[1] && at[2] < map.size[2])
                *reinterpret_cast<u16*>(map.base + i * map.stride[0] + j * map.stride[1] + at[2] * map.stride[2]) =
                    *reinterpret_cast<const u16*>(shared_byte(block, swizzled(src + 128 * y + 2 * x)));
        }
}
inline void tma_store(const CUtensorMap& map, const void* at, int x, int y, int z = 0) {
    Block* const block = machine.current->block;
    const u32 src = smem_address(at);
    stores[machine.current].open.push_back([=] { write_box(block, src, map, {x, y, z}); });
}
inline void tma_store_arrive() {
    StoreQueue& q = stores[machine.current];
    q.groups.push_back(std::move(q.open));
    q.open.clear();
    if (machine.random() % 4 == 0) {  // early; a group done stays in the count
        const size_t count = q.groups.size();
        q.leave(0);
        q.groups.resize(count);
    }
}
template <int PENDING, bool READ>
void tma_store_wait() {
    stores[machine.current].leave(PENDING);
}

inline void ptx_stmatrix_m8n8_x2(const void* at, u32 a, u32 b) { store_matrices<2>(smem_address(at), {a, b}, false); }
inline void ptx_stmatrix_m8n8_x4(const void* at, u32 a, u32 b, u32 c, u32 d) {
    store_matrices<4>(smem_address(at), {a, b, c, d}, false);
}
inline void ptx_stmatrix_m8n8_x4_trans(const void* at, u32 a, u32 b, u32 c, u32 d) {
    store_matrices<4>(smem_address(at), {a, b, c, d}, true);
}

inline void warpgroup_fence_operand(float*, int) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { wgmma_commit(); }
template <int PENDING>
void wait_wgmma() {
    wgmma_wait<PENDING>();
}
template <DataType, DataType, DataType, int M, int N, int K, bool, bool, int, int>
void wgmma_ss(u64 a, u64 b, u32* sums, int keep) {
    static_assert(M == 64 && K == 16, "a wgmma of 2-byte elements");
    multiply_shared(reinterpret_cast<float*>(sums), N, a, false, b, false, keep);
}

}  // namespace tl
