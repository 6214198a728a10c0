// The functions of kernels/cuda/mla_held_ptx.cuh on the machine of machine.h.
#pragma once

#include "decode_ptx.cuh"

inline void multiply_keys(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {
    multiply_registers(d, 64, a, b, false, keep);
}
inline void tma_load_3d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, u64) {
    copy_later({machine.current->block}, dst, map, bar, {x, y, z});
}
inline void tma_multicast_3d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, u16 blocks, u64) {
    copy_later(blocks_of(blocks), dst, map, bar, {x, y, z});
}
inline void tma_prefetch(const TensorMap*, int, int) {}
