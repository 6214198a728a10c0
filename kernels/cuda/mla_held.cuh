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

struct Maps {
    const TensorMap &q, &cache;
};

// What all roles know of this block's work.
struct Work {
    int worker, tile, rank;
};

// ---- loads -------------------------------------------------------------------------------------------

// Loads tiles FIRST to END - 1 of what `what` says (see Ahead::next). q is this block's; of latents each block of the
// cluster loads half, for both.
template <int FIRST, int END>
__device__ __forceinline__ void load_tiles(const Maps& maps, const Args& args, const Shared& shared, const Work& work,
                                           int what, const Place& at, u32 full) {
    const u64 once = policy_evict_first();
    if (what < 0)
        barrier_expect(full, (END - FIRST) * min(args.rows, ROWS) * 128);
    else
        barrier_expect(full, (END - FIRST) * TILE_BYTES);
#pragma unroll 1
    for (int t = FIRST; t < END; ++t) {
        const u32 to = shared.tile(at, t);
        if (what < 0)
            tma_load(to, &maps.q, full, t * 64, -1 - what);
        else if (CLUSTER == 1)
            tma_load_hint(to, &maps.cache, full, t * 64, what, once);
        else
            tma_multicast_hint(to + work.rank * (TILE_BYTES / 2), &maps.cache, full, t * 64,
                               what + work.rank * (TOKENS / 2), 3, once);
    }
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
        load_tiles<8, 9>(maps, args, shared, work, before, slot, shared.slot_full(slot));
    }
    if (what == NOTHING) return;
    barrier_wait(shared.empty(next, side), next.parity() ^ 1);
    if (side == 0) {
        load_tiles<0, 4>(maps, args, shared, work, what, next, shared.full(next, 0));
    } else {
        load_tiles<4, 8>(maps, args, shared, work, what, next, shared.full(next, 1));
        if (what >= 0) tma_prefetch(&maps.cache, 512, what + work.rank * (TOKENS / 2));
    }
}
