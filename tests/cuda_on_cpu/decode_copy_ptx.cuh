// The functions of kernels/cuda/decode_copy_ptx.cuh on the machine of machine.h.
#pragma once

#include "decode_ptx.cuh"

// Copies by cp.async happen early, at the commit, or as late as their thread waits for them.
template <int BYTES>
void copy_async(u32 dst, const void* src, u64) {
    demand(dst % 16 == 0 && u64(src) % 16 == 0, "cp.async: 16 bytes are not aligned");
    Block* const block = machine.current->block;
    shared_byte(block, dst + 15);  // is there
    machine.current->copies.open.emplace_back([=] { std::memcpy(shared_byte(block, dst), src, 16); });
}

inline void run_copy_groups(size_t leave) {
    auto& groups = machine.current->copies.groups;
    while (groups.size() > leave) {
        for (const Task& task : groups.front()) task();
        groups.erase(groups.begin());
    }
}

inline void copy_commit() {
    auto& copies = machine.current->copies;
    copies.groups.push_back(std::move(copies.open));
    copies.open.clear();
    if (machine.random() % 3 == 0) {  // early
        const size_t count = copies.groups.size();
        run_copy_groups(0);
        copies.groups.resize(count);
    }
}

template <int PENDING>
void copy_wait() {
    run_copy_groups(PENDING);
}
