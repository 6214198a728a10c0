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
constexpr int BLOCKS = CLUSTER_P * CLUSTER_Q;
#include "ring.cuh"

constexpr int CLUSTER_M = SWAPPED ? CLUSTER_Q : CLUSTER_P, CLUSTER_N = SWAPPED ? CLUSTER_P : CLUSTER_Q;
constexpr int BM = SWAPPED ? QB : PB, BN = SWAPPED ? PB : QB;
constexpr int P_BOX = PB / CLUSTER_Q, Q_BOX = QB / CLUSTER_P;  // rows that a block loads
static_assert(SWAPPED ? QB % 16 == 0 : NI == 1, "columns are staged by 16, rows of one product by 64");

// Swapped, a store's box has 64 columns of C, and as many rows as divide the tile's.
constexpr int BOX_ROWS = QB % 64 == 0 ? 64 : QB % 32 == 0 ? 32 : 16;

// C in boxes of 64 columns and a warp's 16 rows, so that none waits for another; `tail` has the columns of a tile that 64
// does not divide. Swapped, in boxes of BOX_ROWS rows.
struct Output {
    TensorMap whole;
#if !SWAPPED && QB % 64
    TensorMap tail;
#endif
};

// Rows of A by classes; filled in by the host (kernels/cuda/_pitch.py, Classes.pack). Class c holds rows c, c + stride, …;
// the first `tail` classes have one row more and `longer` cluster tiles, the others `shorter`.
struct Classes {
    int k, stride, tail, longer, shorter, last;
};

struct Place {
    int m, n, cls, k;  // first row in its class, first column, class, first element of K
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
                                        const Classes& classes, const Shared& shared, const Seat& seat) {
    Ring ring;
    Segments<PARTIAL> work(args, seat.cluster, seat.clusters);
    Segment s;
    while (work.next(s)) {
        const Place at = place(args, classes, s.tile, seat.rank);
#pragma unroll 1
        for (int kb = s.kb; kb < s.kb + s.count; ++kb, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 full = shared.full(ring.stage), p = shared.p(ring.stage), q = shared.q(ring.stage);
            barrier_expect(full, STAGE_BYTES);
            const int k = at.k + kb * 64;
            if constexpr (SWAPPED) {
                load_operand<P_BOX, CLUSTER_Q>(b, p, full, k, at.n, 0, seat.rank);
                load_operand<Q_BOX, CLUSTER_P>(a, q, full, k, at.m, at.cls, seat.rank);
            } else {
                load_operand<P_BOX, CLUSTER_Q>(a, p, full, k, at.m, at.cls, seat.rank);
                load_operand<Q_BOX, CLUSTER_P>(b, q, full, k, at.n, 0, seat.rank);
            }
        }
    }
}

// One store buffer, swapped: 64 columns of C and its rows from `first` of the tile on, up to 64.
__device__ __forceinline__ void stage_swapped(const float (&acc)[MI * NI][WN / 2], int mi, int first, u32 buffer, int warp,
                                              int lane) {
#pragma unroll
    for (int c = 0; c < 64; c += 16) {
        const int x = first + c;
        if (x >= QB) break;
        const float* const v = &acc[mi * NI + x / WN][x % WN / 2];
        const int row = c + lane / 16 * 8 + lane % 8;
        const u32 within = (warp * 16 + lane / 8 % 2 * 8) * 2;
        stmatrix_transposed(buffer + row * ROW_BYTES + (within ^ (row & 7) * 16), pack(v[0], v[1]), pack(v[2], v[3]),
                            pack(v[4], v[5]), pack(v[6], v[7]));
    }
}

// Puts 64 of P's rows, the warpgroup's `mi`-th, and up to 64 of Q's, from `first` on, into a buffer and from there into C.
// What lies outside C is clipped.
__device__ __forceinline__ void store(const Output& c, const float (&acc)[MI * NI][WN / 2], const Place& at, u32 buffer,
                                      int mi, int part, int first, int owner) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, row = (part * MI + mi) * 64;
    if constexpr (SWAPPED) {
        const bool stores = threadIdx.x % 128 == 0;  // waits for the boxes it has issued itself
        if (stores) tma_store_wait<STORE_BUFFERS - 1>();
        named_sync(1 + owner, 128);
        stage_swapped(acc, mi, first, buffer, warp, lane);
        fence_async_proxy();
        named_sync(1 + owner, 128);
        if (!stores) return;
#pragma unroll
        for (int x = 0; x < 64; x += BOX_ROWS)
            if (first + x < QB) store_box(&c.whole, buffer + x * ROW_BYTES, at.n + row, at.m + first + x, at.cls);
        tma_store_commit();
    } else {
        const u32 rows = buffer + warp * 16 * ROW_BYTES;
        if (lane == 0) tma_store_wait<STORE_BUFFERS - 1>();
        __syncwarp();
        stage_rows(acc[mi * NI + first / WN], first % WN, rows, lane);
        fence_async_proxy();
        __syncwarp();
        const TensorMap* map = &c.whole;
#if !SWAPPED && QB % 64
        if (first + 64 > QB) map = &c.tail;
#endif
        if (lane == 0) {
            store_box(map, rows, at.n + first, at.m + row + warp * 16, at.cls);
            tma_store_commit();
        }
    }
}

__device__ __forceinline__ void consume(const Output& c, const WorkArgs& args, const Classes& classes,
                                        const Shared& shared, const Seat& seat, int owner) {
    const int thread = threadIdx.x % 128, part = PINGPONG ? 0 : owner;
    Ring ring;
    Segments<PARTIAL> work(args, seat.cluster, seat.clusters);
    Segment s;
    int buffer = 0;
    for (int item = 0; work.next(s); ++item) {
        const Place at = place(args, classes, s.tile, seat.rank);  // behind the products it would hold up the other's turn
        if (!my_turn(item, s.count, ring, shared, owner)) continue;
        float acc[MI * NI][WN / 2];  // first written by a wgmma that ignores what it held
        multiply(acc, s.count, ring, shared, owner, thread % 32);
        if constexpr (PARTIAL)
            if (!gather(acc, args, s, seat.rank * TILE_OWNERS + part, BLOCKS * TILE_OWNERS, thread, 1 + owner,
                        shared.flag(owner)))
                continue;
#pragma unroll
        for (int mi = 0; mi < MI; ++mi)
#pragma unroll
            for (int q = 0; q < QB; q += 64) {
                store(c, acc, at, shared.store(owner, buffer), mi, part, q, owner);
                buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
            }
    }
    tma_store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_pitch(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ Output c,
               const __grid_constant__ WorkArgs args, const __grid_constant__ Classes classes) {
    if (threadIdx.x == 32) {
        prefetch_map(&a);
        prefetch_map(&b);
        prefetch_map(&c.whole);
    }
    divide_work([&](const Shared& shared, const Seat& seat) { produce(&a, &b, args, classes, shared, seat); },
                [&](const Shared& shared, const Seat& seat, int owner) {
                    consume(c, args, classes, shared, seat, owner);
                });
}
