// O = softmax(Q·Kᵀ/√D)·V over a ragged batch: persistent, warp-specialised, fed by TMA, both products on wgmma.
//
// Warpgroup 0 is the producer: one thread takes work items (a sequence, a head, BM rows of Q), and keeps Q and two
// rings of K and V tiles (BN keys each, in 128-byte rows of 64 columns, 128-byte swizzle) full. Each of the other
// CONSUMERS warpgroups owns 64 rows. Keys are walked from the last to the first, so that what the mask cuts comes
// first. In each step a warpgroup issues S = Q·Kᵀ of the next tile, then O += P·V of this one with P in registers,
// and does the next tile's softmax while the second product runs.
//
// PINGPONG 1: the warpgroups take turns in issuing, so that one's softmax runs beneath the products of the others.
// OVERLAP 1 holds the assembler to the order written here: left alone, it moves the wait for the second product
// before the softmax. CHAIN 1: an item's last P·V is issued with the first Q·Kᵀ of the next item, so that a short
// walk has no softmax that nothing covers.
//
// A tile's rows leave through shared memory, 16 rows by 64 columns at a time: by TMA where all 16 belong to the
// sequence, by ordinary stores where they do not, since the rows behind belong to the next sequence. O_BUFFERS 0:
// there is no room for them, and they take the place of Q.
//
// Macros: D BN STAGES CONSUMERS CAUSAL PINGPONG OVERLAP CHAIN Q_BUFFERS O_BUFFERS BF16 SMEM_BYTES
#include "prefill.cuh"
#include "softmax.cuh"

// ---- producer --------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_tile(const TensorMap& map, u32 dst, int chunk_bytes, u32 full, int column,
                                          int row) {
    barrier_expect(full, CHUNKS * chunk_bytes);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) tma_load(dst + c * chunk_bytes, &map, full, column + 64 * c, row);
}

__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& k, const TensorMap& v, const Args& args,
                                        const Shared& shared) {
    int index = blockIdx.x, t = 0;
    for (int i = 0;; ++i) {
        const int buffer = i % Q_BUFFERS;
        const u32 q_free = (i / Q_BUFFERS & 1) ^ 1;
        int4 raw = {0, 0, 0, 0};
        if (index < args.count) raw = __ldg(args.items + index);
        const Item item{raw.x, raw.y, raw.z, raw.w};
        if (item.length == 0) {
            barrier_wait(shared.q_empty(buffer), q_free);
            store_shared4(shared.item(i), raw);
            barrier_arrive(shared.q_full(buffer));
            break;
        }
        index = gridDim.x + (args.dynamic ? atomicAdd(args.counters, 1) : index);
        const int column = item.kv_head() * D;
        const auto load_k = [&](int j, int t) {
            const int stage = stage_of(t);
            barrier_wait(shared.k_empty(stage), phase_of(t) ^ 1);
            load_tile(k, shared.k(stage), KV_CHUNK, shared.k_full(stage), column, item.start + j * BN);
        };
        const auto load_v = [&](int j, int t) {
            const int stage = stage_of(t);
            barrier_wait(shared.v_empty(stage), phase_of(t) ^ 1);
            load_tile(v, shared.v(stage), KV_CHUNK, shared.v_full(stage), column, item.start + j * BN);
        };
        int j = item.tiles() - 1;
        load_k(j, t);
        barrier_wait(shared.q_empty(buffer), q_free);
        store_shared4(shared.item(i), raw);  // published by the arrival at q_full
        load_tile(q, shared.q(buffer), Q_CHUNK, shared.q_full(buffer), item.head() * D, item.start + item.row);
#pragma unroll 1
        for (; j > 0; --j, ++t) {
            load_k(j - 1, t + 1);
            load_v(j, t);
        }
        load_v(0, t);
        ++t;
    }
    if (args.dynamic) {
        __threadfence();
        if (atomicAdd(args.counters + 1, 1) == int(gridDim.x) - 1) {
            args.counters[0] = 0;  // everybody has taken the last item
            args.counters[1] = 0;
        }
    }
}

// ---- consumers -------------------------------------------------------------------------------------------

// s = Q·Kᵀ, one group.
__device__ __forceinline__ void multiply_qk(float (&s)[BN / 2], u32 q, u32 k) {
    const u64 a = tile_descriptor(q), b = tile_descriptor(k);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
        Wgmma<BN>::run(s, advance(a, i / 4 * Q_CHUNK + i % 4 * 32), advance(b, i / 4 * KV_CHUNK + i % 4 * 32), i > 0);
    wgmma_commit();
}

// o += P·V, one group.
__device__ __forceinline__ void multiply_pv(float (&o)[D / 2], const u32 (&p)[BN / 4], u32 v) {
    const u64 b = rows_descriptor(v, KV_CHUNK);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) WgmmaRows<D>::run(o, p + 4 * i, advance(b, i * 16 * ROW_BYTES));
    wgmma_commit();
}

// A warpgroup's place: which of the consumers, and the thread in it.
struct Place {
    int owner, warp, lane;
    __device__ __forceinline__ int own_bar() const { return 1 + owner; }
    __device__ __forceinline__ void take_turn() const {
        if constexpr (PINGPONG) named_sync(1 + CONSUMERS + owner, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (PINGPONG) named_arrive(1 + CONSUMERS + (owner + 1 == CONSUMERS ? 0 : owner + 1), 256);
    }
    // Every warp counts where a buffer is given back.
    __device__ __forceinline__ void release(u32 bar) const {
        if (lane == 0) barrier_arrive(bar);
    }
};

// Hides what this thread's rows do not see of tile j.
__device__ __forceinline__ void apply_mask(float (&s)[BN / 2], const Item& item, const Place& at, int j) {
    const int first = j * BN + at.lane % 4 * 2;
    const int row = item.row + 64 * at.owner + 16 * at.warp + at.lane / 4;
    const int end = item.length - first;
    if constexpr (CAUSAL)
        hide(s, min(end, row + 1 - first), min(end, row + 9 - first));
    else
        hide(s, end, end);
}

// An item that the producer has published, where this warpgroup's rows of Q lie, and the first tile of keys that
// the diagonal or the sequence's end cuts for them.
struct Open {
    Item item;
    u32 q, q_empty;
    int whole;
    __device__ __forceinline__ Open(const Shared& shared, const Place& at, int i) {
        const int buffer = i % Q_BUFFERS;
        barrier_wait(shared.q_full(buffer), i / Q_BUFFERS & 1);
        item = load_item(shared.item(i));
        q = shared.q(buffer) + at.owner * 64 * ROW_BYTES;
        q_empty = shared.q_empty(buffer);
        whole = (CAUSAL ? min(item.row + 64 * at.owner + 1, item.length) : item.length) / BN;
    }
    __device__ __forceinline__ bool last() const { return item.length == 0; }
};

// S and P of a walk's first tile, number t, with nothing beside it.
__device__ __forceinline__ void start(float (&s)[BN / 2], u32 (&p)[BN / 4], float (&o)[D / 2], Softmax& softmax,
                                      const Open& open, const Shared& shared, const Place& at, int t) {
    const int j = open.item.tiles() - 1;
    barrier_wait(shared.k_full(stage_of(t)), phase_of(t));
    multiply_qk(s, open.q, shared.k(stage_of(t)));
    clear(o);
    softmax = Softmax();
    wgmma_wait<0>();
    pin(s);
    at.release(shared.k_empty(stage_of(t)));
    if (!O_IN_Q && j == 0) at.release(open.q_empty);
    if (j >= open.whole) apply_mask(s, open.item, at, j);
    softmax.update(s, SCALE);
    to_fragments(s, p);
}

// Issues S = Q·Kᵀ of tile number t + 1, then O += P·V of number t, and waits for S.
__device__ __forceinline__ void issue(float (&s)[BN / 2], const u32 (&p)[BN / 4], float (&o)[D / 2], u32 q,
                                      const Shared& shared, const Place& at, int t) {
    // wgmma takes descriptors from uniform registers; the addresses are in theirs before the turn comes
    const u32 q_at = uniform(q), k_at = uniform(shared.k(stage_of(t + 1))), v_at = uniform(shared.v(stage_of(t)));
    barrier_wait(shared.k_full(stage_of(t + 1)), phase_of(t + 1));
    at.take_turn();
    multiply_qk(s, q_at, k_at);
    barrier_wait(shared.v_full(stage_of(t)), phase_of(t));
    multiply_pv(o, p, v_at);
    at.pass_turn();
    wgmma_wait<1>();
    pin(s);
    at.release(shared.k_empty(stage_of(t + 1)));
}

// Waits for O, after the softmax of the tile that follows.
__device__ __forceinline__ void collect(float (&o)[D / 2], const Softmax& softmax, const Shared& shared,
                                        const Place& at, int t) {
    if constexpr (OVERLAP) softmax.settle();
    wgmma_wait<0>();
    pin(o);
    at.release(shared.v_empty(stage_of(t)));
}

// Stores a warp's 16 rows of 64 columns from one buffer by ordinary instructions, the first `rows` of them;
// `to` is the first element.
__device__ __forceinline__ void store_rows(u16* to, int pitch, u32 line0, int rows, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const int row = i + lane / 8;
        const int4 x = load_shared4(line0 + row * ROW_BYTES + ((lane % 8 * 16) ^ (row % 8 * 16)));
        if (row < rows) *reinterpret_cast<int4*>(to + size_t(row) * pitch + lane % 8 * 8) = x;
    }
}

// Rounds o and stores this warp's 16 rows.
__device__ __forceinline__ void store_output(const float (&o)[D / 2], const TensorMap& map, const Args& args,
                                             const Item& item, const Shared& shared, const Place& at, u32 q) {
    const int row = item.row + 64 * at.owner + 16 * at.warp;
    const int rows = item.length - row;
    if constexpr (O_IN_Q) named_sync(at.own_bar(), 128);  // the neighbours' products may still read these rows
    if (rows > 0) {
        const u32 line = (16 * at.warp + at.lane % 16) * ROW_BYTES, swizzle = at.lane % 8 * 16;
        const auto buffer = [&](int c) {
            return O_IN_Q ? q + c * Q_CHUNK + at.owner * O_BYTES : shared.o(at.owner, c % AT_ONCE);
        };
#pragma unroll
        for (int first = 0; first < CHUNKS; first += AT_ONCE) {
            if constexpr (!O_IN_Q) {
                if (at.lane == 0) tma_store_wait<0>();
                __syncwarp();
            }
#pragma unroll
            for (int c = first; c < first + AT_ONCE; ++c)
#pragma unroll
                for (int x = 0; x < 64; x += 16) {
                    const float* const f = &o[(64 * c + x) / 2];
                    stmatrix(buffer(c) + line + (((x + at.lane / 16 * 8) * 2) ^ swizzle), pack(f[0], f[1]),
                             pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
                }
            fence_async_proxy();
            __syncwarp();
#pragma unroll
            for (int c = first; c < first + AT_ONCE; ++c) {
                const u32 line0 = buffer(c) + 16 * at.warp * ROW_BYTES;
                const int column = item.head() * D + 64 * c;
                u16* const to = args.o + size_t(item.start + row) * args.pitch + column;
                if (rows < 16)
                    store_rows(to, args.pitch, line0, rows, at.lane);
                else if (at.lane == 0)
                    tma_store(&map, line0, column, item.start + row);
            }
            if (at.lane == 0) tma_store_commit();
        }
    }
    if constexpr (O_IN_Q) {
        if (at.lane == 0) tma_store_wait<0>();
        __syncwarp();
    }
}

__device__ __forceinline__ void consume(const TensorMap& map, const Args& args, const Shared& shared, int owner) {
    const Place at{owner, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)};
    int t = 0;  // number of the tile whose P is at hand
    if (owner == CONSUMERS - 1) at.pass_turn();
    for (int i = 0;; ++i, ++t) {
        Open open(shared, at, i);
        if (open.last()) break;
        float s[BN / 2], o[D / 2];
        u32 p[BN / 4];
        Softmax softmax;
        start(s, p, o, softmax, open, shared, at, t);
        int j = open.item.tiles() - 1;
#pragma unroll 1
        for (; CHAIN || j > 0; ++t) {
            const bool turn_over = CHAIN && j == 0;  // to the next item
            if (turn_over) {
                open = Open(shared, at, i + 1);
                if (open.last()) break;
                j = open.item.tiles();
            }
            --j;
            issue(s, p, o, open.q, shared, at, t);
            if (!O_IN_Q && j == 0) at.release(open.q_empty);
            if (j >= open.whole) apply_mask(s, open.item, at, j);
            const float sums[2] = {softmax.sum[0], softmax.sum[1]};
            if (turn_over) softmax = Softmax();
            softmax.update(s, SCALE);
            collect(o, softmax, shared, at, t);
            to_fragments(s, p);
            if (turn_over) {
                divide(o, sums);
                store_output(o, map, args, load_item(shared.item(i)), shared, at, 0);
                clear(o);
                ++i;
            } else {
                softmax.rescale(o);
            }
        }
        barrier_wait(shared.v_full(stage_of(t)), phase_of(t));
        multiply_pv(o, p, shared.v(stage_of(t)));
        wgmma_wait<0>();
        pin(o);
        at.release(shared.v_empty(stage_of(t)));
        divide(o, softmax.sum);
        store_output(o, map, args, load_item(shared.item(i)), shared, at, shared.q(i % Q_BUFFERS));
        if constexpr (O_IN_Q) at.release(open.q_empty);
        if constexpr (CHAIN) break;
    }
    if (owner == 0) at.take_turn();  // nobody is left to take the last one passed
    if (at.lane == 0) tma_store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                      const __grid_constant__ Args args) {
    extern __shared__ unsigned char raw[];
    const Shared shared{(smem_address(raw) + 1023) & ~1023u};  // swizzle atoms are 1024 bytes

    if (threadIdx.x == 32) {
        prefetch_map(&q);
        prefetch_map(&k);
        prefetch_map(&v);
        prefetch_map(&o);
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_BUFFERS; ++i) {
            barrier_init(shared.q_full(i), 1);
            barrier_init(shared.q_empty(i), 4 * CONSUMERS);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.k_full(i), 1);
            barrier_init(shared.k_empty(i), 4 * CONSUMERS);
            barrier_init(shared.v_full(i), 1);
            barrier_init(shared.v_empty(i), 4 * CONSUMERS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, and known to be
    if (group == 0) {
        registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 0) produce(q, k, v, args, shared);
        __syncwarp();
    } else {
        registers_up<CONSUMER_REGS>();
        consume(o, args, shared, group - 1);
    }
}
