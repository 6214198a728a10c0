// C[M,N] = A[M,K] · B[N,K]ᵀ in whole tiles of 128 x BN: two warpgroups take turns on the tensor cores.
//
// The trick: each of two consumer warpgroups has a tile of its own, so that the epilogue of one runs beneath the main
// loop of the other, and tiles may be narrow: BN is chosen so that the busiest block multiplies few columns. A third
// warpgroup fills a ring of STAGES k-blocks (64 elements, 128-byte rows in the 128-byte swizzle) by TMA; AHEAD k-blocks
// before, it asks L2 for rows that no other block has asked for yet. Sums leave through shared memory, 16 rows a warp.
// What limits it: the tensor cores under load; at the highest clocks the way from L2, for narrow tiles read more.
//
// Macros: BN STAGES CLUSTER_M (blocks side by side along M, which share B's rows) AHEAD STORE_BUFFERS BF16 SMEM_BYTES
#include "tiles.cuh"

constexpr int BM = 128, MI = 2;     // a warpgroup holds a whole tile, as two halves of 64 rows
constexpr int BLOCKS = CLUSTER_M;   // of a cluster
constexpr int ROW_BYTES = 128;      // 64 elements
constexpr int A_BYTES = BM * ROW_BYTES, STAGE_BYTES = A_BYTES + BN * ROW_BYTES;
constexpr int B_BOX = BN / CLUSTER_M;
constexpr bool WIDE = BN > 160;
constexpr int PRODUCER_REGS = WIDE ? 24 : 40, CONSUMER_REGS = WIDE ? 240 : 232;
constexpr int STORE_BYTES = 64 * ROW_BYTES;  // a store buffer: 64 rows of up to 64 columns

constexpr int OFFSET_STORE = STAGES * STAGE_BYTES;
constexpr int OFFSET_BARRIERS = OFFSET_STORE + 2 * STORE_BUFFERS * STORE_BYTES;
static_assert(OFFSET_BARRIERS + (2 * STAGES + 2) * 8 <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");

// C in boxes of a warp's 16 rows and 64 columns; `tail` has the columns of a tile that 64 does not divide.
struct Output {
    TensorMap whole;
#if BN % 64
    TensorMap tail;
#endif
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void skip(int n) {
        const int at = stage + n;
        phase ^= (at / STAGES) & 1;
        stage = at % STAGES;
    }
};

struct Shared {
    u32 base;
    __device__ __forceinline__ u32 a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ u32 store(int owner, int buffer) const {
        return base + OFFSET_STORE + (owner * STORE_BUFFERS + buffer) * STORE_BYTES;
    }
    __device__ __forceinline__ u32 full(int stage) const { return base + OFFSET_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
    __device__ __forceinline__ u32 turn(int owner) const { return full(2 * STAGES + owner); }
};

// A tile of this block: its first row and column in C, and whether it stands first in its column and in its row of
// those that are worked on together.
struct Place {
    int m, n;
    bool top, left;
    __device__ __forceinline__ Place(const WorkArgs& args, int tile, int rank) {
        int row, column;
        raster(args, tile, row, column);
        m = (row * CLUSTER_M + rank) * BM, n = column * BN;
        top = row % args.group == 0, left = column == 0;
    }
};

#if AHEAD
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int k, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(k), "r"(row)
                 : "memory");
}

// Goes through a block's k-blocks before they are loaded and asks L2 for rows of B in the top tile of a column, for rows
// of A in the first column: the others of these rows and columns find them there.
struct Scout {
    const WorkArgs& args;
    int tile, step, kb = 0, m = -1, n = -1;

    __device__ __forceinline__ Scout(const WorkArgs& a, int first, int clusters)
        : args(a), tile(first - clusters), step(clusters) {
        kb = a.k_blocks;
    }
    __device__ __forceinline__ void next(const TensorMap& a, const TensorMap& b, int rank) {
        if (kb == args.k_blocks) {
            tile += step, kb = 0, m = n = -1;
            if (tile < args.tiles_m * args.tiles_n) {
                const Place at(args, tile, rank);
                m = at.left ? at.m : -1;
                n = at.top ? at.n + rank * B_BOX : -1;
            }
        }
        if (m >= 0) prefetch_box(a, kb * 64, m);
        if (n >= 0) prefetch_box(b, kb * 64, n);
        ++kb;
    }
};
#endif

__device__ __forceinline__ void produce(const TensorMap& a, const TensorMap& b, const WorkArgs& args,
                                        const Shared& shared, int cluster, int clusters, int rank) {
    constexpr u16 ALL = (1 << BLOCKS) - 1;
    Ring ring;
#if AHEAD
    Scout scout(args, cluster, clusters);
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) scout.next(a, b, rank);
#endif
    Segments<false> work(args, cluster, clusters);
    Segment s;
    while (work.next(s)) {
        const Place at(args, s.tile, rank);
#pragma unroll 1
        for (int kb = 0; kb < args.k_blocks; ++kb, ring.next()) {
#if AHEAD
            scout.next(a, b, rank);
#endif
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 full = shared.full(ring.stage), rows = shared.b(ring.stage);
            barrier_expect(full, STAGE_BYTES);
            tma_load(shared.a(ring.stage), &a, full, kb * 64, at.m);
            if constexpr (BLOCKS == 1)
                tma_load(rows, &b, full, kb * 64, at.n);
            else
                tma_multicast(rows + rank * B_BOX * ROW_BYTES, &b, full, kb * 64, at.n + rank * B_BOX, ALL);
        }
    }
}

// acc = A-tile · B-tileᵀ. One k-block's wgmmas stay in flight while the next is issued; the stage before is released as
// soon as they are the only ones.
__device__ __forceinline__ void multiply(float (&acc)[MI][BN / 2], int count, Ring& ring, const Shared& shared,
                                         int owner, int lane) {
    const auto release = [&](int stage) {
        if constexpr (BLOCKS == 1) {
            if (lane == 0) barrier_arrive(shared.empty(stage));
        } else {
            if (lane < BLOCKS) barrier_arrive_at(shared.empty(stage), lane);
        }
    };
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring.next()) {
        barrier_wait(shared.full(ring.stage), ring.phase);
        const u64 a = tile_descriptor(shared.a(ring.stage)), b = tile_descriptor(shared.b(ring.stage));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int mi = 0; mi < MI; ++mi) Wgmma<BN>::run(acc[mi], a + mi * 512 + k * 2, b + k * 2, i | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(previous);
        previous = ring.stage;
    }
    // Every stage of this tile has been seen full: the other warpgroup may look at the ring from here on.
    if (lane == 0) barrier_arrive(shared.turn(owner ^ 1));
    wgmma_wait<0>();
    release(previous);
}

// Columns [column, column + 64) of a warp's 16 rows into its part of a store buffer, in the 128-byte swizzle.
__device__ __forceinline__ void stage_columns(const float (&acc)[BN / 2], int column, u32 buffer, int lane) {
    const int row = lane % 16;
#pragma unroll
    for (int c = 0; c < 64; c += 16) {
        if (column + c >= BN) break;
        const float* const v = &acc[(column + c) / 2];
        const u32 at = buffer + row * ROW_BYTES + (((c + lane / 16 * 8) * 2) ^ ((row & 7) * 16));
        if (column + c + 16 <= BN)
            stmatrix(at, pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
        else  // eight columns are left; the next eight of the buffer belong to no box
            stmatrix(at, pack(v[0], v[1]), pack(v[2], v[3]), 0, 0);
    }
}

__device__ __forceinline__ void consume(const Output& c, const WorkArgs& args, const Shared& shared, int cluster,
                                        int clusters, int rank, int owner) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    Ring ring;
    Segments<false> work(args, cluster, clusters);
    Segment s;
    int buffer = 0, mine = 0;
    for (int item = 0; work.next(s); ++item) {
        if (item % 2 != owner) {
            ring.skip(s.count);
            continue;
        }
        // A parity only tells odd from even, so look at the ring only once the other has gone past.
        if (item > 0) barrier_wait(shared.turn(owner), (owner == 0 ? mine - 1 : mine) & 1);
        ++mine;
        float acc[MI][BN / 2];  // first written by a wgmma that ignores what it held
        multiply(acc, s.count, ring, shared, owner, lane);
        const Place at(args, s.tile, rank);
#pragma unroll
        for (int mi = 0; mi < MI; ++mi)
#pragma unroll
            for (int x = 0; x < BN; x += 64) {
                const u32 rows = shared.store(owner, buffer) + warp * 16 * ROW_BYTES;
                if (lane == 0) tma_store_wait<STORE_BUFFERS - 1>();
                __syncwarp();
                stage_columns(acc[mi], x, rows, lane);
                fence_async_proxy();
                __syncwarp();
                const TensorMap* map = &c.whole;
#if BN % 64
                if (x + 64 > BN) map = &c.tail;
#endif
                const int m = at.m + mi * 64 + warp * 16, n = at.n + x;
                if (lane == 0) {
                    if (m < args.m && n < args.n) tma_store(map, rows, n, m);
                    tma_store_commit();
                }
                buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
            }
    }
    if (lane == 0) tma_store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_turns(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ Output c,
               const __grid_constant__ WorkArgs args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    const Shared shared{smem_address(raw)};
    if (shared.base % 1024) __trap();  // swizzle atoms need it, and no room is left to move up
    const int rank = BLOCKS == 1 ? 0 : cluster_rank();
    const int cluster = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;

    if (threadIdx.x == 32) {
        prefetch_map(&a);
        prefetch_map(&b);
        prefetch_map(&c.whole);
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), 4 * BLOCKS);  // a lane of each warp that reads the stage
        }
        barrier_init(shared.turn(0), 4);
        barrier_init(shared.turn(1), 4);
        barrier_init_fence();
    }
    if constexpr (BLOCKS == 1)
        __syncthreads();
    else
        cluster_sync();

    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, and known to be
    if (group == 0) {
        registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 0) produce(a, b, args, shared, cluster, clusters, rank);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        consume(c, args, shared, cluster, clusters, rank, group - 1);
    }
    // A block must not leave while its neighbour may still write to it or arrive at its barriers.
    if constexpr (BLOCKS > 1) cluster_sync();
}
