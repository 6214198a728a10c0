// o = softmax(q·Kᵀ/√128)·V of one new token a sequence, K and V in pages: every byte of the cache read once.
//
// A block walks its own list of pieces (cut by the host). SLICES tiles of 16 tokens, of HEADS adjacent KV heads, K and V,
// are a stage of a ring, which a warp keeps full by TMA or every warp by itself (decode_loads.cuh).
// Each of HEADS x SLICES warps has one tile of a stage to itself, and its own running
// maximum and sums: q·Kᵀ with the GROUP query heads of a KV head as rows of mma.sync, then Vᵀ·Pᵀ, which needs no
// exchange between lanes and half the accumulators of P·V. At the end of a piece the slices are put together in
// shared memory. Pieces of one sequence meet in the workspace: the last to arrive adds them up.
// What limits it is memory: a ring of 64 to 192 KiB an SM is in flight while a stage is used.
//
// Macros: HEADS SLICES GROUP STAGES RESIDENT LOAD FETCH BF16 SMEM_BYTES
#include "decode_loads.cuh"

// ---- the warps that compute --------------------------------------------------------------------------

// What a warp knows of the GROUP query heads of its KV head. `sum` is Oᵀ: a lane holds components
// 16·i + lane/4 (+ 8) of query heads 8·n + 2·(lane%4) (+ 1). `top` and `total` belong to head lane/4 (+ 8);
// `total` still has to be added up over the four lanes of a head.
struct State {
    float sum[8][N_TILES][4];
    float top[N_TILES], total[N_TILES];
};

// The query heads as rows of mma.sync: a register holds components 8·i + 2·(lane%4) and the next of head lane/4.
__device__ __forceinline__ void load_q(u32 (&q)[N_TILES][16], const Args& args, const Item& item, int head, int lane) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const int member = 8 * n + lane / 4;
        const u16* const from =
            args.q + (size_t(item.row) * args.kv_heads + item.head + head) * (GROUP * D) + member * D + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 16; ++i)
            q[n][i] = member < GROUP ? __ldg(reinterpret_cast<const u32*>(from + i * 8)) : 0u;
    }
}

// Adds 16 tokens, of which the first `valid` (at least one) count.
__device__ __forceinline__ void add_tile(State& state, const u32 (&q)[N_TILES][16], u32 k, u32 v, int valid,
                                         float scale, int lane) {
    float s[2][2][4] = {};  // [even and odd steps along d][8 tokens each]
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 b[4];
        ldmatrix(b, tile_address(k, i, lane));
        const u32 a1 = N_TILES > 1 ? q[N_TILES - 1][2 * i] : 0u, a3 = N_TILES > 1 ? q[N_TILES - 1][2 * i + 1] : 0u;
        mma(s[i & 1][0], q[0][2 * i], a1, q[0][2 * i + 1], a3, b[0], b[1]);
        mma(s[i & 1][1], q[0][2 * i], a1, q[0][2 * i + 1], a3, b[2], b[3]);
    }
    u32 p[N_TILES][2];
    float shrink[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        float x[4];  // tokens 2·(lane%4), the next, and both 8 later
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = s[0][i >> 1][2 * n + (i & 1)] + s[1][i >> 1][2 * n + (i & 1)];
            if (valid < TILE && (i >> 1) * 8 + lane % 4 * 2 + (i & 1) >= valid) x[i] = minus_infinity();
        }
        const float top = fmaxf(state.top[n], quad_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))));
        const float shift = top * scale;
        shrink[n] = exp2_fast(fmaf(state.top[n], scale, -shift));
        state.top[n] = top;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = exp2_fast(fmaf(x[i], scale, -shift));
        state.total[n] = fmaf(state.total[n], shrink[n], (x[0] + x[1]) + (x[2] + x[3]));
        p[n][0] = pack(x[0], x[1]);
        p[n][1] = pack(x[2], x[3]);
    }
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const float even = __shfl_sync(~0u, shrink[n], lane % 4 * 8);
        const float odd = __shfl_sync(~0u, shrink[n], lane % 4 * 8 + 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            state.sum[i][n][0] *= even, state.sum[i][n][1] *= odd;
            state.sum[i][n][2] *= even, state.sum[i][n][3] *= odd;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 a[4];
        ldmatrix_transposed(a, tile_address(v, i, lane));
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) mma(state.sum[i][n], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
    }
}

// ---- putting together --------------------------------------------------------------------------------

__device__ __forceinline__ void sync_team(int head) {
    if constexpr (SLICES == 1)
        __syncwarp();
    else
        named_sync(1 + head, TEAM);
}

__device__ __forceinline__ void stage_state(State& state, const Shared& shared, int warp, float scale, int lane) {
    float* const sums = shared.sums(warp);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const float total = quad_sum(state.total[n]);
        if (lane % 4 == 0 && 8 * n + lane / 4 < GROUP)
            shared.stats(warp)[8 * n + lane / 4] = make_float2(state.top[n] * scale, total);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int member = 8 * n + lane % 4 * 2 + (i & 1);
            if (member >= GROUP) continue;
#pragma unroll
            for (int c = 0; c < 8; ++c) sums[member * PITCH + 16 * c + lane / 4 + (i >> 1) * 8] = state.sum[c][n][i];
        }
    }
}

__device__ __forceinline__ void store_output(const Args& args, const Item& item, int head, int at, float4 x) {
    u16* const to = args.o + (size_t(item.row) * args.kv_heads + item.head + head) * (GROUP * D) + at * 4;
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
}

// Adds the slices of query head at/32, components 4·(at%32) and the three after it. `log_total` is log2 of the sum
// of all exponentials.
__device__ __forceinline__ float4 join_slices(const Shared& shared, int head, int at, float& log_total) {
    const int member = at / 32;
    float top = minus_infinity();
#pragma unroll
    for (int s = 0; s < SLICES; ++s) top = fmaxf(top, shared.stats(s * HEADS + head)[member].x);
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
        const float2 stats = shared.stats(s * HEADS + head)[member];
        const float weight = stats.y > 0.f ? exp2_fast(stats.x - top) : 0.f;
        const float* const from = shared.sums(s * HEADS + head) + member * PITCH + at % 32 * 4;
        const float4 part = *reinterpret_cast<const float4*>(from);
        total = fmaf(stats.y, weight, total);
        out.x = fmaf(part.x, weight, out.x), out.y = fmaf(part.y, weight, out.y);
        out.z = fmaf(part.z, weight, out.z), out.w = fmaf(part.w, weight, out.w);
    }
    const float inverse = total > 0.f ? 1.f / total : 0.f;
    log_total = top + log2_fast(total);
    return make_float4(out.x * inverse, out.y * inverse, out.z * inverse, out.w * inverse);
}

// The end of a piece, for the team of warps that share KV head `head`: `thread` counts within the team.
__device__ __forceinline__ void finish(State& state, const Args& args, const Item& item, const Shared& shared, int warp,
                                       int head, int thread) {
    stage_state(state, shared, warp, args.scale, thread % 32);
    sync_team(head);
#pragma unroll 1
    for (int at = thread; at < GROUP * 32; at += TEAM) {
        float log_total;
        const float4 out = join_slices(shared, head, at, log_total);
        if (item.count == 1) {
            store_output(args, item, head, at, out);
        } else {
            const size_t place = size_t(item.slot) * HEADS + head;
            __stcg(reinterpret_cast<float4*>(args.sums) + place * (GROUP * 32) + at, out);
            if (at % 32 == 0) __stcg(args.scales + place * GROUP + at / 32, log_total);
        }
    }
    if (item.count > 1) {
        __threadfence();
        sync_team(head);
        if (thread == 0) {
            int* const counter = args.counters + size_t(item.row) * args.kv_heads + item.head + head;
            const bool all = atomicAdd(counter, 1) == item.count - 1;
            if (all) *counter = 0;  // nobody else comes: ready for the next launch
            __threadfence();
            *shared.flag(head) = all;
        }
        sync_team(head);
        if (*shared.flag(head)) {
            __threadfence();
            const size_t place = (size_t(item.first) * HEADS + head) * GROUP;
#pragma unroll 1
            for (int at = thread; at < GROUP * 32; at += TEAM) {
                const float4* const sums = reinterpret_cast<const float4*>(args.sums) + place * 32 + at;
                const float* const scales = args.scales + place + at / 32;
                float4 out[1];
                join_pieces<8>(out, scales, sums, item.count, HEADS * GROUP, 32);
                store_output(args, item, head, at, out[0]);
            }
        }
    }
    sync_team(head);  // the next piece may overwrite the sums
}

__device__ __forceinline__ void consume(const Args& args, const Shared& shared, int warp, int lane) {
    const int head = warp % HEADS, slice = warp / HEADS;
    const u32 tile = slice * BOX_BYTES + head * TILE_BYTES;
    const int stop = __ldg(args.starts + blockIdx.x + 1);
    Feed feed(args, shared, tile, head, slice, lane);
#pragma unroll 1
    for (int at = __ldg(args.starts + blockIdx.x); at < stop; ++at) {
        const Item item = load_item(args.items, at);
        u32 q[N_TILES][16];
        load_q(q, args, item, head, lane);
        State state;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            state.top[n] = minus_infinity();
            state.total[n] = 0.f;
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) state.sum[i][n][j] = 0.f;
        }
        const int tiles = tiles_of(item);
#pragma unroll 1
        for (int first = 0; first < tiles; first += SLICES) {
            const bool mine = first + slice < tiles;
            const int stage = feed.wait(mine);
            if (mine) {
                const int valid = item.end - item.begin - (first + slice) * TILE;
                add_tile(state, q, shared.k(stage) + tile, shared.v(stage) + tile, valid, args.scale, lane);
            }
            feed.release(mine);
        }
        finish(state, args, item, shared, warp, head, slice * 32 + lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attention_decode(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                     const __grid_constant__ Args args) {
    extern __shared__ unsigned char raw[];
    const u32 start = smem_address(raw), base = (start + 1023) & ~1023u;
    const Shared shared{base, raw + (base - start)};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if constexpr (LOAD == BY_WARP) {
        consume(args, shared, warp, lane);
    } else if (warp == WARPS) {
        if (lane == 0) {
            prefetch_map(&k);
            prefetch_map(&v);
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(shared.full(i), 1);
                barrier_init(shared.empty(i), WARPS);
            }
            barrier_init_fence();
        }
        __syncwarp();
        named_arrive(0, THREADS);  // the others see the barriers; the first loads need not wait for them
        produce(k, v, args, shared, lane);
    } else {
        named_sync(0, THREADS);
        consume(args, shared, warp, lane);
    }
}
