// C[M,N] = A[M,K] · B[N,K]ᵀ for rows an odd multiple of 16 bytes apart: persistent, warp-specialised, TMA, wgmma.
//
// gemm.cu with three things more, each against the lines of L2 that such rows touch twice.
// Classes: a tile takes every eighth (or fourth) row of A, so that all (or half) of its rows lie the same way in
//   their lines, and begins so far before K = 0 that they begin with one; TMA reads zeros there, in both operands.
// SWAPPED 1: rows of C are wgmma's N, so a tile's rows are any multiple of 16 and not of 64. P is the operand on
//   wgmma's M (A, or B if swapped), Q the one on its N; PB and QB are their rows in a tile.
// Clusters of four along one side.
// A QB above 256 is two products a step, NI of QB / NI columns each.
//
// Macros: PB QB STAGES CLUSTER_P CLUSTER_Q CONSUMERS MI NI SWAPPED PINGPONG PARTIAL STORE_BUFFERS BF16 SMEM_BYTES
#include "tiles.cuh"

constexpr int BLOCKS = CLUSTER_P * CLUSTER_Q;
constexpr int CLUSTER_M = SWAPPED ? CLUSTER_Q : CLUSTER_P, CLUSTER_N = SWAPPED ? CLUSTER_P : CLUSTER_Q;
constexpr int BM = SWAPPED ? QB : PB, BN = SWAPPED ? PB : QB;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_OWNERS = PINGPONG ? 1 : CONSUMERS;  // warpgroups that share a tile
constexpr int ROW_BYTES = 128;                         // 64 elements
constexpr int P_BYTES = PB * ROW_BYTES, Q_BYTES = QB * ROW_BYTES, STAGE_BYTES = P_BYTES + Q_BYTES;
constexpr int P_BOX = PB / CLUSTER_Q, Q_BOX = QB / CLUSTER_P;  // rows that a block loads
constexpr int WN = QB / NI;                                    // wgmma's N
// What setmaxnreg leaves each role; together at most the 65536 registers of an SM.
constexpr bool WIDE = MI * QB > 320;  // more than 160 accumulators a thread
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? (WIDE ? 24 : 40) : 56;
constexpr int CONSUMER_REGS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? (WIDE ? 240 : 232) : 248;

// A TMA store's box. Swapped: 64 columns of C, and as many rows as divide the tile's. Else columns of the widest
// swizzle whose boxes tile QB, and the rows of a warp, so that none waits for another, or of a warpgroup where
// narrow boxes are many.
constexpr int STORE_COLUMNS = SWAPPED || QB % 64 == 0 ? 64 : QB % 32 == 0 ? 32 : 16;
constexpr int STORE_ROWS = SWAPPED ? (QB % 64 == 0 ? 64 : QB % 32 == 0 ? 32 : 16) : STORE_COLUMNS == 64 ? 16 : 64;
constexpr int STORE_SWIZZLE = STORE_COLUMNS / 8 - 1;
constexpr bool WARP_STORES = !SWAPPED && STORE_ROWS == 16;
constexpr int STORE_BYTES = 64 * 64 * 2;  // a store buffer: 64 rows of up to 64 columns

constexpr int OFFSET_STORE = STAGES * STAGE_BYTES;
constexpr int OFFSET_BARRIERS = OFFSET_STORE + CONSUMERS * STORE_BUFFERS * STORE_BYTES;
constexpr int OFFSET_FLAGS = OFFSET_BARRIERS + (2 * STAGES + 2) * 8;
static_assert(1024 + OFFSET_FLAGS + 4 * CONSUMERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(PB == 64 * MI * TILE_OWNERS, "a tile's rows are those of its owners");
static_assert(!PINGPONG || CONSUMERS == 2, "two warpgroups take turns");
static_assert(WN <= 256 && QB % NI == 0 && (NI == 1 || WN % 16 == 0), "a product is what one wgmma takes");
static_assert(!SWAPPED || QB % 16 == 0, "columns are staged by 16");

// Rows of A by classes; filled in by the host (kernels/cuda/_pitch.py, Classes.pack). Class c holds rows c, c + stride, …;
// the first `tail` classes have one row more and `longer` cluster tiles, the others `shorter`.
struct Classes {
    int k, stride, tail, longer, shorter, last;
};

struct Place {
    int m, n, cls, k;  // first row in its class, first column, class, first element of K
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
    __device__ __forceinline__ u32 p(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 q(int stage) const { return p(stage) + P_BYTES; }
    __device__ __forceinline__ u32 store(int owner, int buffer) const {
        return base + OFFSET_STORE + (owner * STORE_BUFFERS + buffer) * STORE_BYTES;
    }
    __device__ __forceinline__ u32 full(int stage) const { return base + OFFSET_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
    __device__ __forceinline__ u32 turn(int owner) const { return full(2 * STAGES + owner); }
};

__device__ __forceinline__ void load_box(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Writes the box, and signals the barrier, at the same offsets in every block of the cluster.
__device__ __forceinline__ void load_box_for_all(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z) {
    constexpr u16 ALL = (1 << BLOCKS) - 1;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(ALL)
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, u32 src, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Stores 8x8 blocks of packed pairs transposed: lane l gives the address of row l % 8 of the (l / 8)-th block.
__device__ __forceinline__ void stmatrix_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// Where block `rank` of a cluster's tile lies.
__device__ __forceinline__ Place place(const WorkArgs& args, const Classes& classes, int tile, int rank) {
    int row, column;
    raster(args, tile, row, column);
    const int rest = row - classes.tail * classes.longer;
    const bool more = rest < 0;
    const int tiles = more ? classes.longer : classes.shorter, from = more ? row : rest;
    const int cls = from / tiles, q = from - cls * tiles;
    Place p;
    p.cls = more ? cls : classes.tail + cls;
    p.k = -(p.cls * classes.k % 64);
    p.m = q * (BM * CLUSTER_M);
    // The map ends with the shortest class, so the last rows of a longer one are reached from `stride` classes on.
    if (more && q == tiles - 1) {
        p.cls += classes.stride;
        p.m = classes.last;
    }
    p.m += CLUSTER_M > 1 ? rank * BM : 0;
    p.n = (column * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0)) * BN;
    return p;
}

// Loads this block's share of an operand's tile: all of it, or 1/SHARE of it for every block of the cluster.
template <int BOX, int SHARE>
__device__ __forceinline__ void load_operand(const TensorMap* map, u32 dst, u32 full, int k, int row, int cls, int rank) {
    constexpr int PARTS = BOX > 256 ? 2 : 1, ROWS = BOX / PARTS;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if constexpr (SHARE == 1)
            load_box(dst + part * ROWS * ROW_BYTES, map, full, k, row + part * ROWS, cls);
        else
            load_box_for_all(dst + (rank * BOX + part * ROWS) * ROW_BYTES, map, full, k, row + rank * BOX + part * ROWS,
                             cls);
    }
}

__device__ __forceinline__ void produce(const TensorMap* a, const TensorMap* b, const WorkArgs& args,
                                        const Classes& classes, const Shared& shared, int cluster, int clusters, int rank) {
    Ring ring;
    Segments<PARTIAL> work(args, cluster, clusters);
    Segment s;
    while (work.next(s)) {
        const Place at = place(args, classes, s.tile, rank);
#pragma unroll 1
        for (int kb = s.kb; kb < s.kb + s.count; ++kb, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 full = shared.full(ring.stage);
            barrier_expect(full, STAGE_BYTES);
            const int k = at.k + kb * 64;
            if constexpr (SWAPPED) {
                load_operand<P_BOX, CLUSTER_Q>(b, shared.p(ring.stage), full, k, at.n, 0, rank);
                load_operand<Q_BOX, CLUSTER_P>(a, shared.q(ring.stage), full, k, at.m, at.cls, rank);
            } else {
                load_operand<P_BOX, CLUSTER_Q>(a, shared.p(ring.stage), full, k, at.m, at.cls, rank);
                load_operand<Q_BOX, CLUSTER_P>(b, shared.q(ring.stage), full, k, at.n, 0, rank);
            }
        }
    }
}

// acc = P-tile · Q-tileᵀ over `count` k-blocks. One k-block's wgmmas stay in flight while the next is issued; the
// stage before is released as soon as they are the only ones.
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

// The threads that share a box.
__device__ __forceinline__ void sync_box(int bar) {
    if constexpr (WARP_STORES)
        __syncwarp();
    else
        named_sync(bar, 128);
}

// One store buffer: 64 of P's rows, and of Q's those from `first` on, up to 64. Not swapped, rows of C are P's and
// boxes of STORE_COLUMNS lie one after the other; swapped, rows of C are Q's, in boxes of STORE_ROWS.
__device__ __forceinline__ void stage_columns(const float (&acc)[MI * NI][WN / 2], int mi, int first, u32 buffer, int warp,
                                              int lane) {
#pragma unroll
    for (int c = 0; c < 64; c += 16) {
        const int x = first + c;
        if (x >= QB) break;
        const float* const v = &acc[mi * NI + x / WN][x % WN / 2];
        const u32 a = pack(v[0], v[1]), b = pack(v[2], v[3]), d = pack(v[4], v[5]), e = pack(v[6], v[7]);
        if constexpr (SWAPPED) {
            const int row = c + lane / 16 * 8 + lane % 8;
            const u32 within = (warp * 16 + lane / 8 % 2 * 8) * 2;
            stmatrix_transposed(buffer + row * 128 + (within ^ (row & 7) * 16), a, b, d, e);
        } else {
            const int row = warp * 16 + lane % 16;
            const u32 swizzle = ((row * STORE_COLUMNS * 2 / 128) & STORE_SWIZZLE) * 16;
            const u32 within = (c % STORE_COLUMNS + lane / 16 * 8) * 2;
            stmatrix(buffer + row * STORE_COLUMNS * 2 + c / STORE_COLUMNS * (64 * STORE_COLUMNS * 2) + (within ^ swizzle), a,
                     b, d, e);
        }
    }
}

// Issues the TMA stores of a buffer that holds P's rows from `p` on (of a warp, if warps store) and Q's from `q` on,
// both counted from the tile's first. What lies outside C is clipped.
__device__ __forceinline__ void store_buffer(const TensorMap* c, const Place& at, u32 buffer, int p, int q, int box_row) {
#pragma unroll
    for (int x = 0; x < 64; x += SWAPPED ? STORE_ROWS : STORE_COLUMNS) {
        if (q + x >= QB) break;
        if constexpr (SWAPPED)
            store_box(c, buffer + x * 128, at.n + p, at.m + q + x, at.cls);
        else
            store_box(c, buffer + x * 64 * 2 + box_row * STORE_COLUMNS * 2, at.n + q + x, at.m + p + box_row, at.cls);
    }
    tma_store_commit();
}

__device__ __forceinline__ void consume(const TensorMap* c, const WorkArgs& args, const Classes& classes,
                                        const Shared& shared, int cluster, int clusters, int rank, int owner,
                                        volatile int* flag) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int bar = 1 + owner;
    const bool stores = WARP_STORES ? lane == 0 : thread == 0;  // waits for the boxes it has issued itself
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
        float acc[MI * NI][WN / 2];  // first written by a wgmma that ignores what it held
        multiply(acc, s.count, ring, shared, owner, lane);
        if constexpr (PARTIAL) {
            const int part = rank * TILE_OWNERS + (PINGPONG ? 0 : owner);
            if (!gather(acc, args, s, part, BLOCKS * TILE_OWNERS, thread, bar, flag)) continue;
        }
        const Place at = place(args, classes, s.tile, rank);
#pragma unroll
        for (int mi = 0; mi < MI; ++mi)
#pragma unroll
            for (int q = 0; q < QB; q += 64) {
                const u32 to = shared.store(owner, buffer);
                if (stores) tma_store_wait<STORE_BUFFERS - 1>();
                sync_box(bar);
                stage_columns(acc, mi, q, to, warp, lane);
                fence_async_proxy();
                sync_box(bar);
                if (stores)
                    store_buffer(c, at, to, ((PINGPONG ? 0 : owner) * MI + mi) * 64, q, WARP_STORES ? warp * 16 : 0);
                buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
            }
    }
    if (stores) tma_store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_pitch(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const __grid_constant__ TensorMap c, const __grid_constant__ WorkArgs args,
               const __grid_constant__ Classes classes) {
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
        prefetch_map(&c);
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
        if (threadIdx.x == 0) produce(&a, &b, args, classes, shared, cluster, clusters, rank);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        consume(&c, args, classes, shared, cluster, clusters, rank, group - 1, flags + (group - 1));
    }
    // A block must not leave while its neighbour may still write to it or arrive at its barriers.
    if constexpr (BLOCKS > 1) cluster_sync();
}
