// The functions of kernels/cuda/decode_ptx.cuh on the machine of machine.h.
#pragma once

#include "ptx.cuh"

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float minus_infinity() { return -INFINITY; }
inline void named_arrive(int id, int threads) { meet(machine.current->block->named[id], threads, false); }

inline void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int a, int b, int c, int d, int e, u64) {
    copy_later({machine.current->block}, dst, map, bar, {a, b, c, d, e});
}
inline std::vector<Block*> blocks_of(u16 mask) {
    std::vector<Block*> found;
    for (Block* block : machine.cluster)
        if (mask >> block->rank & 1) found.push_back(block);
    return found;
}
inline void tma_multicast_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 blocks, u64) {
    copy_later(blocks_of(blocks), dst, map, bar, {x, y});
}

inline void load_matrices(u32 (&m)[4], u32 address, bool transposed) {
    const auto& rows = exchange({address});
    const int lane = machine.current->lane();
    for (int i = 0; i < 4; ++i) {
        m[i] = 0;
        for (int j = 0; j < 2; ++j) {
            const int row = transposed ? lane % 4 * 2 + j : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + j;
            const u32 from = u32(rows[8 * i + row][0]);
            demand(from % 16 == 0, "ldmatrix: a row is not aligned");
            m[i] |= u32(*reinterpret_cast<const u16*>(shared_byte(from + 2 * column))) << 16 * j;
        }
    }
}
inline void ldmatrix(u32 (&m)[4], u32 address) { load_matrices(m, address, false); }
inline void ldmatrix_transposed(u32 (&m)[4], u32 address) { load_matrices(m, address, true); }

inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto& all = exchange({a0, a1, a2, a3, b0, b1});
    const int lane = machine.current->lane();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const float a = half_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
            d[i] += a * half_of(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
        }
    }
}

inline uint4 load_shared_quad(u32 address) {
    demand(address % 16 == 0, "a 16-byte load is not aligned");
    uint4 v;
    std::memcpy(&v, shared_byte(address), 16);
    return v;
}
inline float low_half(u32 word) { return half_of(word, 0); }
inline float high_half(u32 word) { return half_of(word, 1); }

// A in registers.
inline void multiply_registers(float* d, int columns, const u32 (&a)[4], u64 b, bool b_outer, bool keep) {
    const auto& all = exchange({a[0], a[1], a[2], a[3]});
    Block* const block = machine.current->block;
    const int thread = machine.current->thread;
    Fragment rows;
    for (int r = 0; r < 2; ++r)
        for (int k = 0; k < 16; ++k)
            rows[r][k] = half_of(all[thread % 32 / 4 * 4 + k % 8 / 2][r + k / 8 * 2], k % 2);
    machine.current->open.emplace_back([=] { multiply_fragment(d, columns, rows, block, thread, b, b_outer, keep); });
}
inline void multiply_values(float (&d)[128], const u32 (&a)[4], u64 b, int keep) {
    multiply_registers(d, 256, a, b, true, keep);
}
inline void multiply_values(float (&d)[128], u64 a, u64 b, int keep) {
    multiply_shared(d, 256, a, false, b, true, keep);
}
inline void multiply_transposed(float (&d)[8], u64 a, u64 b) { multiply_shared(d, 16, a, true, b, false, true); }
inline void multiply_transposed(float (&d)[16], u64 a, u64 b) { multiply_shared(d, 32, a, true, b, false, true); }

template <int N>
void settle(float (&)[N]) {
    asm volatile("" ::: "memory");
}
