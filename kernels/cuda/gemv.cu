// C[M,N] = A[M,K] · B[N,K]ᵀ for one to four tokens, on the CUDA cores: B is read once, 16 bytes a lane, past
// the L1. A warp does ROWS rows of B, or one of SPLITS equal shares of their K; LOADS loads a row are in flight
// before the first is used. The shares of a row are added in shared memory, in order. K is a multiple of 8.
//
// Macros: TOKENS ROWS SPLITS LOADS RESIDENT BF16
#include "ptx.cuh"

constexpr int WARPS = 8;
constexpr int TEAMS = WARPS / SPLITS;  // groups of warps that share rows
static_assert(WARPS % SPLITS == 0, "a row is shared by whole teams of warps");

struct Chunk {
    u32 word[4];
};

__device__ __forceinline__ Chunk load_once(const void* p) {
    Chunk c;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
                 : "l"(p));
    return c;
}

__device__ __forceinline__ Chunk load_cached(const void* p) {
    const uint4 v = __ldg(static_cast<const uint4*>(p));
    return Chunk{{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ float low(u32 word) {
#if BF16
    return __uint_as_float(word << 16);
#else
    float out;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(out) : "r"(word));
    return out;
#endif
}

__device__ __forceinline__ float high(u32 word) {
#if BF16
    return __uint_as_float(word & 0xFFFF0000u);
#else
    return low(word >> 16);
#endif
}

__device__ __forceinline__ void multiply_add(float& sum, const Chunk& a, const Chunk& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(low(a.word[i]), low(b.word[i]), sum);
        sum = fmaf(high(a.word[i]), high(b.word[i]), sum);
    }
}

// Multiplies COUNT chunks of each row, `at`, at + 32, …, all loaded before the first is used.
template <int COUNT>
__device__ __forceinline__ void step(float (&sum)[ROWS][TOKENS], const u16* const (&row)[ROWS], const u16* a, int at,
                                     int m, int k) {
    Chunk weights[ROWS][COUNT];
#pragma unroll
    for (int l = 0; l < COUNT; ++l)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) weights[r][l] = load_once(row[r] + size_t(at + l * 32) * 8);
#pragma unroll
    for (int l = 0; l < COUNT; ++l)
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const Chunk tokens = load_cached(a + size_t(min(t, m - 1)) * k + size_t(at + l * 32) * 8);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) multiply_add(sum[r][t], tokens, weights[r][l]);
        }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    gemv(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n, int k) {
    __shared__ float shares[SPLITS][TEAMS * ROWS * TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / SPLITS, share = warp % SPLITS;
    const int first = (blockIdx.x * TEAMS + team) * ROWS;
    const int chunks = k / 8;
    // Rows past the end read the last one, and are not stored.
    const u16* row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = b + size_t(min(first + r, n - 1)) * k;

    float sum[ROWS][TOKENS] = {};
    for (int base = share * LOADS * 32; base < chunks; base += SPLITS * LOADS * 32) {
        if (base + LOADS * 32 <= chunks)
            step<LOADS>(sum, row, a, base + lane, m, k);
        else
            for (int at = base + lane; at < chunks; at += 32) step<1>(sum, row, a, at, m, k);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int d = 16; d > 0; d /= 2) sum[r][t] += __shfl_xor_sync(~0u, sum[r][t], d);
            if (lane == 0) shares[share][(team * ROWS + r) * TOKENS + t] = sum[r][t];
        }
    __syncthreads();
    for (int i = threadIdx.x; i < TEAMS * ROWS * TOKENS; i += 32 * WARPS) {
        const int at = blockIdx.x * TEAMS * ROWS + i / TOKENS, t = i % TOKENS;
        float total = 0.f;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) total += shares[s][i];
        if (at < n && t < m) c[size_t(t) * n + at] = static_cast<u16>(pack(total, 0.f));
    }
}
