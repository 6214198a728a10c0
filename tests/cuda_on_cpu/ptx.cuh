// The functions of kernels/cuda/ptx.cuh on the machine of machine.h. A tensor map is what the tests make of it.
#pragma once

#include "machine.h"

struct alignas(64) TensorMap {
    char* base;
    int rank;
    long size[5], stride[5];  // elements; bytes
    int box[5];
};

inline u32 smem_address(const void* p) {
    return u32(static_cast<const unsigned char*>(p) - machine.current->block->smem.data());
}

inline void barrier_init(u32 bar, u32 arrivals) {
    demand(bar % 8 == 0, "an mbarrier is not aligned");
    machine.current->block->barriers[bar] = Mbarrier{int(arrivals), int(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_expect(u32 bar, u32 bytes) { arrive(machine.current->block, bar, bytes); }
inline void barrier_arrive(u32 bar) { arrive(machine.current->block, bar, 0); }
inline void barrier_arrive_at(u32 bar, u32 rank) { arrive(machine.cluster[rank], bar, 0); }
inline void barrier_wait(u32 bar, u32 parity) {
    const Mbarrier& b = mbarrier(machine.current->block, bar);
    while (b.phase == parity) yield();
}
inline void named_sync(int id, int threads) { meet(machine.current->block->named[id], threads, true); }
inline u32 cluster_rank() { return machine.current->block->rank; }
inline void cluster_sync() { meet(machine.cluster_barrier, machine.cluster_threads, true); }

inline void fence_async_proxy() {}
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
inline u64 policy_evict_first() { return 0; }
inline void prefetch_map(const TensorMap*) {}
template <int REGISTERS>
void registers_down() {}
template <int REGISTERS>
void registers_up() {}

// The 128-byte swizzle: 16-byte columns of a 128-byte row change places by the row's number modulo 8.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy_box(const std::vector<Block*>& to, u32 dst, const TensorMap& map, u32 bar, std::array<int, 5> at) {
    demand(dst % 128 == 0, "a box does not begin on a row");  // the swizzle goes by the address
    std::array<int, 5> n{1, 1, 1, 1, 1}, i{};
    std::copy(map.box, map.box + map.rank, n.begin());
    const int total = n[0] * n[1] * n[2] * n[3] * n[4];
    for (int e = 0; e < total; ++e) {
        bool inside = true;
        long offset = 0;
        for (int d = 0; d < map.rank; ++d) {
            const long x = at[d] + i[d];
            inside = inside && x >= 0 && x < map.size[d];
            offset += x * map.stride[d];
        }
        const u16 value = inside ? *reinterpret_cast<const u16*>(map.base + offset) : u16(0);
        for (Block* block : to) *reinterpret_cast<u16*>(shared_byte(block, swizzled(dst + 2 * e))) = value;
        for (int d = 0; d < 5 && ++i[d] == n[d]; ++d) i[d] = 0;
    }
    for (Block* block : to) {
        Mbarrier& b = mbarrier(block, bar);
        b.bytes -= 2 * total;
        settle_phase(b);
    }
}

inline void copy_later(const std::vector<Block*>& to, u32 dst, const TensorMap* map, u32 bar, std::array<int, 5> at) {
    machine.copies.emplace_back(int(machine.random() % 40), [=] { copy_box(to, dst, *map, bar, at); });
    ++machine.progress;
}

inline void tma_load_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u64) {
    copy_later({machine.current->block}, dst, map, bar, {x, y});
}
inline void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) { tma_load_hint(dst, map, bar, x, y, 0); }

inline u32 pack(float low, float high) { return to_low(low) | u32(to_low(high)) << 16; }

// Stores 8x8 matrices whose rows lanes 8·i to 8·i + 7 address; transposed, a lane's pair lies in two rows.
template <size_t COUNT>
void store_matrices(u32 address, const u32 (&words)[COUNT], bool transposed) {
    const auto& rows = exchange({address});
    const int lane = machine.current->lane();
    for (size_t i = 0; i < COUNT; ++i)
        for (int j = 0; j < 2; ++j) {
            const int row = transposed ? lane % 4 * 2 + j : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + j;
            const u32 to = u32(rows[8 * i + row][0]);
            demand(to % 16 == 0, "stmatrix: a row is not aligned");
            *reinterpret_cast<u16*>(shared_byte(to + 2 * column)) = u16(words[i] >> 16 * j);
        }
    __syncwarp();
}
inline void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) { store_matrices<4>(address, {a, b, c, d}, false); }
inline void stmatrix_transposed(u32 address, u32 a, u32 b) { store_matrices<2>(address, {a, b}, true); }

// ---- wgmma -----------------------------------------------------------------------------------------------

inline u64 tile_descriptor(u32 address) { return 1ull << 62 | 64ull << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4; }

// Element (row, k) of an operand, of which a descriptor says where it lies: rows contiguous along k, or `outer`: k
// outermost, 64 rows to a line.
inline float element(Block* block, u64 descriptor, int row, int k, bool outer) {
    const u32 start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
              stride = (descriptor >> 32 & 0x3FFF) << 4;
    demand(descriptor >> 62 == 1, "a descriptor of another swizzle");
    const u32 at = outer ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                         : start + row / 8 * stride + row % 8 * 128 + k * 2;
    return to_float(*reinterpret_cast<const u16*>(shared_byte(block, swizzled(at))));
}

using Fragment = std::array<std::array<float, 16>, 2>;  // a lane's two rows of A

inline Fragment load_fragment(Block* block, int thread, u64 a, bool outer) {
    Fragment rows;
    for (int r = 0; r < 2; ++r)
        for (int k = 0; k < 16; ++k)
            rows[r][k] = element(block, a, thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * r, k, outer);
    return rows;
}

inline void multiply_fragment(float* d, int columns, const Fragment& a, Block* block, int thread, u64 b, bool outer,
                              bool keep) {
    for (int i = 0; i < columns / 4; ++i) {
        const int column = i / 2 * 8 + thread % 4 * 2 + i % 2;
        for (int r = 0; r < 2; ++r) {
            float& out = d[i / 2 * 4 + 2 * r + i % 2];
            float sum = keep ? out : 0.f;
            for (int k = 0; k < 16; ++k) sum += a[r][k] * element(block, b, column, k, outer);
            out = sum;
        }
    }
}

inline void multiply_shared(float* d, int columns, u64 a, bool a_outer, u64 b, bool b_outer, bool keep) {
    Block* const block = machine.current->block;
    const int thread = machine.current->thread;
    machine.current->open.emplace_back([=] {
        multiply_fragment(d, columns, load_fragment(block, thread, a, a_outer), block, thread, b, b_outer, keep);
    });
}

template <int N>
struct Wgmma {
    static void run(float (&d)[N / 2], u64 a, u64 b, int keep) { multiply_shared(d, N, a, false, b, false, keep); }
};

inline void run_groups(size_t leave) {
    auto& groups = machine.current->groups;
    while (groups.size() > leave) {
        for (const Task& task : groups.front()) task();
        groups.erase(groups.begin());
    }
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
    machine.current->groups.push_back(std::move(machine.current->open));
    machine.current->open.clear();
    __syncwarp();
    if (machine.random() % 3 == 0) {  // early
        const size_t count = machine.current->groups.size();
        run_groups(0);
        machine.current->groups.resize(count);
    }
}
template <int PENDING>
void wgmma_wait() {
    __syncwarp();
    run_groups(PENDING);
    __syncwarp();
}
