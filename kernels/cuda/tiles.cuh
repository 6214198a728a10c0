// Which work a cluster does, in which order, and how partial sums of one tile are put together.
//
// The first `sk_tiles` tiles (in raster order) are cut along K into units, the rest is done tile by tile.
// Units come in groups of `unit_count`; a group shares `unit_span` consecutive k-blocks as evenly as it
// goes. Split-K is a group a tile (unit_span = k_blocks); stream-K is one group over all cut tiles
// (unit_count = number of clusters), so that every cluster multiplies the same number of k-blocks.
#pragma once

#include "ptx.cuh"

// Filled in by the host (kernels/cuda/_plan.py, Work.pack): 12 ints, then two pointers.
struct WorkArgs {
    int m, n;              // rows and columns of C
    int k_blocks;          // ceil(K / 64)
    int tiles_m, tiles_n;  // the grid of cluster tiles
    int group;             // rows of cluster tiles that are walked together, for reuse in L2
    int sk_tiles, sk_units;
    int unit_count, unit_span, unit_base, unit_extra;  // base = span / count, extra = span % count
    float* workspace;                                  // two slots of fp32 partials a unit and block
    int* counters;                                     // arrivals a tile part; zero before and after a launch
};

// k-blocks [kb, kb + count) of one tile. `unit` is the unit it belongs to, of no use for a whole tile.
struct Segment {
    int tile, kb, count, unit;
};

__device__ __forceinline__ int unit_begin(const WorkArgs& a, int unit) {
    const int group = unit / a.unit_count, i = unit - group * a.unit_count;
    return group * a.unit_span + i * a.unit_base + min(i, a.unit_extra);
}

// The unit that k-block `at` (counted over all cut tiles) belongs to.
__device__ __forceinline__ int unit_of(const WorkArgs& a, int at) {
    const int group = at / a.unit_span, r = at - group * a.unit_span;
    const int longer = a.unit_extra * (a.unit_base + 1);
    const int i = r < longer ? r / (a.unit_base + 1) : a.unit_extra + (r - longer) / a.unit_base;
    return group * a.unit_count + i;
}

// Walks the segments of one cluster. Every role of every block of it runs its own copy: no communication.
template <bool CUT>
struct Segments {
    const WorkArgs& args;
    int unit, pos = 0, end = 0, tile, tiles, step;

    __device__ __forceinline__ Segments(const WorkArgs& a, int first, int clusters)
        : args(a), unit(first - clusters), tile((CUT ? a.sk_tiles : 0) + first), tiles(a.tiles_m * a.tiles_n),
          step(clusters) {}

    __device__ __forceinline__ bool next(Segment& s) {
        if constexpr (CUT) {
            if (pos == end && unit < args.sk_units) {
                unit += step;
                if (unit < args.sk_units) {
                    pos = unit_begin(args, unit);
                    end = unit_begin(args, unit + 1);
                }
            }
            if (pos < end) {
                s.tile = pos / args.k_blocks;
                s.kb = pos - s.tile * args.k_blocks;
                s.count = min(args.k_blocks - s.kb, end - pos);
                s.unit = unit;
                pos += s.count;
                return true;
            }
        }
        s = Segment{tile, 0, args.k_blocks, 0};
        tile += step;
        return s.tile < tiles;
    }
};

// Position of a tile in the grid of cluster tiles: down `group` rows, then to the next column.
__device__ __forceinline__ void raster(const WorkArgs& a, int tile, int& row, int& column) {
    const int band = a.group * a.tiles_n, g = tile / band, r = tile - g * band;
    const int first = g * a.group, rows = min(a.group, a.tiles_m - first);
    column = r / rows;
    row = first + r - column * rows;
}

// Adds up the partial sums of a tile. Each of its units writes fp32 partials to its own slot and counts up;
// the last to arrive adds all slots, its own too, in the order of the units, so that the result does not
// depend on who is last. Returns whether the caller holds the finished sum in `acc`. Nobody waits for
// anybody. Called by the 128 threads of one warpgroup, which holds part `part` of `parts` of a cluster tile;
// `flag` is a word of shared memory of its own.
template <int HALVES, int NACC>
__device__ __forceinline__ bool gather(float (&acc)[HALVES][NACC], const WorkArgs& a, const Segment& s, int part,
                                       int parts, int thread, int bar, volatile int* flag) {
    constexpr int QUADS = NACC / 4;
    if (s.count == a.k_blocks) return true;
    const int first = unit_of(a, s.tile * a.k_blocks), last = unit_of(a, (s.tile + 1) * a.k_blocks - 1);
    float4* const slots = reinterpret_cast<float4*>(a.workspace) + thread;
    // A unit has at most one segment that starts inside a tile and one that starts with it: two slots.
    const auto slot = [&](int unit) {
        return slots + size_t((2 * unit + (unit == first)) * parts + part) * (HALVES * QUADS * 128);
    };
    float4* const mine = slot(s.unit);
#pragma unroll
    for (int mi = 0; mi < HALVES; ++mi)
#pragma unroll
        for (int q = 0; q < QUADS; ++q)
            __stcg(mine + (mi * QUADS + q) * 128,
                   make_float4(acc[mi][4 * q], acc[mi][4 * q + 1], acc[mi][4 * q + 2], acc[mi][4 * q + 3]));
    __threadfence();
    named_sync(bar, 128);
    if (thread == 0) {
        int* const counter = a.counters + s.tile * parts + part;
        const bool full = atomicAdd(counter, 1) == last - first;
        if (full) *counter = 0;  // nobody else comes: ready for the next launch
        __threadfence();
        *flag = full;
    }
    named_sync(bar, 128);
    if (!*flag) return false;
    __threadfence();
#pragma unroll
    for (int mi = 0; mi < HALVES; ++mi)
#pragma unroll
        for (int i = 0; i < NACC; ++i) acc[mi][i] = 0.f;
#pragma unroll 1
    for (int unit = first; unit <= last; ++unit) {
        const float4* const from = slot(unit);
#pragma unroll
        for (int mi = 0; mi < HALVES; ++mi)
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const float4 v = __ldcg(from + (mi * QUADS + q) * 128);
                float* const sum = &acc[mi][4 * q];
                sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
            }
    }
    return true;
}
