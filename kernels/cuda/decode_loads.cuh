// Where K and V lie in shared memory and how they come there: by TMA from a warp that does nothing else, a tile being
// one copy of rank 5 out of its page, or by cp.async from each warp, which then waits for no other before a piece ends.
#pragma once

#include "decode.cuh"
#include "decode_copy_ptx.cuh"

// Values of LOAD. A warp loads for all by TMA, left halves of a tile's tokens first; or each warp loads what it will
// compute, by cp.async.
constexpr int HALVES = 0, BY_WARP = 1;
constexpr int D = 128, TILE = 16;
constexpr int WARPS = HEADS * SLICES, THREADS = 32 * (WARPS + (LOAD != BY_WARP));
constexpr int TEAM = 32 * SLICES;                      // threads that share a KV head
constexpr int TILE_BYTES = TILE * D * 2;               // of one head
constexpr int BOX_BYTES = HEADS * TILE_BYTES;          // of one slice
constexpr int STAGE_BYTES = 2 * SLICES * BOX_BYTES;    // K and V
constexpr int N_TILES = GROUP > 8 ? 2 : 1;             // query heads, in eights
constexpr int PITCH = D + 4;                           // of a row of partial sums in shared memory, floats
constexpr int OFFSET_SUMS = STAGES * STAGE_BYTES;
constexpr int OFFSET_STATS = OFFSET_SUMS + WARPS * GROUP * PITCH * 4;
constexpr int OFFSET_FLAGS = OFFSET_STATS + WARPS * GROUP * 8;
constexpr int OFFSET_BARRIERS = (OFFSET_FLAGS + HEADS * 4 + 7) / 8 * 8;
static_assert(1024 + OFFSET_BARRIERS + 16 * STAGES <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(GROUP <= 16 && 32 % SLICES == 0, "query heads fill one mma, slices divide a warp");

struct Args {
    const u16* q;
    const u16 *k, *v;  // where maps are not used
    u16* o;
    const int* table;  // pages of each sequence
    const int4* items;
    const int* starts;  // first item of each block, and the end
    float* sums;        // partial results, normalised: [slot][HEADS][GROUP][128]
    float* scales;      // log2 of what each was divided by: [slot][HEADS][GROUP]
    int* counters;      // arrivals, zero before and after a launch: [sequence][KV head]
    int width;          // columns of the table
    int page_shift;     // log2 of the tokens of a page
    int kv_heads;
    float scale;        // log2(e)/√128
};

// Address of this lane's row of the two 16-byte columns 2·i and 2·i + 1 of a tile, for ldmatrix. Columns of what lies in
// one 128-byte line change places, by the line's number where TMA writes and by the token's where a warp does.
__device__ __forceinline__ u32 tile_address(u32 tile, int i, int lane) {
    const int row = (lane & 7) + (lane >> 4) * 8, column = 2 * i + (lane >> 3 & 1), half = column >> 3;
    if constexpr (LOAD == HALVES) return tile + half * (TILE * 128) + row * 128 + ((column ^ row) & 7) * 16;
    return tile + row * 256 + (column ^ (row & 7)) * 16;
}

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct Shared {
    u32 base;
    unsigned char* bytes;  // the same place
    __device__ __forceinline__ u32 k(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 v(int stage) const { return k(stage) + SLICES * BOX_BYTES; }
    __device__ __forceinline__ u32 full(int stage) const { return base + OFFSET_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
    __device__ __forceinline__ float* sums(int warp) const {
        return reinterpret_cast<float*>(bytes + OFFSET_SUMS) + warp * GROUP * PITCH;
    }
    __device__ __forceinline__ float2* stats(int warp) const {
        return reinterpret_cast<float2*>(bytes + OFFSET_STATS) + warp * GROUP;
    }
    __device__ __forceinline__ volatile int* flag(int head) const {
        return reinterpret_cast<volatile int*>(bytes + OFFSET_FLAGS) + head;
    }
};

__device__ __forceinline__ int tiles_of(const Item& item) { return (item.end - item.begin + TILE - 1) / TILE; }

// ---- the warp that loads -----------------------------------------------------------------------------

// The page of tile `tile` of an item; any page where there is no such tile.
__device__ __forceinline__ int page_of(const Args& args, const Item& item, int tile) {
    const int token = min(item.begin + tile * TILE, max(item.end - 1, 0));
    return __ldg(args.table + size_t(item.row) * args.width + (token >> args.page_shift));
}

// Lane i of the warp loads tile i of every 32, page numbers are fetched 32 tiles ahead.
__device__ __forceinline__ void produce(const TensorMap& k, const TensorMap& v, const Args& args, const Shared& shared,
                                        int lane) {
    const u64 once = policy_evict_first();
    const int within = (1 << args.page_shift) - 1;
    Ring ring;
    int at = __ldg(args.starts + blockIdx.x);
    const int stop = __ldg(args.starts + blockIdx.x + 1);
    if (at == stop) return;
    Item item = load_item(args.items, at);
    int pages = page_of(args, item, lane);
#pragma unroll 1
    while (true) {
        const bool last = at + 1 == stop;
        const Item following = load_item(args.items, last ? at : at + 1);
        const int tiles = tiles_of(item);
        int first = 0;
#pragma unroll 1
        do {
            const int page = pages;
            pages = first + 32 < tiles ? page_of(args, item, first + 32 + lane) : page_of(args, following, lane);
            const int here = min(32, tiles - first);
            const int token = (item.begin + (first + lane) * TILE) & within;
#pragma unroll 1
            for (int s = 0; s < here; s += SLICES, ring.next()) {
                const int count = min(SLICES, here - s);
                const u32 full = shared.full(ring.stage);
                barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
                if (lane == 0) barrier_expect(full, count * 2 * BOX_BYTES);
                __syncwarp();
                const int slice = lane - s;
                if (slice >= 0 && slice < count) {
                    tma_load_5d(shared.k(ring.stage) + slice * BOX_BYTES, &k, full, 0, token, 0, item.head, page, once);
                    tma_load_5d(shared.v(ring.stage) + slice * BOX_BYTES, &v, full, 0, token, 0, item.head, page, once);
                }
                __syncwarp();
            }
            first += 32;
        } while (first < tiles);
        if (last) return;
        item = following;
        ++at;
    }
}

// ---- what a warp that computes waits for -------------------------------------------------------------

// A warp's turns through the ring that the other one fills. Every warp passes every stage.
struct Passed {
    const Shared& shared;
    const int lane;
    Ring ring;
    __device__ __forceinline__ Passed(const Args&, const Shared& shared, u32, int, int, int lane)
        : shared(shared), lane(lane) {}
    __device__ __forceinline__ int wait(bool) {
        barrier_wait(shared.full(ring.stage), ring.phase);
        return ring.stage;
    }
    __device__ __forceinline__ void release(bool) {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(ring.stage));
        ring.next();
    }
};

// A warp's own walk through its tiles, STAGES ahead of what it computes and on into the next pieces. Lane i knows the
// page of the warp's i-th tile of every 32, and of the 32 after those.
struct Own {
    const Args& args;
    const Shared& shared;
    const u32 tile;
    const int head, slice, lane, stop;
    const u64 once;
    int at, number = 0, count = 0, pages = 0, later = 0;  // the piece; its next tile of this warp, and how many it has
    Item item, following;
    Ring ring;
    __device__ __forceinline__ Own(const Args& args, const Shared& shared, u32 tile, int head, int slice, int lane)
        : args(args), shared(shared), tile(tile), head(head), slice(slice), lane(lane),
          stop(__ldg(args.starts + blockIdx.x + 1)), once(policy_evict_first()),
          at(__ldg(args.starts + blockIdx.x)) {
        if (at == stop) return;
        following = load_item(args.items, at);
        later = page(following, 0);
        --at;
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage) load(stage);
    }
    __device__ __forceinline__ int page(const Item& of, int first) const {
        return page_of(args, of, slice + (first + lane) * SLICES);
    }
    __device__ __forceinline__ void turn_pages() {
        pages = later;
        later = number + 32 < count ? page(item, number + 32) : page(following, 0);
    }
    // Asks for the next tile, if there is one, as one group.
    __device__ __forceinline__ void load(int stage) {
        while (number == count && at + 1 < stop) {
            ++at;
            item = following;
            if (at + 1 < stop) following = load_item(args.items, at + 1);
            number = 0;
            count = max((tiles_of(item) - slice + SLICES - 1) / SLICES, 0);
            turn_pages();
        }
        if (number < count) {
            if (number > 0 && number % 32 == 0) turn_pages();
            copy(stage, __shfl_sync(~0u, pages, number % 32));
            ++number;
        }
        copy_commit();
    }
    // 16 lanes bring the 256 bytes of a token, the warp two tokens at a time.
    __device__ __forceinline__ void copy(int stage, int page) const {
        const int token = (item.begin + (slice + number * SLICES) * TILE) & ((1 << args.page_shift) - 1);
        const size_t row = size_t(args.kv_heads) * D, line = (size_t(page) << args.page_shift) + token + lane / 16;
        const size_t from = line * row + (item.head + head) * D + lane % 16 * 8;
        const u32 to = tile + lane / 16 * 256, column = lane % 16 ^ lane / 16;
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i)
            copy_async<FETCH>(shared.k(stage) + to + i * 512 + (column ^ (2 * i & 7)) * 16, args.k + from + 2 * i * row,
                              once);
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i)
            copy_async<FETCH>(shared.v(stage) + to + i * 512 + (column ^ (2 * i & 7)) * 16, args.v + from + 2 * i * row,
                              once);
    }
    __device__ __forceinline__ int wait(bool mine) {
        if (mine) {
            copy_wait<STAGES - 1>();
            __syncwarp();
        }
        return ring.stage;
    }
    __device__ __forceinline__ void release(bool mine) {
        if (!mine) return;
        __syncwarp();
        load(ring.stage);
        ring.next();
    }
};

#if LOAD == 1
using Feed = Own;
#else
using Feed = Passed;
#endif
