// C[M,N] = A[M,K] · B[N,K]ᵀ: persistent, warp-specialised, fed by TMA, multiplied by wgmma.
//
// Warpgroup 0 is the producer: one thread keeps a ring of STAGES k-blocks (64 elements, 128-byte rows in the
// 128-byte swizzle) full. The other CONSUMERS warpgroups multiply. PINGPONG 0: all work on one BM x BN tile,
// each on its own 64·MI rows. PINGPONG 1: each of two has a whole tile to itself, they take turns on the
// tensor cores, and the epilogue of one runs beneath the main loop of the other. In a cluster of two blocks
// (CLUSTER_M x CLUSTER_N tiles) each block loads half of the operand that both need and multicasts it.
// Finished rows go through swizzled shared memory to asynchronous TMA stores.
//
// PLAIN_STORES 1 is for rows of C that do not start on 16 bytes, which no tensor map can describe: a warp reads
// its own rows back from shared memory and stores 128 bytes of one at a time, in pairs where the address allows.
// The operands then lie in copies with aligned rows, made by `repack` (repack.cuh) in the launch before.
//
// Macros: BM BN STAGES CLUSTER_M CLUSTER_N CONSUMERS MI PINGPONG PARTIAL STORE_BUFFERS PLAIN_STORES REPACK BF16
//         SMEM_BYTES
#include "tiles.cuh"

#if REPACK
#include "repack.cuh"
#endif

constexpr int BLOCKS = CLUSTER_M * CLUSTER_N;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_OWNERS = PINGPONG ? 1 : CONSUMERS;  // warpgroups that share a tile
constexpr int ROW_BYTES = 128;                         // 64 elements
constexpr int A_BYTES = BM * ROW_BYTES, B_BYTES = BN * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int A_BOX = BM / CLUSTER_N;  // rows a TMA load
constexpr int B_BOX = BN / CLUSTER_M;
// What setmaxnreg leaves each role; together at most the 65536 registers of an SM.
constexpr bool WIDE = MI * BN > 320;  // more than 160 accumulators a thread
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? (WIDE ? 24 : 40) : 56;
constexpr int CONSUMER_REGS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? (WIDE ? 240 : 232) : 248;

// Columns a TMA store takes from one row: the widest swizzle whose boxes tile BN.
constexpr int STORE_COLUMNS = PLAIN_STORES || BN % 64 == 0 ? 64 : BN % 32 == 0 ? 32 : 16;
// Rows of a box: those of a warp, so that none waits for another; of a warpgroup where narrow boxes are many.
constexpr int STORE_ROWS = STORE_COLUMNS == 64 ? 16 : 64;
constexpr int STORE_SWIZZLE = STORE_COLUMNS / 8 - 1;
constexpr int STORE_BYTES = 64 * 64 * 2;  // a store buffer: 64 rows of up to 64 columns

constexpr int OFFSET_STORE = STAGES * STAGE_BYTES;
constexpr int OFFSET_BARRIERS = OFFSET_STORE + CONSUMERS * STORE_BUFFERS * STORE_BYTES;
constexpr int OFFSET_FLAGS = OFFSET_BARRIERS + (2 * STAGES + 2) * 8;
static_assert(1024 + OFFSET_FLAGS + 4 * CONSUMERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(BM == 64 * MI * TILE_OWNERS, "a tile's rows are those of its owners");
static_assert(!PINGPONG || CONSUMERS == 2, "two warpgroups take turns");

#if PLAIN_STORES
using Output = u16* __restrict__;  // the first element of C
#else
using Output = TensorMap;
#endif

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

// Loads this block's share of an operand's tile: all of it, or 1/SHARE of it for every block of the cluster.
template <int BOX, int SHARE>
__device__ __forceinline__ void load_operand(const TensorMap& map, u32 dst, u32 full, int k, int row, int rank) {
    constexpr u16 ALL = (1 << BLOCKS) - 1;
    if constexpr (SHARE == 1)
        tma_load(dst, &map, full, k, row);
    else
        tma_multicast(dst + rank * BOX * ROW_BYTES, &map, full, k, row + rank * BOX, ALL);
}

__device__ __forceinline__ void produce(const TensorMap& a, const TensorMap& b, const WorkArgs& args,
                                        const Shared& shared, int cluster, int clusters, int rank) {
#if REPACK
    wait_for_prerequisites();  // the copies of A and B
#endif
    Ring ring;
    Segments<PARTIAL> work(args, cluster, clusters);
    Segment s;
    while (work.next(s)) {
        int row, column;
        raster(args, s.tile, row, column);
        const int m = (row * CLUSTER_M + (CLUSTER_M > 1 ? rank : 0)) * BM;
        const int n = (column * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0)) * BN;
#pragma unroll 1
        for (int kb = s.kb; kb < s.kb + s.count; ++kb, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 full = shared.full(ring.stage);
            barrier_expect(full, STAGE_BYTES);
            load_operand<A_BOX, CLUSTER_N>(a, shared.a(ring.stage), full, kb * 64, m, rank);
            load_operand<B_BOX, CLUSTER_M>(b, shared.b(ring.stage), full, kb * 64, n, rank);
        }
    }
}

// acc = A-tile · B-tileᵀ over `count` k-blocks. One k-block's wgmmas stay in flight while the next is issued;
// the stage before is released as soon as they are the only ones.
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
        const u64 a = tile_descriptor(shared.a(ring.stage) + (PINGPONG ? 0 : owner) * 64 * MI * ROW_BYTES);
        const u64 b = tile_descriptor(shared.b(ring.stage));
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
    if constexpr (PINGPONG) {
        // Every stage of this tile has been seen full: the other warpgroup may look at the ring from here on.
        if (lane == 0) barrier_arrive(shared.turn(owner ^ 1));
    }
    wgmma_wait<0>();
    release(previous);
}

// One store buffer: columns [column, column + 64) of 64 rows, as swizzled boxes of STORE_COLUMNS. A warp writes
// its own 16 rows.
__device__ __forceinline__ void stage_columns(const float (&acc)[BN / 2], int column, u32 buffer, int warp, int lane) {
    const int row = warp * 16 + lane % 16;
    const u32 line = buffer + row * STORE_COLUMNS * 2;
    const u32 swizzle = ((row * STORE_COLUMNS * 2 / 128) & STORE_SWIZZLE) * 16;
#pragma unroll
    for (int c = 0; c < 64; c += 16) {
        if (column + c >= BN) break;
        const float* const v = &acc[(column + c) / 2];
        const u32 within = (c % STORE_COLUMNS + lane / 16 * 8) * 2;
        stmatrix(line + c / STORE_COLUMNS * (64 * STORE_COLUMNS * 2) + (within ^ swizzle), pack(v[0], v[1]),
                 pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
    }
}

// The threads that share a box.
__device__ __forceinline__ void sync_box(int bar) {
    if constexpr (STORE_ROWS == 16)
        __syncwarp();
    else
        named_sync(bar, 128);
}

// Issues the TMA stores of STORE_ROWS rows, the first in `row` of one buffer and its first element (m, n) of C;
// `column` counts from the tile's first.
__device__ __forceinline__ void store_columns(const TensorMap& c, const WorkArgs& args, u32 buffer, int m, int n,
                                              int column, int row) {
#pragma unroll
    for (int x = 0; x < 64; x += STORE_COLUMNS)
        if (column + x < BN && n + x < args.n && m < args.m)
            tma_store(&c, buffer + x * 64 * 2 + row * STORE_COLUMNS * 2, n + x, m);
    tma_store_commit();
}

// Stores a warp's 16 rows of one buffer, whose first element is (m, n) of C, by ordinary instructions: columns
// before min(64, `columns`) that C has. A row that starts on 2 modulo 4 goes out as one, then pairs, then one.
__device__ __forceinline__ void store_rows(u16* c, const WorkArgs& args, u32 buffer, int m, int n, int columns,
                                           int warp, int lane) {
    const int rows = min(16, args.m - m - warp * 16);
    const int end = min(min(64, columns), args.n - n);
    u16* at = c + size_t(m + warp * 16) * args.n + n;
#pragma unroll 4
    for (int i = 0; i < rows; ++i, at += args.n) {
        const int row = warp * 16 + i;
        const u32 word = load_shared(buffer + row * 128 + ((lane * 4) ^ ((row & 7) * 16)));
        const u32 next = __shfl_down_sync(~0u, word, 1);
        const int odd = reinterpret_cast<u64>(at) / 2 & 1;
        const int x = 2 * lane + odd;
        const u32 both = odd ? __funnelshift_r(word, next, 16) : word;
        if (x + 1 < end && x < 63)
            store_pair(at + x, both);
        else if (x < end)
            at[x] = u16(both);
        if (odd && lane == 0 && end > 0) at[0] = u16(word);
    }
}

__device__ __forceinline__ void consume(const Output& c, const WorkArgs& args, const Shared& shared, int cluster, int clusters,
                                        int rank, int owner, volatile int* flag) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int bar = 1 + owner;
    const bool stores = STORE_ROWS == 16 ? lane == 0 : thread == 0;  // waits for the boxes it has issued itself
    Ring ring;
    Segments<PARTIAL> work(args, cluster, clusters);
    Segment s;
    int buffer = 0, mine = 0;
    for (int item = 0; work.next(s); ++item) {
        if constexpr (PINGPONG) {
            if (item % 2 != owner) {
                ring.skip(s.count);
                continue;
            }
            // A parity only tells odd from even, so look at the ring only once the other has gone past.
            if (item > 0) barrier_wait(shared.turn(owner), (owner == 0 ? mine - 1 : mine) & 1);
            ++mine;
        }
        float acc[MI][BN / 2];  // first written by a wgmma that ignores what it held
        multiply(acc, s.count, ring, shared, owner, lane);
        if constexpr (PARTIAL) {
            const int part = rank * TILE_OWNERS + (PINGPONG ? 0 : owner);
            if (!gather(acc, args, s, part, BLOCKS * TILE_OWNERS, thread, bar, flag)) continue;
        }
        int row, column;
        raster(args, s.tile, row, column);
        const int m = (row * CLUSTER_M + (CLUSTER_M > 1 ? rank : 0)) * BM;
        const int n = (column * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0)) * BN;
#pragma unroll
        for (int mi = 0; mi < MI; ++mi)
#pragma unroll
            for (int x = 0; x < BN; x += 64) {
                const u32 at = shared.store(owner, buffer);
                const int first = m + ((PINGPONG ? 0 : owner) * MI + mi) * 64;
#if PLAIN_STORES
                __syncwarp();
                stage_columns(acc[mi], x, at, warp, lane);
                __syncwarp();
                store_rows(c, args, at, first, n + x, BN - x, warp, lane);
#else
                if (stores) tma_store_wait<STORE_BUFFERS - 1>();
                sync_box(bar);
                stage_columns(acc[mi], x, at, warp, lane);
                fence_async_proxy();
                sync_box(bar);
                const int box_row = STORE_ROWS == 16 ? warp * 16 : 0;
                if (stores) store_columns(c, args, at, first + box_row, n + x, x, box_row);
                buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
#endif
            }
    }
#if !PLAIN_STORES
    if (stores) tma_store_wait<0>();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ Output c,
         const __grid_constant__ WorkArgs args) {
    extern __shared__ unsigned char raw[];
    // Swizzle atoms need 1024-byte alignment, the same in all blocks of the cluster.
    const u32 start = smem_address(raw);
    const Shared shared{(start + 1023) & ~1023u};
    volatile int* const flags = reinterpret_cast<volatile int*>(raw + (shared.base - start) + OFFSET_FLAGS);
    const int rank = BLOCKS == 1 ? 0 : cluster_rank();
    const int cluster = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;

    if (threadIdx.x == 32) {
        prefetch_map(&a);
        prefetch_map(&b);
#if !PLAIN_STORES
        prefetch_map(&c);
#endif
    }
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
        if (threadIdx.x == 0) produce(a, b, args, shared, cluster, clusters, rank);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        consume(c, args, shared, cluster, clusters, rank, group - 1, flags + (group - 1));
    }
    // A block must not leave while its neighbour may still write to it or arrive at its barriers.
    if constexpr (BLOCKS > 1) cluster_sync();
}
