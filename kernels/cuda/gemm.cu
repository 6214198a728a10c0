// C[M,N] = A[M,K] · B[N,K]ᵀ: persistent, warp-specialised, fed by TMA, multiplied by wgmma.
//
// The trick (ring.cuh): a producer warpgroup keeps a ring of k-blocks full, and one k-block's products stay in flight
// while the next is issued; with PINGPONG the epilogue of a tile runs beneath the products of the next, so that tiles may
// be narrow and fill whole waves. In a cluster of two blocks (CLUSTER_M x CLUSTER_N tiles) each block loads half of the
// operand that both need and multicasts it. Finished rows go through swizzled shared memory to asynchronous TMA stores,
// 16 rows of a warp at a time, so that no warp waits for another.
// What limits it: the tensor cores under load; at the highest clocks the way from L2, for narrow tiles read more.
//
// PLAIN_STORES 1 is for rows of C that do not start on 16 bytes, which no tensor map can describe: a warp reads
// its own rows back from shared memory and stores 128 bytes of one at a time, in pairs where the address allows.
// The operands then lie in copies with aligned rows, made by `repack` (repack.cuh) in the launch before.
//
// Macros: BM BN STAGES CLUSTER_M CLUSTER_N CONSUMERS MI PINGPONG PARTIAL STORE_BUFFERS PLAIN_STORES REPACK BF16
//         SMEM_BYTES
#define PB BM
#define QB BN
#define NI 1
constexpr int BLOCKS = CLUSTER_M * CLUSTER_N;
#include "ring.cuh"

#if REPACK
#include "repack.cuh"
#endif

constexpr int A_BOX = BM / CLUSTER_N;  // rows a TMA load
constexpr int B_BOX = BN / CLUSTER_M;

#if PLAIN_STORES
using Output = u16* __restrict__;  // the first element of C
#else
// C in boxes of a warp's 16 rows and 64 columns; `tail` has the columns of a tile that 64 does not divide.
struct Output {
    TensorMap whole;
#if BN % 64
    TensorMap tail;
#endif
};
#endif

// A tile of this block: its first row and column in C.
struct Place {
    int m, n;
    __device__ __forceinline__ Place(const WorkArgs& args, int tile, int rank) {
        int row, column;
        raster(args, tile, row, column);
        m = (row * CLUSTER_M + (CLUSTER_M > 1 ? rank : 0)) * BM;
        n = (column * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0)) * BN;
    }
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
                                        const Shared& shared, const Seat& seat) {
#if REPACK
    wait_for_prerequisites();  // the copies of A and B
#endif
    Ring ring;
    Segments<PARTIAL> work(args, seat.cluster, seat.clusters);
    Segment s;
    while (work.next(s)) {
        const Place at(args, s.tile, seat.rank);
#pragma unroll 1
        for (int kb = s.kb; kb < s.kb + s.count; ++kb, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 full = shared.full(ring.stage);
            barrier_expect(full, STAGE_BYTES);
            load_operand<A_BOX, CLUSTER_N>(a, shared.p(ring.stage), full, kb * 64, at.m, seat.rank);
            load_operand<B_BOX, CLUSTER_M>(b, shared.q(ring.stage), full, kb * 64, at.n, seat.rank);
        }
    }
}

#if PLAIN_STORES
// Stores a warp's 16 rows of a buffer, whose first element is (m, n) of C, by ordinary instructions: columns before
// min(64, `columns`) that C has. A row that starts on 2 modulo 4 goes out as one, then pairs, then one.
__device__ __forceinline__ void store_rows(u16* c, const WorkArgs& args, u32 rows, int m, int n, int columns, int lane) {
    const int end = min(min(64, columns), args.n - n);
    u16* at = c + size_t(m) * args.n + n;
#pragma unroll 4
    for (int row = 0; row < min(16, args.m - m); ++row, at += args.n) {
        const u32 word = load_shared(rows + row * ROW_BYTES + ((lane * 4) ^ ((row & 7) * 16)));
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
#endif

__device__ __forceinline__ void consume(const Output& c, const WorkArgs& args, const Shared& shared, const Seat& seat,
                                        int owner) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    Ring ring;
    Segments<PARTIAL> work(args, seat.cluster, seat.clusters);
    Segment s;
    int buffer = 0;
    for (int item = 0; work.next(s); ++item) {
        const Place at(args, s.tile, seat.rank);  // here: behind the products its divisions would hold up the other's turn
        if (!my_turn(item, s.count, ring, shared, owner)) continue;
        float acc[MI][BN / 2];  // first written by a wgmma that ignores what it held
        multiply(acc, s.count, ring, shared, owner, lane);
        const int part = PINGPONG ? 0 : owner;
        if constexpr (PARTIAL)
            if (!gather(acc, args, s, seat.rank * TILE_OWNERS + part, BLOCKS * TILE_OWNERS, thread, 1 + owner,
                        shared.flag(owner)))
                continue;
#pragma unroll
        for (int mi = 0; mi < MI; ++mi)
#pragma unroll
            for (int x = 0; x < BN; x += 64) {
                const u32 rows = shared.store(owner, buffer) + warp * 16 * ROW_BYTES;
                const int m = at.m + (part * MI + mi) * 64 + warp * 16, n = at.n + x;
#if PLAIN_STORES
                __syncwarp();
                stage_rows(acc[mi], x, rows, lane);
                __syncwarp();
                store_rows(c, args, rows, m, n, BN - x, lane);
#else
                if (lane == 0) tma_store_wait<STORE_BUFFERS - 1>();
                __syncwarp();
                stage_rows(acc[mi], x, rows, lane);
                fence_async_proxy();
                __syncwarp();
                const TensorMap* map = &c.whole;
#if BN % 64
                if (x + 64 > BN) map = &c.tail;
#endif
                if (lane == 0) {
                    if (m < args.m && n < args.n) tma_store(map, rows, n, m);
                    tma_store_commit();
                }
                buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
#endif
            }
    }
#if !PLAIN_STORES
    if (lane == 0) tma_store_wait<0>();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ Output c,
         const __grid_constant__ WorkArgs args) {
    if (threadIdx.x == 32) {
        prefetch_map(&a);
        prefetch_map(&b);
#if !PLAIN_STORES
        prefetch_map(&c.whole);
#endif
    }
    divide_work([&](const Shared& shared, const Seat& seat) { produce(a, b, args, shared, seat); },
                [&](const Shared& shared, const Seat& seat, int owner) { consume(c, args, shared, seat, owner); });
}
