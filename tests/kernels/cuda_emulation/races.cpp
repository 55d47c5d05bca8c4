// The detector behind races.h: vector clocks for threads and bulk copies, a shadow of shared memory for who was where.
//
// Kernels are compiled with -fsanitize=thread, which calls the hooks at the end of this file at every access; they are
// linked with this instead of its runtime. An access conflicts with an earlier one of another thread if nothing that
// orders memory lies between: what counts is what could have happened, not what did.
#include "device.cuh"

#include <dlfcn.h>

namespace races {
namespace {

using emulation::Block;
using emulation::Thread;

constexpr u32 kAgents = 64, kNobody = ~0u;
constexpr size_t kGrain = 2;  // bytes of a cell: no two threads write into one

struct Write {
    u32 who, time, site;
    bool ordinary;  // not by a bulk copy
};
// Of a warp: lanes that read at `time`, the last time any of them did.
struct Reads {
    u32 time, lanes, site;
};

struct Shadow {
    size_t cells;
    Write* writes;
    Reads* reads;  // (warps, cells): pages of it that nobody touches cost nothing
};

struct Kind {
    const char* what;
    u32 earlier, later;
    bool operator<(const Kind& other) const {
        return std::tie(earlier, later, what) < std::tie(other.earlier, other.later, other.what);
    }
};

std::vector<Clock> clocks;                // of the threads
std::vector<std::vector<u32>> fences;     // times of each thread
std::vector<u32> agent_times;
u32 next_agent, num_threads, num_warps;    // threads and warps that there could be: agents come behind them
Shadow shadow;
std::map<Kind, long> found;
bool busy = false;  // what this file calls may be instrumented

struct Busy {
    const bool before = busy;
    Busy() { busy = true; }
    ~Busy() { busy = before; }
};

u32 site_of(const void* at);

size_t size() { return num_threads + kAgents; }

void raise(Clock& clock, const Clock& other) {
    if (clock.size() < size()) clock.resize(size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = clock[i] > other[i] ? clock[i] : other[i];
}

// Where this library starts in memory.
size_t library() {
    static const size_t base = [] {
        Dl_info info;
        return dladdr((const void*)&site_of, &info) ? (size_t)info.dli_fbase : 0;
    }();
    return base;
}
u32 site_of(const void* at) { return (u32)((size_t)at - library()); }

void report(const char* what, u32 earlier, u32 later) { ++found[{what, earlier, later}]; }

// Whoever has written something in the ordinary way must have fenced it before a bulk copy reads or overwrites it.
bool is_fenced(const Write& write, const Clock& known) {
    for (const u32 time : fences[write.who])
        if (time >= write.time && time <= known[write.who]) return true;
    return false;
}

// Someone who knows `known` writes as `who`, at `time` of its own.
void mark_write(const void* address, size_t bytes, const Clock& known, Write own) {
    if (!emulation::is_shared(address)) return;
    const size_t offset = (size_t)((const u8*)address - emulation::block->shared);
    const size_t first = offset / kGrain, last = (offset + bytes - 1) / kGrain;
    for (size_t cell = first; cell <= last; ++cell) {
        Write& before = shadow.writes[cell];
        if (before.time && before.who != own.who && known[before.who] < before.time)
            report("write after write", before.site, own.site);
        if (before.time && before.ordinary && !own.ordinary && !is_fenced(before, known))
            report("bulk copy after write without a fence", before.site, own.site);
        for (u32 warp = 0; warp < num_warps; ++warp) {
            Reads& reads = shadow.reads[warp * shadow.cells + cell];
            for (u32 lanes = reads.lanes; lanes; lanes &= lanes - 1) {
                const u32 reader = warp * emulation::kWarpSize + (u32)__builtin_ctz(lanes);
                if (reader != own.who && known[reader] < reads.time) {
                    report("write after read", reads.site, own.site);
                    break;
                }
            }
            if (reads.lanes) reads.lanes = 0;
        }
        before = own;
    }
}

// Someone who knows `known` reads as `who`.
void mark_read(const void* address, size_t bytes, const Clock& known, u32 who, u32 site) {
    if (!emulation::is_shared(address)) return;
    const u32 warp = who / emulation::kWarpSize, lane = 1u << who % emulation::kWarpSize;
    const size_t offset = (size_t)((const u8*)address - emulation::block->shared);
    const size_t first = offset / kGrain, last = (offset + bytes - 1) / kGrain;
    for (size_t cell = first; cell <= last; ++cell) {
        const Write& write = shadow.writes[cell];
        if (write.time && write.who != who && known[write.who] < write.time)
            report("read after write", write.site, site);
        Reads& reads = shadow.reads[warp * shadow.cells + cell];
        if (reads.time != known[who]) reads = {known[who], 0, site};
        reads.lanes |= lane;
    }
}

template <typename T>
T* zeros(size_t count) {
    return (T*)emulation::map_pages(count * sizeof(T));
}

}  // namespace

void begin(const Block& block) {
    const Busy guard;
    num_threads = ((u32)block.threads.size() + emulation::kWarpSize - 1) / emulation::kWarpSize * emulation::kWarpSize;
    num_warps = (num_threads + kAgents) / emulation::kWarpSize;
    clocks.assign(num_threads, Clock(size()));
    fences.assign(num_threads, {});
    agent_times.assign(kAgents, 0);
    for (u32 thread = 0; thread < num_threads; ++thread) clocks[thread][thread] = 1;
    const size_t cells = (block.bytes + kGrain - 1) / kGrain;
    shadow = {cells, zeros<Write>(cells + 1), zeros<Reads>(cells * num_warps + 1)};
}

void end() {
    const Busy guard;
    munmap(shadow.writes, (shadow.cells + 1) * sizeof(Write));
    munmap(shadow.reads, (shadow.cells * num_warps + 1) * sizeof(Reads));
}

void release(Thread& thread, Clock& to) {
    const Busy guard;
    raise(to, clocks[thread.index.x]);
    ++clocks[thread.index.x][thread.index.x];
}
void acquire(Thread& thread, const Clock& from) {
    const Busy guard;
    raise(clocks[thread.index.x], from);
}
void turn(Clock& coming, Clock& together) {
    const Busy guard;
    together = coming;
}

Agent start(Thread& thread, const void* to, size_t bytes, const void* site) {
    const Busy guard;
    const u32 number = next_agent++ % kAgents;
    Agent agent{num_threads + number, ++agent_times[number], clocks[thread.index.x]};
    agent.known[agent.number] = agent.time;
    mark_write(to, bytes, agent.known, {agent.number, agent.time, site_of(site), false});
    return agent;
}
void land(const Agent& agent, Clock& to) {
    const Busy guard;
    raise(to, agent.known);
}
void fence(Thread& thread) {
    const Busy guard;
    fences[thread.index.x].push_back(clocks[thread.index.x][thread.index.x]);
}
void touch(const void* address, size_t bytes, bool writes, const void* site) {
    if (busy || !emulation::block || !emulation::thread || !emulation::is_shared(address)) return;
    const Busy guard;
    const u32 who = emulation::thread->index.x;
    if (writes) mark_write(address, bytes, clocks[who], {who, clocks[who][who], site_of(site), true});
    else mark_read(address, bytes, clocks[who], who, site_of(site));
}

}  // namespace races

// Everything found since the last call: a line for each kind, `what earlier later times`, the places as offsets into
// the library. Valid until the next call.
extern "C" const char* races_found() {
    static std::string text;
    text.clear();
    for (const auto& [kind, times] : races::found)
        text += std::string(kind.what) + "\t" + std::to_string(kind.earlier) + "\t" + std::to_string(kind.later) + "\t" +
                std::to_string(times) + "\n";
    races::found.clear();
    return text.c_str();
}

#define HOOKS(bytes)                                                                                           \
    extern "C" void __tsan_read##bytes(void* at) { races::touch(at, bytes, false, __builtin_return_address(0)); } \
    extern "C" void __tsan_write##bytes(void* at) { races::touch(at, bytes, true, __builtin_return_address(0)); } \
    extern "C" void __tsan_unaligned_read##bytes(void* at) {                                                   \
        races::touch(at, bytes, false, __builtin_return_address(0));                                           \
    }                                                                                                          \
    extern "C" void __tsan_unaligned_write##bytes(void* at) { races::touch(at, bytes, true, __builtin_return_address(0)); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* at, unsigned long bytes) { races::touch(at, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long bytes) { races::touch(at, bytes, true, __builtin_return_address(0)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
u8 __tsan_atomic8_load(const volatile u8* at, int) { return *at; }
void __tsan_atomic8_store(volatile u8* at, u8 value, int) { *at = value; }
}
