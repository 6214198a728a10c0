// o = softmax(q·cᵀ/√576)·c[:, :512]: latent attention in decode form, the cache read once and used as K and as V.
//
// A block has 64 query rows (heads and new tokens of one sequence) and walks a list of pieces of sequences in blocks
// of 64 tokens, one page each. A thread keeps two blocks of latents (nine 64 x 64 tiles each) arriving by TMA. The
// left warpgroup makes the scores and the softmax, and sums columns 0-255 of P·V; the right one sums columns 256-511
// with P from shared memory, where it lies in the place of the rotary tile, which only the scores need. V is the
// same latent tile, read by wgmma with its rows as k. Sums are scaled down only when the maximum has grown by more
// than 2^8. With LAG the right half of P·V waits until the next scores are done, and runs beneath their softmax.
// In a cluster two blocks with the two halves of 128 query rows load half of every tile and multicast it.
//
// Pieces of one sequence leave normalised fp32 sums in the workspace, and a second launch (`groups` > 0), chained by
// programmatic dependent launch, adds them up.
//
// Macros: CLUSTER LAG BF16 SMEM_BYTES
#include "mla_softmax.cuh"

constexpr int BLOCK_BYTES = TILES * TILE_BYTES;
constexpr int ROTARY = 8 * TILE_BYTES;        // the last tile; P takes its place
constexpr int CONSUMERS = 8, THREADS = 384;  // warps that compute; with a warpgroup that loads
// What setmaxnreg leaves each role; together at most the 65536 registers of an SM.
constexpr int PRODUCER_REGS = 40, CONSUMER_REGS = 232;
constexpr int OFFSET_BLOCKS = BLOCK_BYTES;    // behind q
constexpr int OFFSET_STAGING = 3 * BLOCK_BYTES;  // 1 KiB a warp
constexpr int OFFSET_SHRINK = OFFSET_STAGING + CONSUMERS * 1024;  // [2][64] floats
constexpr int OFFSET_INVERSE = OFFSET_SHRINK + 2 * ROWS * 4;      // [2][64] floats
constexpr int OFFSET_BARRIERS = OFFSET_INVERSE + 2 * ROWS * 4;
constexpr int BARRIERS = 2 * 7 + 2;
static_assert(1024 + OFFSET_BARRIERS + 8 * BARRIERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");

struct Shared {
    u32 base;
    unsigned char* bytes;  // the same place
    __device__ __forceinline__ u32 q() const { return base; }
    __device__ __forceinline__ u32 block(int b) const { return base + OFFSET_BLOCKS + b * BLOCK_BYTES; }
    __device__ __forceinline__ u32 staging(int warp) const { return base + OFFSET_STAGING + warp * 1024; }
    __device__ __forceinline__ float* shrink(int b) const {
        return reinterpret_cast<float*>(bytes + OFFSET_SHRINK) + b * ROWS;
    }
    __device__ __forceinline__ float* inverse(int b) const {
        return reinterpret_cast<float*>(bytes + OFFSET_INVERSE) + b * ROWS;
    }
    __device__ __forceinline__ u32 barrier(int i) const { return base + OFFSET_BARRIERS + 8 * i; }
    __device__ __forceinline__ u32 full_left(int b) const { return barrier(b); }         // tiles 0-3
    __device__ __forceinline__ u32 full_right(int b) const { return barrier(2 + b); }    // tiles 4-8
    __device__ __forceinline__ u32 empty_left(int b) const { return barrier(4 + b); }
    __device__ __forceinline__ u32 empty_right(int b) const { return barrier(6 + b); }
    __device__ __forceinline__ u32 weighted(int b) const { return barrier(8 + b); }  // P is there
    __device__ __forceinline__ u32 scored(int b) const { return barrier(10 + b); }   // the scores are done
    __device__ __forceinline__ u32 summed(int b) const { return barrier(12 + b); }   // so is a piece
    __device__ __forceinline__ u32 q_full() const { return barrier(14); }
    __device__ __forceinline__ u32 q_empty() const { return barrier(15); }
};

// What all roles know of this block's work.
struct Work {
    int worker, tile, rank;
};

__device__ __forceinline__ u32 parity(int use) { return use >> 1 & 1; }

// ---- the thread that loads ---------------------------------------------------------------------------

// Loads tiles FIRST to END - 1. A wait costs the warpgroups some 80 clocks even when all is there, half of what a
// tile's products take: so there is one for half a block, and not one a tile.
template <int FIRST, int END>
__device__ __forceinline__ void load_tiles(const TensorMap& cache, u32 block, u32 full, int page, int rank,
                                           u64 policy) {
    barrier_expect(full, (END - FIRST) * TILE_BYTES);
#pragma unroll
    for (int t = FIRST; t < END; ++t) {
        if constexpr (CLUSTER == 1)
            tma_load_hint(block + t * TILE_BYTES, &cache, full, t * 64, page * TOKENS, policy);
        else
            tma_multicast_hint(block + t * TILE_BYTES + rank * (TILE_BYTES / 2), &cache, full, t * 64,
                               page * TOKENS + rank * (TOKENS / 2), 3, policy);
    }
}

__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& cache, const Args& args,
                                        const Shared& shared, const Work& work) {
    const u64 once = policy_evict_first();
    const int stop = __ldg(args.starts + work.worker + 1);
    int use = 0, pieces = 0;
#pragma unroll 1
    for (int at = __ldg(args.starts + work.worker); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        if (item.begin == item.end) continue;
        const int* const pages = args.table + size_t(item.row) * args.width;
        int page = __ldg(pages + item.begin);
#pragma unroll 1
        for (int j = item.begin; j < item.end; ++j, ++use) {
            const int next = __ldg(pages + min(j + 1, item.end - 1));
            const int b = use & 1;
            barrier_wait(shared.empty_left(b), parity(use) ^ 1);
            load_tiles<0, 4>(cache, shared.block(b), shared.full_left(b), page, work.rank, once);
            barrier_wait(shared.empty_right(b), parity(use) ^ 1);
            load_tiles<4, TILES>(cache, shared.block(b), shared.full_right(b), page, work.rank, once);
            page = next;
            if (j > item.begin) continue;
            barrier_wait(shared.q_empty(), (pieces & 1) ^ 1);
            barrier_expect(shared.q_full(), TILES * min(args.rows, ROWS) * 128);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                tma_load(shared.q() + t * TILE_BYTES, &q, shared.q_full(), t * 64,
                         item.row * args.rows + work.tile * ROWS);
        }
        ++pieces;
    }
}

// ---- results -----------------------------------------------------------------------------------------

// Stores 256 columns of 16 rows: `sum` times `inverse` (of rows lane/4 and lane/4 + 8), columns from `column` on.
__device__ __forceinline__ void store_sums(const float (&sum)[128], const float (&inverse)[2], const Args& args,
                                           const Item& item, const Work& work, u32 staging, int warp, int column,
                                           int lane) {
    const int left = args.rows - work.tile * ROWS - warp * 16;  // rows of this warp that there are
    if (item.count > 1) {
        const size_t slot = size_t(item.slot) * args.tiles + work.tile;
        float* const to = args.sums + (slot * ROWS + warp * 16 + lane / 4) * D_V + column + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (lane / 4 + 8 * r >= left) break;
#pragma unroll
            for (int n = 0; n < 32; ++n)
                __stcg(reinterpret_cast<float2*>(to + r * 8 * D_V + n * 8),
                       make_float2(sum[4 * n + 2 * r] * inverse[r], sum[4 * n + 2 * r + 1] * inverse[r]));
        }
        return;
    }
    u16* const to = args.o + (size_t(item.row) * args.rows + work.tile * ROWS + warp * 16) * D_V + column;
    const int row = lane % 16;
#pragma unroll
    for (int c = 0; c < 8; ++c) {  // 32 columns at a time
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float* const v = &sum[16 * c + 8 * h];
            stmatrix(staging + row * 64 + ((2 * h + lane / 16) ^ (row >> 1 & 3)) * 16,
                     pack(v[0] * inverse[0], v[1] * inverse[0]), pack(v[2] * inverse[1], v[3] * inverse[1]),
                     pack(v[4] * inverse[0], v[5] * inverse[0]), pack(v[6] * inverse[1], v[7] * inverse[1]));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = lane / 4 + 8 * i;
            const uint4 v = load_shared_quad(staging + r * 64 + ((lane % 4) ^ (r >> 1 & 3)) * 16);
            if (r < left) *reinterpret_cast<uint4*>(to + size_t(r) * D_V + c * 32 + lane % 4 * 8) = v;
        }
        __syncwarp();
    }
}

__device__ __forceinline__ void scale_sums(float (&sum)[128], float upper, float lower) {
#pragma unroll
    for (int n = 0; n < 32; ++n)
        sum[4 * n] *= upper, sum[4 * n + 1] *= upper, sum[4 * n + 2] *= lower, sum[4 * n + 3] *= lower;
}

// ---- the left warpgroup ------------------------------------------------------------------------------

// Issues s += q·cᵀ over tiles FIRST to END - 1 of buffer `b`; tile 0 overwrites what s held.
template <int FIRST, int END>
__device__ __forceinline__ void issue_tiles(float (&s)[32], const Shared& shared, int b) {
    const u64 q = tile_descriptor(opaque(shared.q())), c = tile_descriptor(shared.block(b));
    wgmma_fence();
#pragma unroll
    for (int t = FIRST; t < END; ++t)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            Wgmma<64>::run(s, q + t * (TILE_BYTES >> 4) + 2 * k, c + t * (TILE_BYTES >> 4) + 2 * k, t | k);
}

// Issues s = q·cᵀ of block `use`, each half when it is there.
__device__ __forceinline__ void issue_scores(float (&s)[32], const Shared& shared, int use) {
    const int b = use & 1;
    barrier_wait(shared.full_left(b), parity(use));
    issue_tiles<0, 4>(s, shared, b);
    barrier_wait(shared.full_right(b), parity(use));
    issue_tiles<4, TILES>(s, shared, b);
    wgmma_commit();
}

// Hands P and `shrink` of block `use` to the right warpgroup.
__device__ __forceinline__ void publish(const u32 (&p)[4][4], const float (&shrink)[2], const Shared& shared, int use,
                                        int warp, int lane) {
    const int b = use & 1, row = warp * 16 + lane % 16;
    const u32 line = shared.block(b) + ROTARY + row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        stmatrix(line + (((2 * k + lane / 16) ^ row) & 7) * 16, p[k][0], p[k][1], p[k][2], p[k][3]);
    if (lane % 4 == 0) {
        shared.shrink(b)[warp * 16 + lane / 4] = shrink[0];
        shared.shrink(b)[warp * 16 + lane / 4 + 8] = shrink[1];
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.weighted(b));
}

// One warp of the cluster's blocks says that it has read a half of a block of latents.
__device__ __forceinline__ void release(u32 empty, int lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(empty);
    } else {
        if (lane < CLUSTER) barrier_arrive_at(empty, lane);
    }
}

__device__ __forceinline__ void sum_left(const Args& args, const Shared& shared, const Work& work, int warp, int lane) {
    const int stop = __ldg(args.starts + work.worker + 1);
    int use = 0, pieces = 0;
#pragma unroll 1
    for (int at = __ldg(args.starts + work.worker); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        if (item.begin == item.end) {
            store_zeros(args, item, work.tile, 0, warp * 32 + lane);
            continue;
        }
        // Row r sees the tokens before seen[r]; a row past the last one sees what the last one does.
        int seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = (work.tile * ROWS + warp * 16 + lane / 4 + 8 * r) / args.heads;
            seen[r] = item.tokens - max(args.queries - 1 - query, 0);
        }
        Softmax state{{minus_infinity(), minus_infinity()}, {0.f, 0.f}};
        float sum[128], s[32];  // both first written by a wgmma that ignores what they held
        barrier_wait(shared.q_full(), pieces & 1);
        wgmma_fence();
        issue_scores(s, shared, use);
        wgmma_wait<0>();
        settle(s);
#pragma unroll 1
        for (int j = item.begin; true; ++j, ++use) {
            const int b = use & 1;
            const bool last = j + 1 == item.end;
            if (lane == 0) {
                if (last) barrier_arrive(shared.q_empty());
                if constexpr (LAG) barrier_arrive(shared.scored(b));
            }
            named_sync(1, 128);  // all four warps have read the rotary tile
            u32 p[4][4];
            float shift[2], shrink[2];
            const int limit[2] = {seen[0] - j * TOKENS, seen[1] - j * TOKENS};
            const bool masked = (j + 1) * TOKENS > item.tokens - args.queries + 1;
            rate(s, shift, shrink, state, limit, masked, args.scale, lane);
            if (j > item.begin && __any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f))
                scale_sums(sum, shrink[0], shrink[1]);
            const u64 values = value_descriptor(shared.block(b), TILE_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) {  // the tensor cores begin with the first 16 tokens
                weigh(s, p[k], k, shift, args.scale);
                wgmma_fence();
                multiply_values(sum, p[k], values + 128 * k, (j - item.begin) | k);
            }
            wgmma_commit();
            publish(p, shrink, shared, use, warp, lane);
            add_weights(p, shrink, state);
            wgmma_wait<0>();
            settle(sum);
            release(shared.empty_left(b), lane);
            if (last) break;
            issue_scores(s, shared, use + 1);
            wgmma_wait<0>();
            settle(s);
        }
        ++use;
        float inverse[2];
        const size_t slot = (size_t(item.slot) * args.tiles + work.tile) * ROWS;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp * 16 + lane / 4 + 8 * r;
            const float total = quad_sum(state.total[r]);
            inverse[r] = total > 0.f ? 1.f / total : 0.f;
            if (lane % 4 == 0) {
                shared.inverse(pieces & 1)[row] = inverse[r];
                const float scale = total > 0.f ? state.reference[r] + log2_fast(total) : minus_infinity();
                if (item.count > 1) __stcg(args.scales + slot + row, scale);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.summed(pieces & 1));
        ++pieces;
        store_sums(sum, inverse, args, item, work, shared.staging(warp), warp, 0, lane);
    }
}

// ---- the right warpgroup -----------------------------------------------------------------------------

__device__ __forceinline__ void sum_right(const Args& args, const Shared& shared, const Work& work, int warp,
                                          int lane) {
    const int stop = __ldg(args.starts + work.worker + 1);
    int use = 0, pieces = 0;
#pragma unroll 1
    for (int at = __ldg(args.starts + work.worker); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        if (item.begin == item.end) {
            store_zeros(args, item, work.tile, D_V / 2, warp * 32 + lane);
            continue;
        }
        const int row = warp * 16 + lane / 4;
        float sum[128];  // first written by a wgmma that ignores what it held
#pragma unroll 1
        for (int j = item.begin; true; ++j, ++use) {
            const int b = use & 1;
            const bool last = j + 1 == item.end;
            barrier_wait(shared.full_right(b), parity(use));  // long there; a wait costs less while P is not
            barrier_wait(shared.weighted(b), parity(use));
            const float upper = shared.shrink(b)[row], lower = shared.shrink(b)[row + 8];
            if (j > item.begin && __any_sync(~0u, upper != 1.f || lower != 1.f)) scale_sums(sum, upper, lower);
            if constexpr (LAG) {
                if (!last) barrier_wait(shared.scored(b ^ 1), parity(use + 1));
            }
            const u64 weights = tile_descriptor(shared.block(b) + ROTARY);
            const u64 values = value_descriptor(shared.block(b) + 4 * TILE_BYTES, TILE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply_values(sum, weights + 2 * k, values + 128 * k, (j - item.begin) | k);
            wgmma_commit();
            wgmma_wait<0>();
            settle(sum);
            if (last) break;
            release(shared.empty_right(b), lane);
        }
        barrier_wait(shared.summed(pieces & 1), parity(pieces));
        const float inverse[2] = {shared.inverse(pieces & 1)[row], shared.inverse(pieces & 1)[row + 8]};
        __syncwarp();
        // Only now: the left warpgroup cannot come to write these inverses anew before it has another block.
        release(shared.empty_right(use & 1), lane);
        ++use;
        ++pieces;
        store_sums(sum, inverse, args, item, work, shared.staging(4 + warp), warp, D_V / 2, lane);
    }
}

// ---- the kernel --------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_decode(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap cache,
               const __grid_constant__ Args args) {
    extern __shared__ unsigned char raw[];
    // Swizzle atoms need 1024-byte alignment, the same in all blocks of the cluster.
    const u32 start = smem_address(raw), base = (start + 1023) & ~1023u;
    const Shared shared{base, raw + (base - start)};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (args.groups > 0) {
        wait_for_prerequisites();
        join(args, warp, THREADS / 32, lane);
        return;
    }
    launch_dependents();
    if (warp == CONSUMERS && lane == 0) {
        prefetch_map(&q);
        prefetch_map(&cache);
        for (int b = 0; b < 2; ++b) {
            barrier_init(shared.full_left(b), 1);
            barrier_init(shared.full_right(b), 1);
            barrier_init(shared.empty_left(b), 4 * CLUSTER);
            barrier_init(shared.empty_right(b), 4 * CLUSTER);
            barrier_init(shared.weighted(b), 4);
            barrier_init(shared.scored(b), 4);
            barrier_init(shared.summed(b), 4);
        }
        barrier_init(shared.q_full(), 1);
        barrier_init(shared.q_empty(), 4);
        barrier_init_fence();
    }
    __syncwarp();
    if constexpr (CLUSTER == 1)
        named_sync(0, THREADS);
    else
        cluster_sync();
    const int block = blockIdx.x;
    const Work work{block / args.tiles, block % args.tiles, CLUSTER == 1 ? 0 : int(cluster_rank())};
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, and known to be
    if (group == 2) {
        registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 256) produce(q, cache, args, shared, work);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        if (group == 0)
            sum_left(args, shared, work, warp, lane);
        else
            sum_right(args, shared, work, warp - 4, lane);
    }
    // A block must not leave while its neighbour may still write to it or arrive at its barriers.
    if constexpr (CLUSTER > 1) cluster_sync();
}
