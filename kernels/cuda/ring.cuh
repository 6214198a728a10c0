// The ring of k-blocks that gemm.cu and gemm_pitch.cu multiply from, and who works on it.
//
// Warpgroup 0 is the producer: one thread keeps STAGES k-blocks (64 elements, 128-byte rows in the 128-byte swizzle)
// full. CONSUMERS warpgroups multiply. PINGPONG 0: all work on one tile, each on its own 64·MI rows of P, the operand on
// wgmma's M. PINGPONG 1: each of two has a whole tile to itself, they take turns on the tensor cores, and the epilogue of
// one runs beneath the main loop of the other. Q is the operand on wgmma's N; more than 256 of its rows are NI products.
//
// What includes this defines BLOCKS (of a cluster) and the macros PB QB (rows of P and Q in a tile) STAGES CONSUMERS MI NI
// PINGPONG STORE_BUFFERS SMEM_BYTES.
#pragma once

#include "tiles.cuh"

constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_OWNERS = PINGPONG ? 1 : CONSUMERS;  // warpgroups that share a tile
constexpr int ROW_BYTES = 128;                         // 64 elements
constexpr int P_BYTES = PB * ROW_BYTES, STAGE_BYTES = P_BYTES + QB * ROW_BYTES;
constexpr int WN = QB / NI;  // wgmma's N
// What setmaxnreg leaves each role; together at most the 65536 registers of an SM.
constexpr bool WIDE = MI * QB > 320;  // more than 160 accumulators a thread
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? (WIDE ? 24 : 40) : 56;
constexpr int CONSUMER_REGS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? (WIDE ? 240 : 232) : 248;
constexpr int STORE_BYTES = 64 * ROW_BYTES;  // a store buffer: 64 rows of up to 64 columns

constexpr int OFFSET_STORE = STAGES * STAGE_BYTES;
constexpr int OFFSET_BARRIERS = OFFSET_STORE + CONSUMERS * STORE_BUFFERS * STORE_BYTES;
constexpr int OFFSET_FLAGS = OFFSET_BARRIERS + (2 * STAGES + 2) * 8;
static_assert(OFFSET_FLAGS + 4 * CONSUMERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(PB == 64 * MI * TILE_OWNERS, "a tile's rows are those of its owners");
static_assert(!PINGPONG || CONSUMERS == 2, "two warpgroups take turns");
static_assert(WN <= 256 && QB % NI == 0 && (NI == 1 || WN % 16 == 0), "a product is what one wgmma takes");

extern __shared__ __align__(1024) unsigned char memory[];

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
    __device__ __forceinline__ u32 p(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 q(int stage) const { return p(stage) + P_BYTES; }
    __device__ __forceinline__ u32 store(int owner, int buffer) const {
        return base + OFFSET_STORE + (owner * STORE_BUFFERS + buffer) * STORE_BYTES;
    }
    __device__ __forceinline__ u32 full(int stage) const { return base + OFFSET_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
    __device__ __forceinline__ u32 turn(int owner) const { return full(2 * STAGES + owner); }
    // A word of warpgroup `owner`.
    __device__ __forceinline__ volatile int* flag(int owner) const {
        return reinterpret_cast<volatile int*>(memory + OFFSET_FLAGS) + owner;
    }
};

// Which cluster this block belongs to, of how many, and its place there.
struct Seat {
    int rank, cluster, clusters;
};

// Whether a warpgroup multiplies the `item`-th segment of its block, which has `count` k-blocks; if so, only from here on.
__device__ __forceinline__ bool my_turn(int item, int count, Ring& ring, const Shared& shared, int owner) {
    if constexpr (PINGPONG) {
        if (item % 2 != owner) {
            ring.skip(count);
            return false;
        }
        // A parity only tells odd from even, so look at the ring only once the other has gone past.
        if (item > 0) barrier_wait(shared.turn(owner), (item - 1) / 2 & 1);
    }
    return true;
}

// acc = P-tile · Q-tileᵀ over `count` k-blocks. One k-block's wgmmas stay in flight while the next is issued; the stage
// before is released as soon as they are the only ones.
__device__ __forceinline__ void multiply(float (&acc)[MI * NI][WN / 2], int count, Ring& ring, const Shared& shared,
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
        const u64 p = tile_descriptor(shared.p(ring.stage) + (PINGPONG ? 0 : owner) * 64 * MI * ROW_BYTES);
        const u64 q = tile_descriptor(shared.q(ring.stage));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int mi = 0; mi < MI; ++mi)
#pragma unroll
                for (int ni = 0; ni < NI; ++ni)
                    Wgmma<WN>::run(acc[mi * NI + ni], p + mi * 512 + k * 2, q + ni * (WN * ROW_BYTES >> 4) + k * 2, i | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(previous);
        previous = ring.stage;
    }
    if constexpr (PINGPONG) {
        // Every stage of this tile has been seen full: the other warpgroup may look at the ring from here on.
        if (lane == 0) barrier_arrive(shared.turn(owner ^ 1));
    }
    wgmma_wait<0>();
    release(previous);
}

// Columns [column, column + 64) of a warp's 16 rows into its part of a store buffer, in the 128-byte swizzle.
__device__ __forceinline__ void stage_rows(const float (&acc)[WN / 2], int column, u32 rows, int lane) {
    const int row = lane % 16;
#pragma unroll
    for (int c = 0; c < 64; c += 16) {
        if (column + c >= WN) break;
        const float* const v = &acc[(column + c) / 2];
        const u32 at = rows + row * ROW_BYTES + (((c + lane / 16 * 8) * 2) ^ ((row & 7) * 16));
        if (column + c + 16 <= WN)
            stmatrix(at, pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
        else  // eight columns are left; the next eight of the buffer belong to no box
            stmatrix(at, pack(v[0], v[1]), pack(v[2], v[3]), 0, 0);
    }
}

// Sets up the ring and gives every warpgroup its part: `produce` is called by one thread, `consume` by 128 with their
// number among the consumers.
template <typename Produce, typename Consume>
__device__ __forceinline__ void divide_work(Produce produce, Consume consume) {
    const Shared shared{smem_address(memory)};
    if (shared.base % 1024) __trap();  // swizzle atoms need it, and no room is left to move up
    const Seat seat{BLOCKS == 1 ? 0 : int(cluster_rank()), int(blockIdx.x) / BLOCKS, int(gridDim.x) / BLOCKS};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), 4 * TILE_OWNERS * BLOCKS);  // a lane of each warp that reads the stage
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
        if (threadIdx.x == 0) produce(shared, seat);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        consume(shared, seat, group - 1);
    }
    // A block must not leave while its neighbour may still write to it or arrive at its barriers.
    if constexpr (BLOCKS > 1) cluster_sync();
}
