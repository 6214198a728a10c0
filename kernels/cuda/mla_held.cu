// o = softmax(q·cᵀ/√576)·c[:, :512]: latent attention in decode form, q held in registers.
//
// As mla_decode.cu, a block has 64 query rows and walks pieces of sequences in blocks of 64 tokens. There the scores
// read q from shared memory again for every block, which is all that shared memory can give, and wait for the
// softmax of the block before. Here one warpgroup makes scores and softmax and nothing else, with most of q in
// registers: half the reads, and room for a third block of latents. Two warpgroups sum 256 columns of P·V each, with P
// in the place of the rotary tile, and load what they have read. The right one (with LAG both) waits until the next
// scores are done, so that the tensor cores have its product to do during the next softmax. q arrives as a block of
// its own. In a cluster two blocks with the two halves of 128 query rows load half of every tile and multicast it.
//
// Pieces of one sequence leave normalised fp32 sums in the workspace, and a second launch (`groups` > 0), chained by
// programmatic dependent launch, adds them up.
//
// Macros: HELD CLUSTER LAG BF16 SMEM_BYTES
#include "mla_held.cuh"
#include "mla_softmax.cuh"

constexpr int THREADS = 384;  // a warpgroup scores, two sum
// What setmaxnreg leaves each role; together the 168 registers that each thread has at first.
constexpr int SCORE_REGS = 184, SUM_REGS = 160;
static_assert(SCORE_REGS + 2 * SUM_REGS <= 3 * 168, "more registers than the block has");

// ---- the warpgroup that scores -----------------------------------------------------------------------

// One warp of the cluster's blocks says that it has read what `empty` guards.
__device__ __forceinline__ void release(u32 empty, int lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(empty);
    } else {
        if (lane < CLUSTER) barrier_arrive_at(empty, lane);
    }
}

// Takes q out of its block: HELD tiles to registers, as wgmma's operand, the others to their place.
__device__ __forceinline__ void take_queries(u32 (&q)[HELD][4][4], const Shared& shared, const Place& at, int warp,
                                             int lane) {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        shared.wait_from(at, t);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 place = row * 128 + (((2 * k + lane / 16) ^ row) & 7) * 16;
            if (t < HELD) {
                ldmatrix(q[t < HELD ? t : 0][k], shared.tile(at, t) + place);
            } else {
                u32 m[4];
                ldmatrix(m, shared.tile(at, t) + place);
                stmatrix(shared.q(t) + place, m[0], m[1], m[2], m[3]);
            }
        }
    }
    fence_async_proxy();
    named_sync(1, 128);  // the other warps' rows are there too
    release(shared.empty(at, 0), lane);
    release(shared.empty(at, 1), lane);
    for (int i = 0; i < 2; ++i) release(shared.slot_empty(at), lane);  // for both warpgroups that sum
    if (lane == 0) {
        // Nobody waits for these; but the phases of all barriers are to count the same.
        barrier_arrive(shared.scored(at));
        barrier_arrive(shared.weighted(at));
    }
}

// Issues s = q·cᵀ as its parts arrive.
__device__ __forceinline__ void issue_scores(float (&s)[32], const u32 (&q)[HELD][4][4], const Shared& shared,
                                             const Place& at) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        shared.wait_from(at, t);
        if (t == 0) wgmma_fence();
        const u64 c = tile_descriptor(shared.tile(at, t));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (t < HELD)
                multiply_keys(s, q[t < HELD ? t : 0][k], c + 2 * k, t | k);
            else
                Wgmma<64>::run(s, tile_descriptor(shared.q(t)) + 2 * k, c + 2 * k, 1);
        }
    }
    wgmma_commit();
}

// Hands P and `shrink` to the warpgroups that sum.
__device__ __forceinline__ void publish(const u32 (&p)[4][4], const float (&shrink)[2], const Shared& shared,
                                        const Place& at, int warp, int lane) {
    const int row = warp * 16 + lane % 16;
    const u32 line = shared.slot(at) + row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        stmatrix(line + (((2 * k + lane / 16) ^ row) & 7) * 16, p[k][0], p[k][1], p[k][2], p[k][3]);
    if (lane % 4 == 0) {
        shared.shrink(at)[warp * 16 + lane / 4] = shrink[0];
        shared.shrink(at)[warp * 16 + lane / 4 + 8] = shrink[1];
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.weighted(at));
}

// Leaves what the sums of a piece are to be multiplied by, and for a cut sequence the log2 of their divisor.
__device__ __forceinline__ void finish(const Softmax& state, const Args& args, const Item& item, const Shared& shared,
                                       const Work& work, int piece, int warp, int lane) {
    const size_t slot = (size_t(item.slot) * args.tiles + work.tile) * ROWS;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = warp * 16 + lane / 4 + 8 * r;
        const float total = quad_sum(state.total[r]);
        if (lane % 4 != 0) continue;
        shared.inverse(piece & 1)[row] = total > 0.f ? 1.f / total : 0.f;
        const float scale = total > 0.f ? state.reference[r] + log2_fast(total) : minus_infinity();
        if (item.count > 1) __stcg(args.scales + slot + row, scale);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.summed(piece));
}

__device__ __forceinline__ void score(const Args& args, const Shared& shared, const Work& work, int warp, int lane) {
    const int stop = __ldg(args.starts + work.worker + 1);
    int pieces = 0;
    Place place;
#pragma unroll 1
    for (int at = __ldg(args.starts + work.worker); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        if (item.begin == item.end) continue;
        // Row r sees the tokens before seen[r]; a row past the last one sees what the last one does.
        int seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = (work.tile * ROWS + warp * 16 + opaque(lane) / 4 + 8 * r) / args.heads;
            seen[r] = item.tokens - max(args.queries - 1 - query, 0);
        }
        u32 q[HELD][4][4];
        take_queries(q, shared, place, warp, lane);
        ++place.use;
        Softmax state{{minus_infinity(), minus_infinity()}, {0.f, 0.f}};
        float s[32];  // first written by a wgmma that ignores what it held
        u32 p[4][4] = {};
        float shrink[2] = {1.f, 1.f};
#pragma unroll 1
        for (int j = item.begin; j < item.end; ++j, ++place.use) {
            issue_scores(s, q, shared, place);
            add_weights(p, shrink, state);  // of the block before, beneath this one's scores
            wgmma_wait<0>();
            settle(s);
            if (lane == 0) barrier_arrive(shared.scored(place));
            named_sync(1, 128);  // all four warps have read the rotary tile
            float shift[2];
            const int limit[2] = {seen[0] - j * TOKENS, seen[1] - j * TOKENS};
            const bool masked = (j + 1) * TOKENS > item.tokens - args.queries + 1;
            rate(s, shift, shrink, state, limit, masked, args.scale, lane);
#pragma unroll
            for (int k = 0; k < 4; ++k) weigh(s, p[k], k, shift, args.scale);
            publish(p, shrink, shared, place, warp, lane);
        }
        add_weights(p, shrink, state);
        finish(state, args, load_item(args.items, opaque(at)), shared, work, pieces, warp, opaque(lane));
        ++pieces;
    }
}

// ---- the warpgroups that sum -------------------------------------------------------------------------

__device__ __forceinline__ void scale_sums(float (&sum)[128], float upper, float lower) {
#pragma unroll
    for (int n = 0; n < 32; ++n)
        sum[4 * n] *= upper, sum[4 * n + 1] *= upper, sum[4 * n + 2] *= lower, sum[4 * n + 3] *= lower;
}

// Stores 256 columns, from `column` on, of this warp's 16 rows: `sum` times the rows' `inverses`. `staging` are 8 KiB
// of this warp's.
__device__ __forceinline__ void store_rows(const float (&sum)[128], const Args& args, const Item& item,
                                           const float* inverses, const Work& work, u32 staging, int warp, int column,
                                           int lane) {
    const float inverse[2] = {inverses[warp * 16 + lane / 4], inverses[warp * 16 + lane / 4 + 8]};
    const int left = args.rows - work.tile * ROWS - warp * 16;  // rows of this warp that there are
    if (item.count > 1) {
        const size_t slot = size_t(item.slot) * args.tiles + opaque(work.tile);
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
    const u32 line = staging + lane % 16 * 512;
#pragma unroll
    for (int n = 0; n < 16; ++n) {  // 16 columns at a time; 16-byte pieces of a row change places as in a swizzle
        const float* const v = &sum[8 * n];
        stmatrix(line + ((2 * n + lane / 16) ^ (lane & 7)) * 16, pack(v[0] * inverse[0], v[1] * inverse[0]),
                 pack(v[2] * inverse[1], v[3] * inverse[1]), pack(v[4] * inverse[0], v[5] * inverse[0]),
                 pack(v[6] * inverse[1], v[7] * inverse[1]));
    }
    __syncwarp();
    u16* const to = args.o + (size_t(item.row) * args.rows + work.tile * ROWS + warp * 16) * D_V + column + lane * 8;
#pragma unroll 4
    for (int r = 0; r < min(16, left); ++r)
        *reinterpret_cast<uint4*>(to + size_t(r) * D_V) = load_shared_quad(staging + r * 512 + (lane ^ (r & 7)) * 16);
}

// `side` 0 sums columns 0-255, 1 the others; both load their half of the blocks when it has been read.
__device__ __forceinline__ void sum_values(const Maps& maps, const Args& args, const Shared& shared, const Work& work,
                                           int side, int warp, int lane) {
    const int stop = __ldg(args.starts + work.worker + 1);
    const bool late = LAG || side;
    int pieces = 0;
    Place place;
    const auto look = [&] {
        if (warp == 0 && lane == 0) look_ahead(args, shared, work, side);
        __syncwarp();
    };
    const auto load = [&](const Place& next) {
        if (warp == 0 && lane == 0) refill(maps, args, shared, work, side, next);
        __syncwarp();
    };
    const auto leave = [&](const Place& at) {
        release(shared.empty(at, side), lane);
        release(shared.slot_empty(at), lane);
        load(Place{at.use + BLOCKS});
    };
    if (warp == 0 && lane == 0) *shared.ahead(side) = Ahead{__ldg(args.starts + work.worker), 0, 0, NOTHING, NOTHING};
#pragma unroll 1
    for (int use = 0; use < BLOCKS; ++use) {
        look();
        load(Place{use});
    }
#pragma unroll 1
    for (int at = __ldg(args.starts + work.worker); at < stop; ++at) {
        int left;
        {
            const Item item = load_item(args.items, at);
            left = item.end - item.begin;
            if (left == 0) {
                store_zeros(args, item, work.tile, side * (D_V / 2), opaque(warp * 32 + lane));
                continue;
            }
        }
        look();
        load(Place{place.use + BLOCKS});  // in the place of q
        ++place.use;
        float sum[128];  // first written by a wgmma that ignores what it held
        int keep = 0;
#pragma unroll 1
        while (true) {
            barrier_wait(shared.full(place, side), place.parity());  // long there; a wait costs less while P is not
            barrier_wait(shared.weighted(place), place.slot_parity());
            const float* const shrink = shared.shrink(place) + warp * 16 + lane / 4;
            const float upper = shrink[0], lower = shrink[8];
            if (keep && __any_sync(~0u, upper != 1.f || lower != 1.f)) scale_sums(sum, upper, lower);
            if (late && left > 1) {
                const Place next{place.use + 1};
                barrier_wait(shared.scored(next), next.slot_parity());
            }
            const u64 weights = tile_descriptor(shared.slot(place));
            const u64 values = value_descriptor(shared.block(place) + side * 4 * TILE_BYTES, TILE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply_values(sum, weights + 2 * k, values + 128 * k, keep | k);
            wgmma_commit();
            look();
            wgmma_wait<0>();
            settle(sum);
            keep = 1;
            if (--left == 0) break;
            leave(place);
            ++place.use;
        }
        barrier_wait(shared.summed(pieces), pieces >> 1 & 1);
        named_sync(2 + side, 128);  // all four warps have read the tiles, which now hold results
        store_rows(sum, args, load_item(args.items, opaque(at)), shared.inverse(pieces & 1), work,
                   shared.block(place) + (side * 4 + warp) * TILE_BYTES, opaque(warp), opaque(side) * (D_V / 2),
                   opaque(lane));
        fence_async_proxy();
        __syncwarp();
        // Only now: no later piece can write its inverses here before it has this block.
        leave(place);
        ++place.use;
        ++pieces;
    }
}

// ---- the kernel --------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_held(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap rotary,
             const __grid_constant__ TensorMap values, const __grid_constant__ Args args) {
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
    if (threadIdx.x == 0) {
        prefetch_map(&q);
        prefetch_map(&rotary);
        prefetch_map(&values);
        for (int use = 0; use < BLOCKS; ++use) {
            const Place at{use};
            for (int side = 0; side < 2; ++side) {
                barrier_init(shared.full(at, side), 1);
                barrier_init(shared.empty(at, side), 4 * CLUSTER);
            }
        }
        for (int use = 0; use < SLOTS; ++use) {
            const Place at{use};
            barrier_init(shared.slot_full(at), 1);
            barrier_init(shared.slot_empty(at), 8 * CLUSTER);
            barrier_init(shared.weighted(at), 4);
            barrier_init(shared.scored(at), 4);
        }
        for (int piece = 0; piece < 2; ++piece) barrier_init(shared.summed(piece), 4);
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
    if (group == 0) {
        registers_up<SCORE_REGS>();
        score(args, shared, work, warp, lane);
    } else {
        registers_down<SUM_REGS>();
        sum_values(Maps{q, rotary, values}, args, shared, work, group - 1, warp % 4, lane);
    }
    // A block must not leave while its neighbour may still write to it or arrive at its barriers.
    if constexpr (CLUSTER > 1) cluster_sync();
}
