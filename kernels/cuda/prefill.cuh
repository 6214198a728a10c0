// Where things lie in attention_prefill.cu, what a work item is, and the launch's argument. Macros: see there.
#pragma once

#include "attention.cuh"

constexpr int BM = 64 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CHUNKS = D / 64;  // 128-byte columns of a row
constexpr int ROW_BYTES = 128;
constexpr int Q_CHUNK = BM * ROW_BYTES, KV_CHUNK = BN * ROW_BYTES;
constexpr int Q_BYTES = CHUNKS * Q_CHUNK, KV_BYTES = CHUNKS * KV_CHUNK;
constexpr int O_BYTES = 64 * ROW_BYTES;  // a store buffer: 64 rows of 64 columns
constexpr bool O_IN_Q = O_BUFFERS == 0;
constexpr int AT_ONCE = O_IN_Q ? CHUNKS : O_BUFFERS;  // columns of 64 that are staged together
// What setmaxnreg leaves each role; together what the launch gave the block.
constexpr int PRODUCER_REGS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGS = CONSUMERS == 3 ? 160 : 232;
// log2(e)/√D
constexpr float SCALE = 1.44269504088896341f * (D == 64 ? 0.125f : D == 128 ? 0.0883883476483184406f : 0.0625f);

constexpr int OFFSET_K = Q_BUFFERS * Q_BYTES;
constexpr int OFFSET_V = OFFSET_K + STAGES * KV_BYTES;
constexpr int OFFSET_O = OFFSET_V + STAGES * KV_BYTES;
constexpr int OFFSET_ITEMS = OFFSET_O + CONSUMERS * O_BUFFERS * O_BYTES;
constexpr int ITEM_SLOTS = 4;
constexpr int OFFSET_BARRIERS = OFFSET_ITEMS + ITEM_SLOTS * 16;
constexpr int BARRIERS = 2 * Q_BUFFERS + 4 * STAGES;
static_assert(1024 + OFFSET_BARRIERS + 8 * BARRIERS <= SMEM_BYTES, "SMEM_BYTES is too small for this layout");
static_assert(D == 64 || D == 128 || D == 256, "whole 128-byte columns that wgmma takes as N");
static_assert(CHUNKS % AT_ONCE == 0, "columns are staged in equal parts");
static_assert(BN % 16 == 0 && BN <= 256, "probabilities are multiplied 16 keys at a time");
static_assert((STAGES & (STAGES - 1)) == 0, "stages are counted by masks");
static_assert(!(CHAIN && O_IN_Q), "the next item's Q is wanted before the rows of this one are stored");
static_assert(Q_BUFFERS <= 2, "an item's slot is free when its buffer of Q is");

// The first row of Q (within the sequence), of which sequence, and the heads: query head + (KV head << 16).
struct Item {
    int start, length, row, heads;
    __device__ __forceinline__ int head() const { return heads & 0xFFFF; }
    __device__ __forceinline__ int kv_head() const { return heads >> 16; }
    // Tiles of keys that any of the rows sees.
    __device__ __forceinline__ int tiles() const {
        const int keys = CAUSAL ? min(length, row + BM) : length;
        return (keys + BN - 1) / BN;
    }
};

__device__ __forceinline__ Item load_item(u32 address) {
    const int4 x = load_shared4(address);
    return {int(uniform(x.x)), int(uniform(x.y)), int(uniform(x.z)), int(uniform(x.w))};
}

// attention_prefill.py packs it.
struct Args {
    u16* o;
    const int4* items;
    int* counters;  // items taken, blocks done; both are zero between launches
    int count;
    int pitch;    // elements from a token of O to the next
    int dynamic;  // 1: the next item is the first that nobody has taken; 0: this block's next, gridDim.x further on
    int unused;
};

// Both rings hold a block's tiles of keys in the order of their walk; t counts them from the launch on.
__device__ __forceinline__ int stage_of(int t) {
    return t & (STAGES - 1);
}
__device__ __forceinline__ u32 phase_of(int t) {
    return u32(t) / STAGES & 1;
}

struct Shared {
    u32 base;
    __device__ __forceinline__ u32 q(int i) const { return base + i * Q_BYTES; }
    __device__ __forceinline__ u32 k(int stage) const { return base + OFFSET_K + stage * KV_BYTES; }
    __device__ __forceinline__ u32 v(int stage) const { return base + OFFSET_V + stage * KV_BYTES; }
    __device__ __forceinline__ u32 o(int owner, int i) const {
        return base + OFFSET_O + (owner * O_BUFFERS + i) * O_BYTES;
    }
    __device__ __forceinline__ u32 item(int i) const { return base + OFFSET_ITEMS + i % ITEM_SLOTS * 16; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + OFFSET_BARRIERS + 8 * i; }
    __device__ __forceinline__ u32 q_full(int i) const { return barrier(i); }
    __device__ __forceinline__ u32 q_empty(int i) const { return barrier(Q_BUFFERS + i); }
    __device__ __forceinline__ u32 k_full(int stage) const { return barrier(2 * Q_BUFFERS + stage); }
    __device__ __forceinline__ u32 k_empty(int stage) const { return barrier(2 * Q_BUFFERS + STAGES + stage); }
    __device__ __forceinline__ u32 v_full(int stage) const { return barrier(2 * Q_BUFFERS + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 v_empty(int stage) const { return barrier(2 * Q_BUFFERS + 3 * STAGES + stage); }
};
