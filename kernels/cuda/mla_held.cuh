// The shared memory of mla_held.cu, its barriers, and the loads. What q, blocks and slots are is told there.
#pragma once

#include "mla.cuh"
#include "mla_held_ptx.cuh"

constexpr int BLOCKS = 3, BLOCK_BYTES = 8 * TILE_BYTES;  // the values of a block of tokens
constexpr int SLOTS = 2;      // for the rotary tile, whose place P takes
constexpr int OFFSET_SLOTS = BLOCKS * BLOCK_BYTES;
constexpr int OFFSET_Q = OFFSET_SLOTS + SLOTS * TILE_BYTES;  // the tiles of q that registers do not hold
constexpr int OFFSET_SHRINK = OFFSET_Q + (TILES - HELD) * TILE_BYTES;  // [SLOTS][64] floats
constexpr int OFFSET_INVERSE = OFFSET_SHRINK + SLOTS * ROWS * 4;       // [2][64] floats
constexpr int OFFSET_AHEAD = OFFSET_INVERSE + 2 * ROWS * 4;            // [2] Ahead
constexpr int OFFSET_BARRIERS = OFFSET_AHEAD + 2 * 32;
constexpr int BARRIERS = 4 * BLOCKS + 4 * SLOTS + 2;
static_assert(1024 + OFFSET_BARRIERS + 8 * BARRIERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");

// What a side loads next and loaded last, and where it is in the list: the next item, how many of this one's blocks
// are left, where in the table the next page is. Only one thread of the side reads it, and rarely.
struct Ahead {
    int item, left, entry;
    int next;  // the first of the tokens; -1 - the first row where it is q; NOTHING
    int last;  // the same, of the block before
};
constexpr int NOTHING = 0x80000000;

// Where a role is: blocks of q and of tokens so far. A piece has its q first.
struct Place {
    int use = 0;
    __device__ __forceinline__ int block() const { return use % BLOCKS; }
    __device__ __forceinline__ u32 parity() const { return use / BLOCKS & 1; }
    __device__ __forceinline__ int slot() const { return use % SLOTS; }
    __device__ __forceinline__ u32 slot_parity() const { return use / SLOTS & 1; }
};

struct Shared {
    u32 base;
    unsigned char* bytes;  // the same place
    __device__ __forceinline__ u32 q(int tile) const { return base + OFFSET_Q + (tile - HELD) * TILE_BYTES; }
    __device__ __forceinline__ u32 block(const Place& at) const { return base + at.block() * BLOCK_BYTES; }
    __device__ __forceinline__ u32 slot(const Place& at) const { return base + OFFSET_SLOTS + at.slot() * TILE_BYTES; }
    __device__ __forceinline__ float* shrink(const Place& at) const {
        return reinterpret_cast<float*>(bytes + OFFSET_SHRINK) + at.slot() * ROWS;
    }
    __device__ __forceinline__ float* inverse(int b) const {
        return reinterpret_cast<float*>(bytes + OFFSET_INVERSE) + b * ROWS;
    }
    __device__ __forceinline__ Ahead* ahead(int side) const {
        return reinterpret_cast<Ahead*>(bytes + OFFSET_AHEAD + 32 * side);
    }
    __device__ __forceinline__ u32 barrier(int i) const { return base + OFFSET_BARRIERS + 8 * i; }
    __device__ __forceinline__ u32 full(const Place& at, int side) const {
        return barrier(side * BLOCKS + at.block());
    }
    __device__ __forceinline__ u32 empty(const Place& at, int side) const {
        return barrier((2 + side) * BLOCKS + at.block());
    }
    __device__ __forceinline__ u32 of_slot(const Place& at, int i) const {
        return barrier(4 * BLOCKS + i * SLOTS + at.slot());
    }
    __device__ __forceinline__ u32 slot_full(const Place& at) const { return of_slot(at, 0); }
    __device__ __forceinline__ u32 slot_empty(const Place& at) const { return of_slot(at, 1); }
    __device__ __forceinline__ u32 weighted(const Place& at) const { return of_slot(at, 2); }  // P is there
    __device__ __forceinline__ u32 scored(const Place& at) const { return of_slot(at, 3); }    // the scores are done
    __device__ __forceinline__ u32 summed(int piece) const {                                   // so is a piece
        return barrier(4 * BLOCKS + 4 * SLOTS + (piece & 1));
    }
    // Where tile `tile` of a block lies.
    __device__ __forceinline__ u32 tile(const Place& at, int tile) const {
        return tile < 8 ? block(at) + tile * TILE_BYTES : slot(at);
    }
    // Waits for what `tile` is the first tile of: a half of the values, or the rotary tile. A wait costs some 80
    // clocks even when all is there, half of what a tile's products take.
    __device__ __forceinline__ void wait_from(const Place& at, int tile) const {
        if (tile == 8)
            barrier_wait(slot_full(at), at.slot_parity());
        else if (tile % 4 == 0)
            barrier_wait(full(at, tile / 4), at.parity());
    }
};

// Tensor maps: of a tile of q; of a rotary tile, or the part of it that a block of the cluster loads; of what such a
// block loads of the values of one side.
struct Maps {
    const TensorMap &q, &rotary, &values;
};

// What all roles know of this block's work.
struct Work {
    int worker, tile, rank;
};

// ---- loads -------------------------------------------------------------------------------------------

// Loads tiles FIRST to END - 1 of q, whose first row is `row`.
template <int FIRST, int END>
__device__ __forceinline__ void load_queries(const Maps& maps, const Args& args, const Shared& shared, int row,
                                             const Place& at, u32 full) {
    barrier_expect(full, (END - FIRST) * min(args.rows, ROWS) * 128);
#pragma unroll
    for (int t = FIRST; t < END; ++t) tma_load(shared.tile(at, t), &maps.q, full, t * 64, row);
}

// Loads one side's values of the tokens from `token` on, four tiles that one copy asks for: a copy costs the thread
// that asks some 300 clocks. Of two blocks each loads two tiles, for both.
__device__ __forceinline__ void load_values(const Maps& maps, const Shared& shared, const Work& work, int side,
                                            int token, const Place& at, u32 full) {
    constexpr int PART = 4 / CLUSTER;
    const int tile = 4 * side + PART * work.rank;
    barrier_expect(full, 4 * TILE_BYTES);
    if constexpr (CLUSTER == 1)
        tma_load_3d(shared.tile(at, tile), &maps.values, full, 0, token, tile, policy_evict_first());
    else
        tma_multicast_3d(shared.tile(at, tile), &maps.values, full, 0, token, tile, 3, policy_evict_first());
}

// Loads the rotary tile of the tokens from `token` on; of two blocks each loads half the tokens, for both.
__device__ __forceinline__ void load_rotary(const Maps& maps, const Work& work, int token, u32 to, u32 full) {
    barrier_expect(full, TILE_BYTES);
    if constexpr (CLUSTER == 1)
        tma_load_hint(to, &maps.rotary, full, D_V, token, policy_evict_first());
    else
        tma_multicast_hint(to + work.rank * (TILE_BYTES / 2), &maps.rotary, full, D_V,
                           token + work.rank * (TOKENS / 2), 3, policy_evict_first());
}

// What comes after `ahead.next`.
__device__ __forceinline__ int after(Ahead& ahead, const Args& args, const Work& work) {
    if (ahead.left > 0) {
        --ahead.left;
        return __ldg(args.table + ahead.entry++) * TOKENS;
    }
    const int stop = __ldg(args.starts + work.worker + 1);
    while (ahead.item < stop) {
        const Item item = load_item(args.items, ahead.item++);
        if (item.begin == item.end) continue;
        ahead.left = item.end - item.begin;
        ahead.entry = item.row * args.width + item.begin;
        return -1 - (item.row * args.rows + work.tile * ROWS);
    }
    return NOTHING;
}

// One thread of a side: finds what comes next, early, because the table of pages may be far away.
__device__ __forceinline__ void look_ahead(const Args& args, const Shared& shared, const Work& work, int side) {
    Ahead ahead = *shared.ahead(side);
    ahead.last = ahead.next;
    ahead.next = after(ahead, args, work);
    *shared.ahead(side) = ahead;
}

// One thread of a side: waits until its half of block `next` is free and loads there what `look_ahead` has found, if
// anything. The right side also loads the rotary tile: of the block before, since there is one slot less. That one
// comes first, because it will be needed first; it waits in L2.
__device__ __forceinline__ void refill(const Maps& maps, const Args& args, const Shared& shared, const Work& work,
                                       int side, const Place& next) {
    const int what = shared.ahead(side)->next, before = shared.ahead(side)->last;
    if (side && before != NOTHING) {
        const Place slot{next.use - 1};
        barrier_wait(shared.slot_empty(slot), slot.slot_parity() ^ 1);
        if (before < 0)
            load_queries<8, 9>(maps, args, shared, -1 - before, slot, shared.slot_full(slot));
        else
            load_rotary(maps, work, before, shared.slot(slot), shared.slot_full(slot));
    }
    if (what == NOTHING) return;
    const u32 full = shared.full(next, side);
    barrier_wait(shared.empty(next, side), next.parity() ^ 1);
    if (what >= 0) {
        load_values(maps, shared, work, side, what, next, full);
        if (side) tma_prefetch(&maps.rotary, D_V, what + work.rank * (TOKENS / 2));
    } else if (side) {
        load_queries<4, 8>(maps, args, shared, -1 - what, next, full);
    } else {
        load_queries<0, 4>(maps, args, shared, -1 - what, next, full);
    }
}
