// A thread block, or a cluster of them, on the CPU: enough of the machine to run the decode kernels as they are.
//
// Every CUDA thread is a fiber; warps run in random order, a lane until it has to wait. What is asynchronous on the
// GPU happens late or early, at random: copies by TMA after some turns, wgmma between commit and wait. What would
// hang there ends here with a list of the barriers. Blocks run one after the other, clusters together.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <random>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct int4 { int x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
    std::_Exit(3);
}

inline void demand(bool truth, const char* what) {
    if (!truth) fail(what);
}

template <class To, class From>
To bits(From x) {
    To y{};
    std::memcpy(&y, &x, std::min(sizeof(To), sizeof(From)));
    return y;
}

// ---- state ---------------------------------------------------------------------------------------------

constexpr u32 SMEM_START = 0x430;  // where dynamic shared memory begins; not aligned, on purpose

struct Mbarrier {
    int arrivals = 0, pending = 0;
    long bytes = 0;  // expected and not yet there
    u32 phase = 0;
};

struct NamedBarrier {
    int arrived = 0, generation = 0;
};

struct Block {
    std::vector<unsigned char> smem;
    std::map<u32, Mbarrier> barriers;
    std::array<NamedBarrier, 16> named;
    int index = 0, rank = 0;
};

struct Warp {
    int arrived = 0, generation = 0;
    std::array<std::array<std::array<u64, 6>, 32>, 2> slots{};  // what lanes show each other
};

using Task = std::function<void()>;

struct CopyGroups {  // of cp.async
    std::vector<Task> open;
    std::vector<std::vector<Task>> groups;
};

struct Fiber {
    ucontext_t context{};
    std::vector<char> stack;
    int thread = 0, generation = 0;
    Block* block = nullptr;
    Warp* warp = nullptr;
    bool done = false;
    std::vector<Task> open;                 // wgmmas not yet committed
    std::vector<std::vector<Task>> groups;  // committed ones
    CopyGroups copies;
    int lane() const { return thread % 32; }
};

struct Machine {
    ucontext_t scheduler{};
    Fiber* current = nullptr;
    u64 progress = 0;
    std::mt19937 random;
    std::vector<Block*> cluster;
    NamedBarrier cluster_barrier;
    int cluster_threads = 0, blocks = 0;
    std::vector<std::pair<int, Task>> copies;  // turns to wait, and what to do
    Task body;
};

inline Machine machine;

inline void yield() { swapcontext(&machine.current->context, &machine.scheduler); }

inline unsigned char* shared_byte(Block* block, u32 address) {
    demand(address >= SMEM_START && address < block->smem.size(), "shared-memory address out of range");
    return block->smem.data() + address;
}

inline unsigned char* shared_byte(u32 address) { return shared_byte(machine.current->block, address); }

// What `extern __shared__` names in the kernels.
inline unsigned char* dynamic_shared_memory() { return machine.current->block->smem.data() + SMEM_START; }

struct ThreadIndex { struct { operator int() const { return machine.current->thread; } } x; };
struct BlockIndex { struct { operator int() const { return machine.current->block->index; } } x; };
struct GridSize { struct { operator int() const { return machine.blocks; } } x; };
inline ThreadIndex threadIdx;
inline BlockIndex blockIdx;
inline GridSize gridDim;

// ---- lanes of a warp -------------------------------------------------------------------------------------

// Shows `words` to the other lanes, waits for theirs, and returns where all are.
inline const std::array<std::array<u64, 6>, 32>& exchange(std::initializer_list<u64> words) {
    Fiber* const self = machine.current;
    Warp* const warp = self->warp;
    const int generation = warp->generation;
    demand(self->generation == generation, "the lanes of a warp disagree");
    auto& slots = warp->slots[generation & 1];
    std::copy(words.begin(), words.end(), slots[self->lane()].begin());
    self->generation = generation + 1;
    if (++warp->arrived == 32) {
        warp->arrived = 0;
        ++warp->generation;
        ++machine.progress;
    }
    while (warp->generation == generation) yield();
    return slots;
}

inline void __syncwarp() { exchange({}); }

template <class T>
T __shfl_sync(u32, T x, int lane) {
    return bits<T>(exchange({bits<u64>(x)})[lane & 31][0]);
}

template <class T>
T __shfl_xor_sync(u32 mask, T x, int distance) {
    return __shfl_sync(mask, x, machine.current->lane() ^ distance);
}

inline bool __any_sync(u32, bool x) {
    const auto& all = exchange({u64(x)});
    return std::any_of(all.begin(), all.end(), [](const auto& words) { return words[0] != 0; });
}

// ---- memory and numbers ----------------------------------------------------------------------------------

template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
void __stcg(T* p, T x) { *p = x; }
inline void __threadfence() {}
inline int atomicAdd(int* p, int x) {
    *p += x;
    return *p - x;
}
inline float __int_as_float(u32 x) { return bits<float>(x); }
inline float __uint_as_float(u32 x) { return bits<float>(x); }

inline float to_float(u16 x) {
#if BF16
    return bits<float>(u32(x) << 16);
#else
    return float(bits<_Float16>(x));
#endif
}

inline u16 to_low(float x) {
#if BF16
    const u32 word = bits<u32>(x);
    if (std::isnan(x)) return 0x7fff;
    return u16((word + 0x7fff + (word >> 16 & 1)) >> 16);
#else
    return bits<u16>(_Float16(x));
#endif
}

inline float half_of(u64 word, int i) { return to_float(u16(word >> 16 * i)); }

// ---- barriers --------------------------------------------------------------------------------------------

inline Mbarrier& mbarrier(Block* block, u32 address) {
    const auto found = block->barriers.find(address);
    demand(found != block->barriers.end(), "mbarrier used before it is initialised");
    return found->second;
}

inline void settle_phase(Mbarrier& b) {
    demand(b.pending >= 0, "more arrivals at an mbarrier than it counts");
    if (b.pending > 0 || b.bytes != 0) return;
    b.phase ^= 1;
    b.pending = b.arrivals;
    ++machine.progress;
}

inline void arrive(Block* block, u32 address, long bytes) {
    Mbarrier& b = mbarrier(block, address);
    b.bytes += bytes;
    --b.pending;
    ++machine.progress;
    settle_phase(b);
}

inline void meet(NamedBarrier& b, int threads, bool wait) {
    const int generation = b.generation;
    ++machine.progress;
    if (++b.arrived == threads) {
        b.arrived = 0;
        ++b.generation;
    } else {
        demand(b.arrived < threads, "more threads at a barrier than it counts");
        while (wait && b.generation == generation) yield();
    }
}

// ---- running ---------------------------------------------------------------------------------------------

inline void fiber_entry() {
    Fiber* const self = machine.current;
    machine.body();
    demand(self->open.empty() && self->groups.empty(), "a thread ended with wgmmas not waited for");
    bool copying = !self->copies.open.empty();
    for (const auto& group : self->copies.groups) copying = copying || !group.empty();
    demand(!copying, "a thread ended with copies by cp.async not waited for");
    self->done = true;
    ++machine.progress;
    swapcontext(&self->context, &machine.scheduler);
}

inline void report_deadlock(const std::vector<Fiber>& fibers) {
    std::fprintf(stderr, "cuda_on_cpu: deadlock; warps that wait:");
    for (const Fiber& f : fibers)
        if (!f.done && f.lane() == 0) std::fprintf(stderr, " %d.%d", f.block->index, f.thread / 32);
    std::fprintf(stderr, "\n");
    for (const Block* block : machine.cluster)
        for (const auto& [address, b] : block->barriers)
            std::fprintf(stderr, "  block %d barrier %u: %d of %d to come, %ld bytes, phase %u\n", block->index,
                         address, b.pending, b.arrivals, b.bytes, b.phase);
    std::_Exit(3);
}

inline void run_copies() {
    for (size_t i = 0; i < machine.copies.size();) {
        if (machine.copies[i].first-- > 0) {
            ++i;
            continue;
        }
        const Task copy = machine.copies[i].second;
        machine.copies.erase(machine.copies.begin() + i);
        copy();
        ++machine.progress;
    }
}

inline void run_cluster(int first, int count, int threads, u32 smem) {
    std::vector<Block> blocks(count);
    std::vector<Warp> warps(count * threads / 32);
    std::vector<Fiber> fibers(count * threads);
    machine.cluster.clear();
    machine.cluster_barrier = NamedBarrier{};
    machine.cluster_threads = count * threads;
    for (int b = 0; b < count; ++b) {
        blocks[b].index = first + b;
        blocks[b].rank = b;
        blocks[b].smem.assign(SMEM_START + smem, 0xff);  // NaNs, as far as they are numbers
        machine.cluster.push_back(&blocks[b]);
    }
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& f = fibers[i];
        f.thread = int(i) % threads;
        f.block = &blocks[i / threads];
        f.warp = &warps[i / 32];
        f.stack.resize(96 << 10);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        makecontext(&f.context, fiber_entry, 0);
    }
    const auto busy = [](const Fiber& f) { return !f.done; };
    int idle = 0;
    while (std::any_of(fibers.begin(), fibers.end(), busy)) {
        const u64 before = machine.progress;
        const size_t warp = machine.random() % warps.size();
        for (size_t i = 32 * warp; i < 32 * warp + 32; ++i) {
            if (fibers[i].done) continue;
            machine.current = &fibers[i];
            swapcontext(&machine.scheduler, &fibers[i].context);
        }
        run_copies();
        idle = machine.progress == before && machine.copies.empty() ? idle + 1 : 0;
        if (idle > 3000) report_deadlock(fibers);
    }
    demand(machine.copies.empty(), "a block ended with copies under way");
    for (const Block& block : blocks)
        for (const NamedBarrier& b : block.named) demand(b.arrived == 0, "a block ended inside a barrier");
}

// Runs `body` for every thread of `grid` blocks, in an order that `seed` decides.
inline void run_grid(int grid, int cluster, int threads, u32 smem, u32 seed, const Task& body) {
    machine.random.seed(seed);
    machine.blocks = grid;
    machine.body = body;
    std::vector<int> order;
    for (int i = 0; i < grid; i += cluster) order.push_back(i);
    std::shuffle(order.begin(), order.end(), machine.random);
    for (const int first : order) run_cluster(first, cluster, threads, smem);
}
