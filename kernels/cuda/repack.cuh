// Copies rows that start on any 2 bytes to rows that start on 128: what TMA can load.
//
// A warp copies RUN chunks of 16 bytes a lane. It reads the aligned 16 bytes that hold a chunk's first element and
// the next 16, which its neighbour reads too and the L1 has, and shifts them; the shift is the same for a whole row.
#pragma once

#include "ptx.cuh"

constexpr int RUN = 4;
constexpr int REPACK_WARPS = 8;

// `rows` rows of `columns` elements, one after the other, to rows that are `pitch` chunks apart.
struct Matrix {
    const u16* from;
    uint4* to;
    int rows, columns;
    int chunks, pitch;  // a row's, in 16 bytes
    int runs, warps;    // warps a row, and of the matrix: 0 where there is nothing to copy
};

__device__ __forceinline__ uint4 load_first(const char* p, u64 policy) {
    uint4 v;
    asm volatile("ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}

// Bytes [shift, shift + 16) of `low` and `high`; `shift` is even and below 16.
__device__ __forceinline__ uint4 realign(const uint4& low, const uint4& high, int shift) {
    u32 w[7] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z};
    u32 last = high.w;
    if (shift & 8) {
        w[0] = w[2], w[1] = w[3], w[2] = w[4], w[3] = w[5], w[4] = w[6], w[5] = last;
    }
    if (shift & 4) {
        w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4], w[4] = w[5];
    }
    if (shift & 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], 16);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void copy_run(const Matrix& x, int warp, int lane) {
    const int row = warp / x.runs, first = (warp - row * x.runs) * (32 * RUN) + lane;
    const u64 begin = reinterpret_cast<u64>(x.from + size_t(row) * x.columns);
    const u64 end = begin + size_t(x.columns) * 2;
    const int shift = begin & 15;
    const char* const aligned = reinterpret_cast<const char*>(begin - shift);
    const u64 policy = policy_evict_first();
    uint4 low[RUN], high[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        // 16 aligned bytes with an element of the row in them: no page is touched that is not the matrix's
        const char* const at = aligned + size_t(first + i * 32) * 16;
        low[i] = high[i] = make_uint4(0, 0, 0, 0);
        if (reinterpret_cast<u64>(at) < end) low[i] = load_first(at, policy);
        if (shift && reinterpret_cast<u64>(at) + 16 < end) high[i] = load_first(at + 16, policy);
    }
    uint4* const to = x.to + size_t(row) * x.pitch;
#pragma unroll
    for (int i = 0; i < RUN; ++i)
        if (first + i * 32 < x.chunks) to[first + i * 32] = realign(low[i], high[i], shift);
}

// Both operands in one launch. What a row's last chunk holds beyond the row is not read: the tensor map ends there.
extern "C" __global__ void __launch_bounds__(32 * REPACK_WARPS)
    repack(const __grid_constant__ Matrix a, const __grid_constant__ Matrix b) {
    launch_dependents();
    const int warp = blockIdx.x * REPACK_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < a.warps)
        copy_run(a, warp, lane);
    else if (warp - a.warps < b.warps)
        copy_run(b, warp - a.warps, lane);
}
