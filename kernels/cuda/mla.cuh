// What the two forms of MLA decode share: their argument, the descriptor of values, the second launch.
#pragma once

#include "decode.cuh"

constexpr int ROWS = 64, TOKENS = 64, D_V = 512;
constexpr int TILES = 9;              // of a block of tokens, 64 components each: 8 of values, 1 rotary
constexpr int TILE_BYTES = 64 * 128;  // 64 tokens in the 128-byte swizzle
constexpr float SLACK = 8.f;          // log2 by which a maximum may exceed what P is scaled with

struct Args {
    const int* table;  // pages of each sequence
    const int4* items;
    const int* starts;     // first item of each worker, and the end
    const int4* joins;     // of each cut sequence and tile of rows: first slot, pieces, first row of o, rows
    u16* o;
    float* sums;    // [slot][64][512], a slot for each piece and tile of rows
    float* scales;  // [slot][64]
    int groups;     // how many `joins`; 0 in the launch that makes the pieces
    int quarters;   // 4: a warp of the second launch adds up a quarter of a row; 1: a whole one
    int width;      // columns of the table
    int heads, rows;  // heads; query rows of a sequence
    int queries;      // new tokens of a sequence
    int tiles;        // tiles of 64 query rows: blocks that do the same pieces
    float scale;      // log2(e)/√576
};

// x, of which the compiler knows nothing: what depends on it is computed here and holds no register before.
template <typename T>
__device__ __forceinline__ T opaque(T x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Descriptor of B[16·n tokens][64·m columns] whose rows are tokens: 64-column tiles of 128-byte rows in the 128-byte
// swizzle, `tile_bytes` from one tile to the next. Columns are the contiguous dimension ("MN-major"): the leading
// offset is that between tiles, the stride offset that between 8 tokens (1024 bytes). Add 128 to step 16 tokens.
__device__ __forceinline__ u64 value_descriptor(u32 address, u32 tile_bytes) {
    constexpr u64 SWIZZLE_128B = 1ull << 62;
    constexpr u64 GROUP_STRIDE = u64(1024 >> 4) << 32;
    return SWIZZLE_128B | GROUP_STRIDE | (u64(tile_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// Zeros for a sequence without tokens: all threads of one warpgroup, 256 columns from `column` on.
__device__ __forceinline__ void store_zeros(const Args& args, const Item& item, int tile, int column, int thread) {
    const int rows = min(ROWS, args.rows - tile * ROWS);
    u16* const to = args.o + (size_t(item.row) * args.rows + tile * ROWS) * D_V + column;
    for (int i = thread; i < rows * 32; i += 128)
        *reinterpret_cast<uint4*>(to + size_t(i / 32) * D_V + i % 32 * 8) = make_uint4(0u, 0u, 0u, 0u);
}

// The second launch: a warp adds up a row at a time, or, where rows are few, a quarter of one (`quarters` 4).
__device__ __forceinline__ void join(const Args& args, int warp, int warps, int lane) {
    const int rows = min(args.rows, ROWS);
    for (int i = blockIdx.x * warps + warp; i < args.groups * rows * args.quarters; i += gridDim.x * warps) {
        const int4 group = __ldg(args.joins + i / (rows * args.quarters));
        const int row = i / args.quarters % rows;
        if (row >= group.w) continue;
        const int at = lane + i % args.quarters * 32;
        const size_t place = size_t(group.x) * ROWS + row;
        const float* const scales = args.scales + place;
        const float4* const sums = reinterpret_cast<const float4*>(args.sums) + place * (D_V / 4) + at;
        uint2* const to = reinterpret_cast<uint2*>(args.o + size_t(group.z + row) * D_V) + at;
        const auto store = [&](int w, const float4& x) { to[32 * w] = make_uint2(pack(x.x, x.y), pack(x.z, x.w)); };
        if (args.quarters == 4) {
            float4 out[1];
            join_pieces<16>(out, scales, sums, group.y, args.tiles * ROWS, D_V / 4);
            store(0, out[0]);
        } else {
            float4 out[4];
            join_pieces<4>(out, scales, sums, group.y, args.tiles * ROWS, D_V / 4);
#pragma unroll
            for (int w = 0; w < 4; ++w) store(w, out[w]);
        }
    }
}
