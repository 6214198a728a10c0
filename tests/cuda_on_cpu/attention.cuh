// The functions of kernels/cuda/attention.cuh, and the stores by TMA, on the machine of machine.h.
#pragma once

#include "ptx.cuh"

[[noreturn]] inline void __trap() { fail("trap"); }

inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.f / x; }
// Of a block that is a cluster of its own.
inline void __syncthreads() { meet(machine.current->block->named[0], machine.cluster_threads, true); }
inline void named_arrive(int id, int threads) { meet(machine.current->block->named[id], threads, false); }

inline u32 uniform(u32 x) {
    u32 all = 0;
    for (const auto& words : exchange({x})) all |= u32(words[0]);
    return all;
}

inline int4 load_shared4(u32 address) {
    demand(address % 16 == 0, "a 16-byte load is not aligned");
    int4 v;
    std::memcpy(&v, shared_byte(address), 16);
    return v;
}
inline void store_shared4(u32 address, int4 v) {
    demand(address % 16 == 0, "a 16-byte store is not aligned");
    std::memcpy(shared_byte(address), &v, 16);
}

inline u64 rows_descriptor(u32 address, u32 chunk_bytes) {
    return 1ull << 62 | 64ull << 32 | u64(chunk_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4;
}
inline u64 advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

template <int N>
void pin(float (&)[N]) {}
template <int N>
void clear(float (&x)[N]) {
    std::fill(x, x + N, 0.f);
}

template <int N>
struct WgmmaRows {
    static void run(float (&d)[N / 2], const u32* a, u64 b) {
        const auto& all = exchange({a[0], a[1], a[2], a[3]});
        Block* const block = machine.current->block;
        const int thread = machine.current->thread;
        Fragment rows;
        for (int r = 0; r < 2; ++r)
            for (int k = 0; k < 16; ++k)
                rows[r][k] = half_of(all[thread % 32 / 4 * 4 + k % 8 / 2][r + k / 8 * 2], k % 2);
        float* const to = d;
        machine.current->open.emplace_back([=] { multiply_fragment(to, N, rows, block, thread, b, true, true); });
    }
};

// ---- stores by TMA: shared memory is read late ----------------------------------------------------------

inline std::map<Fiber*, int> stores;  // of each thread, not yet read

inline void store_box(Block* block, const TensorMap& map, u32 src, int x, int y) {
    demand(src % 1024 % 128 == 0, "a box does not begin on a row of the swizzle");
    for (int row = 0; row < map.box[1]; ++row)
        for (int column = 0; column < map.box[0]; ++column) {
            if (x + column >= map.size[0] || y + row >= map.size[1]) continue;
            const u32 from = swizzled(src + row * 128 + column * 2);
            char* const to = map.base + (x + column) * map.stride[0] + (y + row) * map.stride[1];
            *reinterpret_cast<u16*>(to) = *reinterpret_cast<u16*>(shared_byte(block, from));
        }
}

inline void tma_store(const TensorMap* map, u32 src, int x, int y) {
    Fiber* const self = machine.current;
    ++stores[self];
    machine.copies.emplace_back(int(machine.random() % 40), [=] {
        store_box(self->block, *map, src, x, y);
        --stores[self];
    });
    ++machine.progress;
}
inline void tma_store_commit() {}
template <int PENDING>
void tma_store_wait() {
    static_assert(PENDING == 0);
    while (stores[machine.current] > 0) yield();
}
