// What the decode kernels share: mma.sync fragments, ldmatrix, tiled copies of rank 5, base-2 exponentials.
#pragma once

#include "ptx.cuh"

// One piece of one sequence's work, written by the host (kernels/cuda/_pieces.py). Its results go to the output
// where it is the only one (`count` 1), else to slot `slot` of the workspace; the pieces of one sequence have the
// slots from `first` on.
struct Item {
    int row, head;   // the sequence; the first of the heads (or the tile of query rows)
    int begin, end;  // its tokens (or blocks)
    int slot, first, count;
    int tokens;      // of the sequence
};

__device__ __forceinline__ Item load_item(const int4* items, int at) {
    const int4 a = __ldg(items + 2 * at), b = __ldg(items + 2 * at + 1);
    return Item{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// 2^x; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x) of a normal number.
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Adds `count` partial results in their order, BATCH loads in flight. A result is normalised; its scale is log2 of
// what it was divided by, -inf where it saw no token. `stride` counts results from one piece to the next, each of
// which is `width` float4 wide. Zeros where no piece saw a token.
template <int BATCH>
__device__ __forceinline__ float4 join_pieces(const float* scales, const float4* sums, int count, int stride, int width) {
    float top = minus_infinity(), total = 0.f;
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int base = 0; base < count; base += BATCH) {
        float scale[BATCH];
        float4 part[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const size_t piece = size_t(min(base + i, count - 1)) * stride;
            scale[i] = __ldcg(scales + piece);
            part[i] = __ldcg(sums + piece * width);
            if (base + i >= count) scale[i] = minus_infinity();
        }
        float next = top;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) next = fmaxf(next, scale[i]);
        if (next == minus_infinity()) continue;
        const float shrink = exp2_fast(top - next);
        top = next;
        total *= shrink;
        out.x *= shrink, out.y *= shrink, out.z *= shrink, out.w *= shrink;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float weight = exp2_fast(scale[i] - top);
            total += weight;
            out.x = fmaf(part[i].x, weight, out.x), out.y = fmaf(part[i].y, weight, out.y);
            out.z = fmaf(part[i].z, weight, out.z), out.w = fmaf(part[i].w, weight, out.w);
        }
    }
    const float inverse = total > 0.f ? 1.f / total : 0.f;
    return make_float4(out.x * inverse, out.y * inverse, out.z * inverse, out.w * inverse);
}

// bar.arrive on hardware barrier `id`: as named_sync, without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int a, int b, int c, int d, int e,
                                            u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "l"(policy)
        : "memory");
}

// Four 8x8 matrices; lane 8·i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// d[16,8] += a[16,16] · b[16,8]. A lane holds rows lane/4 and lane/4 + 8 of d, columns 2·(lane%4) and the next.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
