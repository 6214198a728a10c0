// C[M,N] = A[M,K] · B[N,K]ᵀ for few tokens (M <= 128): operands swapped, so that 64 rows of the weights B fill
// the M of wgmma and the tokens are its N. The time is that of reading B once, so what counts is bytes in
// flight: a deep ring, filled by one warp, and every block with the same share of B (stream-K, see tiles.cuh).
//
// Each of CONSUMERS warpgroups multiplies 64 rows of B with all TOKENS rows of A (those past M read as zero).
// The finished sums are transposed on their way to shared memory and stored by TMA, which clips M and N.
//
// Macros: TOKENS CONSUMERS K_ROWS STAGES RESIDENT PARTIAL BF16 SMEM_BYTES
#include "tiles.cuh"

constexpr int THREADS = 128 * CONSUMERS + 32;
constexpr int WEIGHTS = 64 * CONSUMERS;                                     // rows of B in a tile
constexpr int B_BYTES = WEIGHTS * 128, A_BYTES = TOKENS * 128;              // of one k-block of 64
constexpr int STAGE_BYTES = K_ROWS * (A_BYTES + B_BYTES);                   // K_ROWS k-blocks
constexpr int OFFSET_STORE = STAGES * STAGE_BYTES;                          // TOKENS rows of 64 columns a warpgroup
constexpr int OFFSET_BARRIERS = OFFSET_STORE + CONSUMERS * TOKENS * 128;
constexpr int OFFSET_FLAGS = OFFSET_BARRIERS + 2 * STAGES * 8;
static_assert(1024 + OFFSET_FLAGS + 4 * CONSUMERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(TOKENS % 8 == 0 && TOKENS <= 128, "tokens are the N of one wgmma");

struct Shared {
    u32 base;
    __device__ __forceinline__ u32 b(int stage, int k) const { return base + stage * STAGE_BYTES + k * B_BYTES; }
    __device__ __forceinline__ u32 a(int stage, int k) const { return b(stage, K_ROWS) + k * A_BYTES; }
    __device__ __forceinline__ u32 store(int owner) const { return base + OFFSET_STORE + owner * TOKENS * 128; }
    __device__ __forceinline__ u32 full(int stage) const { return base + OFFSET_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Here a "k-block" of WorkArgs is a stage: K_ROWS times 64 elements.
__device__ __forceinline__ void produce(const TensorMap& a, const TensorMap& b, const WorkArgs& args,
                                        const Shared& shared) {
    const u64 once = policy_evict_first(), again = policy_evict_last();
    Ring ring;
    Segments<PARTIAL> work(args, blockIdx.x, gridDim.x);
    Segment s;
    while (work.next(s)) {
        const int n = s.tile * WEIGHTS;
#pragma unroll 1
        for (int i = s.kb; i < s.kb + s.count; ++i, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 full = shared.full(ring.stage);
            barrier_expect(full, STAGE_BYTES);
#pragma unroll
            for (int k = 0; k < K_ROWS; ++k) {
                const int x = (i * K_ROWS + k) * 64;
                tma_load_hint(shared.b(ring.stage, k), &b, full, x, n, once);
                tma_load_hint(shared.a(ring.stage, k), &a, full, x, 0, again);
            }
        }
    }
}

__device__ __forceinline__ void multiply(float (&acc)[1][TOKENS / 2], int count, Ring& ring, const Shared& shared,
                                         int owner, int lane) {
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring.next()) {
        barrier_wait(shared.full(ring.stage), ring.phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_ROWS; ++k) {
            const u64 b = tile_descriptor(shared.b(ring.stage, k) + owner * 64 * 128);
            const u64 a = tile_descriptor(shared.a(ring.stage, k));
#pragma unroll
            for (int step = 0; step < 4; ++step)
                Wgmma<TOKENS>::run(acc[0], b + step * 2, a + step * 2, i | k | step);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && lane == 0) barrier_arrive(shared.empty(previous));
        previous = ring.stage;
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(shared.empty(previous));
}

// acc (64 rows of B x TOKENS) as TOKENS rows of 64 columns of C in the 128-byte swizzle.
__device__ __forceinline__ void stage_transposed(const float (&acc)[TOKENS / 2], u32 buffer, int warp, int lane) {
    const u32 column = warp * 2 + (lane >> 3 & 1);  // 16 bytes: 8 rows of B
    const u32 line = buffer + (lane & 7) * 128 + (column ^ (lane & 7)) * 16;
#pragma unroll
    for (int t = 0; t < TOKENS; t += 8) {
        const float* const v = &acc[t / 2];
        stmatrix_transposed(line + t * 128, pack(v[0], v[1]), pack(v[2], v[3]));
    }
}

__device__ __forceinline__ void consume(const TensorMap& c, const WorkArgs& args, const Shared& shared, int owner,
                                        volatile int* flag) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int bar = 1 + owner;
    Ring ring;
    Segments<PARTIAL> work(args, blockIdx.x, gridDim.x);
    Segment s;
    while (work.next(s)) {
        float acc[1][TOKENS / 2];  // first written by a wgmma that ignores what it held
        multiply(acc, s.count, ring, shared, owner, lane);
        if constexpr (PARTIAL) {
            if (!gather(acc, args, s, owner, CONSUMERS, thread, bar, flag)) continue;
        }
        const int n = s.tile * WEIGHTS + owner * 64;
        if (thread == 0) tma_store_wait<0>();
        named_sync(bar, 128);
        stage_transposed(acc[0], shared.store(owner), warp, lane);
        fence_async_proxy();
        named_sync(bar, 128);
        if (thread == 0 && n < args.n) {
            tma_store(&c, shared.store(owner), n, 0);
            tma_store_commit();
        }
    }
    if (thread == 0) tma_store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gemm_skinny(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                const __grid_constant__ TensorMap c, const __grid_constant__ WorkArgs args) {
    extern __shared__ unsigned char raw[];
    const u32 start = smem_address(raw);
    const Shared shared{(start + 1023) & ~1023u};
    volatile int* const flags = reinterpret_cast<volatile int*>(raw + (shared.base - start) + OFFSET_FLAGS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), 4 * CONSUMERS);
        }
        barrier_init_fence();
        prefetch_map(&a);
        prefetch_map(&b);
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == CONSUMERS) {
        if (threadIdx.x == 128 * CONSUMERS) produce(a, b, args, shared);
    } else {
        consume(c, args, shared, group, flags + group);
    }
}
