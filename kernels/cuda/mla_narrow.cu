// o = softmax(q·cᵀ/√576)·c[:, :512] for at most 32 query rows a sequence: the cache streamed once, as K and as V.
//
// Operands are swapped: 64 tokens are the rows of wgmma and QUERIES its columns, so that few heads do not pay for 64.
// S = c·qᵀ has c as it lies; oᵀ = cᵀ·Pᵀ reads the same tiles with tokens as k. Two warpgroups take blocks of tokens by
// turns, each with sums, maximum and total of its own: one computes while the other waits, and both are put together
// at the end of a piece. A thread keeps a ring of RING tiles (64 tokens x 64 components, a page is nine) arriving by
// TMA. What limits it is memory; a warpgroup has a block for about half of the time that two take to arrive.
// Pieces, workspace and second launch are those of mla_decode.cu.
//
// Macros: QUERIES RING BF16 SMEM_BYTES
#include "mla.cuh"

constexpr int CONSUMERS = 8, THREADS = 384;  // warps that compute; with a warpgroup that loads
// What setmaxnreg leaves each role; together at most the 65536 registers of an SM.
constexpr int PRODUCER_REGS = 40, CONSUMER_REGS = 232;
constexpr int EIGHTS = QUERIES / 8;
constexpr int OWN = QUERIES / 4;              // queries of a lane: 8·n + 2·(lane%4) and the next
constexpr int Q_BYTES = QUERIES * 128;        // 64 components of all queries
constexpr int SUMS = QUERIES / 2;             // of a lane in 64 components of the output
constexpr int OFFSET_Q = RING * TILE_BYTES;
constexpr int OFFSET_WEIGHTS = OFFSET_Q + TILES * Q_BYTES;              // Pᵀ of each warpgroup
constexpr int OFFSET_EXCHANGE = OFFSET_WEIGHTS + 2 * Q_BYTES;           // SUMS floats a thread of both
constexpr int OFFSET_TOPS = OFFSET_EXCHANGE + 2 * 128 * SUMS * 4;       // [2][4 warps][QUERIES] floats
constexpr int OFFSET_TOTALS = OFFSET_TOPS + CONSUMERS * QUERIES * 4;    // the same
constexpr int OFFSET_REFERENCES = OFFSET_TOTALS + CONSUMERS * QUERIES * 4;  // [2][QUERIES] floats
constexpr int OFFSET_BARRIERS = OFFSET_REFERENCES + 2 * QUERIES * 4;
static_assert(1024 + OFFSET_BARRIERS + 8 * (2 * RING + 2) <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(QUERIES == 16 || QUERIES == 32, "queries are whole swizzle atoms, and their sums fit the registers");
static_assert(RING >= 2 * TILES, "each warpgroup needs a block");

struct Shared {
    u32 base;
    unsigned char* bytes;  // the same place
    __device__ __forceinline__ u32 tile(int slot) const { return base + slot * TILE_BYTES; }
    __device__ __forceinline__ u32 q(int t) const { return base + OFFSET_Q + t * Q_BYTES; }
    __device__ __forceinline__ u32 weights(int group) const { return base + OFFSET_WEIGHTS + group * Q_BYTES; }
    __device__ __forceinline__ float4* exchange(int group) const {
        return reinterpret_cast<float4*>(bytes + OFFSET_EXCHANGE) + group * (128 * SUMS / 4);
    }
    __device__ __forceinline__ float* tops(int group, int warp) const {
        return reinterpret_cast<float*>(bytes + OFFSET_TOPS) + (group * 4 + warp) * QUERIES;
    }
    __device__ __forceinline__ float* totals(int group, int warp) const {
        return reinterpret_cast<float*>(bytes + OFFSET_TOTALS) + (group * 4 + warp) * QUERIES;
    }
    __device__ __forceinline__ float* references(int group) const {
        return reinterpret_cast<float*>(bytes + OFFSET_REFERENCES) + group * QUERIES;
    }
    __device__ __forceinline__ u32 full(int slot) const { return base + OFFSET_BARRIERS + 8 * slot; }
    __device__ __forceinline__ u32 empty(int slot) const { return full(RING + slot); }
    __device__ __forceinline__ u32 q_full() const { return full(2 * RING); }
    __device__ __forceinline__ u32 q_empty() const { return full(2 * RING + 1); }
};

// Tiles are counted over all blocks: tile i of block n is number 9·n + i, the rotary one first.
__device__ __forceinline__ int slot_of(int number) { return number % RING; }
__device__ __forceinline__ u32 parity_of(int number) { return number / RING & 1; }
__device__ __forceinline__ int column_of(int i) { return i == 0 ? TILES - 1 : i - 1; }

// ---- the thread that loads ---------------------------------------------------------------------------

__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& cache, const Args& args,
                                        const Shared& shared) {
    const u64 once = policy_evict_first();
    const int stop = __ldg(args.starts + blockIdx.x + 1);
    int number = 0, pieces = 0;
#pragma unroll 1
    for (int at = __ldg(args.starts + blockIdx.x); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        if (item.begin == item.end) continue;
        const int* const pages = args.table + size_t(item.row) * args.width;
        int page = __ldg(pages + item.begin);
#pragma unroll 1
        for (int j = item.begin; j < item.end; ++j) {
            const int next = __ldg(pages + min(j + 1, item.end - 1));
#pragma unroll 1
            for (int i = 0; i < TILES; ++i, ++number) {
                const int slot = slot_of(number);
                barrier_wait(shared.empty(slot), parity_of(number) ^ 1);
                barrier_expect(shared.full(slot), TILE_BYTES);
                tma_load_hint(shared.tile(slot), &cache, shared.full(slot), column_of(i) * 64, page * TOKENS, once);
            }
            page = next;
            if (j > item.begin) continue;
            barrier_wait(shared.q_empty(), (pieces & 1) ^ 1);
            barrier_expect(shared.q_full(), TILES * args.rows * 128);
#pragma unroll 1
            for (int t = 0; t < TILES; ++t) tma_load(shared.q(t), &q, shared.q_full(), t * 64, item.row * args.rows);
        }
        ++pieces;
    }
}

// ---- the warpgroups that compute ---------------------------------------------------------------------

// The softmax of a lane's queries, the same in all lanes that share them but for `total`, which is a lane's own.
// `reference` is what P is scaled with, times the scale of the scores.
struct Softmax {
    float reference[OWN], total[OWN];
};

// Over the eight lanes that share queries.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}

__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// The query of a lane's own number `own`.
__device__ __forceinline__ int query_of(int own, int lane) { return own / 2 * 8 + lane % 4 * 2 + own % 2; }

// s = c·qᵀ of the block whose first tile has that number, tile by tile as they arrive.
__device__ __forceinline__ void score(float (&s)[SUMS], const Shared& shared, int number) {
#pragma unroll 1
    for (int i = 0; i < TILES; ++i) {
        const int slot = slot_of(number + i);
        barrier_wait(shared.full(slot), parity_of(number + i));
        const u64 c = tile_descriptor(shared.tile(slot)), q = tile_descriptor(shared.q(column_of(i)));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<QUERIES>::run(s, c + 2 * k, q + 2 * k, i | k);
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(s);
}

// P of one block, to shared memory as wgmma's second operand. A lane holds tokens 16·warp + lane/4 (+ 8), of which
// those before limit[own] count. Returns whether any sum has to be multiplied by `shrink` (of a lane's queries).
__device__ __forceinline__ bool weigh(float (&s)[SUMS], float (&shrink)[OWN], Softmax& state, const Shared& shared,
                                      const int (&limit)[OWN], bool masked, float scale, int group, int warp,
                                      int lane) {
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        float* const x = &s[own / 2 * 4 + own % 2];  // x[0], and 8 tokens later x[2]
        if (masked) {
            if (warp * 16 + lane / 4 >= limit[own]) x[0] = minus_infinity();
            if (warp * 16 + lane / 4 + 8 >= limit[own]) x[2] = minus_infinity();
        }
        const float top = column_max(fmaxf(x[0], x[2]));
        if (lane < 4) shared.tops(group, warp)[query_of(own, lane)] = top;
    }
    named_sync(1 + group, 128);  // also: all warps have read the last block's P
    bool any = false;
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        float* const x = &s[own / 2 * 4 + own % 2];
        float top = minus_infinity();
#pragma unroll
        for (int w = 0; w < 4; ++w) top = fmaxf(top, shared.tops(group, w)[query_of(own, lane)]);
        top *= scale;
        const bool grown = top > state.reference[own] + SLACK;
        shrink[own] = grown ? exp2_fast(state.reference[own] - top) : 1.f;
        any |= grown;
        if (grown) state.reference[own] = top;
        const float shift = state.reference[own] == minus_infinity() ? 0.f : state.reference[own];
        x[0] = exp2_fast(fmaf(x[0], scale, -shift));
        x[2] = exp2_fast(fmaf(x[2], scale, -shift));
    }
    const u32 line = shared.weights(group) + (lane & 7) * 128 + (((warp * 2 + (lane >> 3 & 1)) ^ lane) & 7) * 16;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
        const u32 upper = pack(s[4 * n], s[4 * n + 1]), lower = pack(s[4 * n + 2], s[4 * n + 3]);
        stmatrix_transposed(line + n * 1024, upper, lower);
        // What is added up is P as rounded: a weight that dominates and is no power of two cancels its rounding.
        float* const total = &state.total[2 * n];
        total[0] = fmaf(total[0], shrink[2 * n], low_half(upper) + low_half(lower));
        total[1] = fmaf(total[1], shrink[2 * n + 1], high_half(upper) + high_half(lower));
    }
    fence_async_proxy();
    named_sync(1 + group, 128);
    return any;
}

__device__ __forceinline__ void scale_sums(float (&sum)[8][SUMS], const float (&factor)[OWN]) {
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sum[t][i] *= factor[i / 4 * 2 + i % 2];
}

// Tiles t and 4 + t of both warpgroups' sums change hands: the first keeps tiles 0-3, the second 4-7, which it moves
// to the front. Sums are multiplied by the factor of their warpgroup, and added.
__device__ __forceinline__ void merge_sums(float (&sum)[8][SUMS], const float (&mine)[OWN], const float (&other)[OWN],
                                           const Shared& shared, int group, int thread) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = group == 0 ? sum[4 + t][i + e] : sum[t][i + e];
            shared.exchange(group)[i / 4 * 128 + thread] = make_float4(v[0], v[1], v[2], v[3]);
        }
        named_sync(3, 256);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 v = shared.exchange(group ^ 1)[i / 4 * 128 + thread];
            const float theirs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int own = i / 4 * 2 + e % 2;
                const float x = group == 0 ? sum[t][i + e] : sum[4 + t][i + e];
                sum[t][i + e] = fmaf(x, mine[own], theirs[e] * other[own]);
            }
        }
        named_sync(3, 256);
    }
}

// Stores tiles 0-3 of `sum` as columns 256·group and on of `left` queries.
__device__ __forceinline__ void store_sums(const float (&sum)[8][SUMS], const Args& args, const Item& item,
                                           const Shared& shared, int group, int warp, int lane) {
    if (item.count > 1) {
        float* const to = args.sums + size_t(item.slot) * ROWS * D_V + group * 256 + warp * 16 + lane / 4;
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int query = query_of(own, lane);
            if (query >= args.rows) continue;
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    __stcg(to + query * D_V + t * 64 + h * 8, sum[t][own / 2 * 4 + own % 2 + 2 * h]);
        }
        return;
    }
    const int thread = warp * 32 + lane;
    const u32 staging = shared.weights(group);
    const u32 line = staging + (lane & 7) * 128 + (((warp * 2 + (lane >> 3 & 1)) ^ lane) & 7) * 16;
    u16* const to = args.o + size_t(item.row) * args.rows * D_V + group * 256;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        named_sync(1 + group, 128);
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            const float* const v = &sum[t][4 * n];
            stmatrix_transposed(line + n * 1024, pack(v[0], v[1]), pack(v[2], v[3]));
        }
        named_sync(1 + group, 128);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i) {
            const int query = i * 16 + thread / 8, column = thread % 8;
            const uint4 v = load_shared_quad(staging + query * 128 + ((column ^ query) & 7) * 16);
            if (query < args.rows) *reinterpret_cast<uint4*>(to + query * D_V + t * 64 + column * 8) = v;
        }
    }
}

// The end of a piece: both warpgroups' halves of its blocks become one result, of which each stores half the columns.
__device__ __forceinline__ void finish(float (&sum)[8][SUMS], const Softmax& state, const Args& args, const Item& item,
                                       const Shared& shared, int group, int warp, int lane) {
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        const float total = column_sum(state.total[own]);
        if (lane >= 4) continue;
        shared.totals(group, warp)[query_of(own, lane)] = total;
        if (warp == 0) shared.references(group)[query_of(own, lane)] = state.reference[own];
    }
    named_sync(3, 256);
    float mine[OWN], other[OWN];
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        const int query = query_of(own, lane);
        float total[2] = {0.f, 0.f};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            total[0] += shared.totals(group, w)[query];
            total[1] += shared.totals(group ^ 1, w)[query];
        }
        const float theirs = shared.references(group ^ 1)[query];
        const float top = fmaxf(state.reference[own], theirs);
        mine[own] = total[0] > 0.f ? exp2_fast(state.reference[own] - top) : 0.f;
        other[own] = total[1] > 0.f ? exp2_fast(theirs - top) : 0.f;
        const float all = total[0] * mine[own] + total[1] * other[own];
        const float inverse = all > 0.f ? 1.f / all : 0.f;
        mine[own] *= inverse;
        other[own] *= inverse;
        if (item.count > 1 && group == 0 && warp == 0 && lane < 4 && query < args.rows)
            __stcg(args.scales + size_t(item.slot) * ROWS + query, all > 0.f ? top + log2_fast(all) : minus_infinity());
    }
    merge_sums(sum, mine, other, shared, group, warp * 32 + lane);
    store_sums(sum, args, item, shared, group, warp, lane);
}

__device__ __forceinline__ void consume(const Args& args, const Shared& shared, int group, int warp, int lane) {
    const int stop = __ldg(args.starts + blockIdx.x + 1);
    int number = 0, pieces = 0;
#pragma unroll 1
    for (int at = __ldg(args.starts + blockIdx.x); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        if (item.begin == item.end) {
            store_zeros(args, item, 0, group * 256, warp * 32 + lane);
            continue;
        }
        int seen[OWN];  // tokens of the sequence that a query sees; one past the last sees what the last one does
        Softmax state;
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            seen[own] = item.tokens - max(args.queries - 1 - query_of(own, lane) / args.heads, 0);
            state.reference[own] = minus_infinity();
            state.total[own] = 0.f;
        }
        float sum[8][SUMS];
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sum[t][i] = 0.f;
        barrier_wait(shared.q_full(), pieces & 1);
#pragma unroll 1
        for (int j = item.begin + group; j < item.end; j += 2) {
            const int first = number + (j - item.begin) * TILES;
            float s[SUMS];  // first written by a wgmma that ignores what it held
            score(s, shared, first);
            if (lane == 0) {
                barrier_arrive(shared.empty(slot_of(first)));
                if (j + 2 >= item.end) barrier_arrive(shared.q_empty());
            }
            int limit[OWN];
#pragma unroll
            for (int own = 0; own < OWN; ++own) limit[own] = seen[own] - j * TOKENS;
            float shrink[OWN];
            const bool masked = (j + 1) * TOKENS > item.tokens - args.queries + 1;
            const bool any = weigh(s, shrink, state, shared, limit, masked, args.scale, group, warp, lane);
            if (__any_sync(~0u, any)) scale_sums(sum, shrink);
            const u64 weights = tile_descriptor(shared.weights(group));
            wgmma_fence();
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                const u64 values = value_descriptor(shared.tile(slot_of(first + 1 + t)), TILE_BYTES);
#pragma unroll
                for (int k = 0; k < 4; ++k) multiply_transposed(sum[t], values + 128 * k, weights + 2 * k);
            }
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int t = 0; t < 8; ++t) settle(sum[t]);
            if (lane < 8) barrier_arrive(shared.empty(slot_of(first + 1 + lane)));
        }
        if (item.begin + group >= item.end && lane == 0) barrier_arrive(shared.q_empty());  // nothing was left for us
        number += (item.end - item.begin) * TILES;
        ++pieces;
        finish(sum, state, args, item, shared, group, warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_narrow(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap cache,
               const __grid_constant__ Args args) {
    extern __shared__ unsigned char raw[];
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
        for (int slot = 0; slot < RING; ++slot) {
            barrier_init(shared.full(slot), 1);
            barrier_init(shared.empty(slot), 4);
        }
        barrier_init(shared.q_full(), 1);
        barrier_init(shared.q_empty(), CONSUMERS);
        barrier_init_fence();
    }
    __syncwarp();
    named_sync(0, THREADS);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, and known to be
    if (group == 2) {
        registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 256) produce(q, cache, args, shared);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        consume(args, shared, group, warp % 4, lane);
    }
}
