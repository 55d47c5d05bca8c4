// Threads of a CTA as fibers: who runs next, what they meet at, and how a launch walks its grid.
//
// Shared memory starts as NaN and ends where no access is allowed.
// `seed` decides the order in which bulk copies land and warps get their turns.
#pragma once

#include <sys/mman.h>

// Keep the registers that a call keeps on the old stack, go on with the new one. (swapcontext asks the kernel, twice.)
extern "C" void emulation_switch(void** old_stack, void* new_stack);
asm(R"(
.weak emulation_switch
emulation_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");

// Parts of the machine that run at every step: nothing that they access is the kernel's, and to watch them takes most of
// the time.
#define ANTKV_MACHINE __attribute__((no_sanitize_undefined)) inline

// The source of all chances; set by the tests.
extern "C" inline unsigned long long emulation_seed = 1;

namespace emulation {

constexpr unsigned kWarpSize = 32;
constexpr size_t kStack = 1 << 17, kPage = 4096;

[[noreturn]] inline void fail(const char* what, long long number = 0) {
    std::fprintf(stderr, what, number);
    std::fputc('\n', stderr);
    std::abort();
}

[[noreturn]] inline void unexpected(const char* condition, const char* file, int line) {
    std::fprintf(stderr, "%s:%d: %s does not hold\n", file, line, condition);
    std::abort();
}

struct Copy {
    void* to;
    const void* from;
};

// Something that threads meet at.
struct Meeting {
    unsigned size, arrived = 0, generation = 0;
};

// What a barrier in shared memory has behind it.
struct Thread;
struct Phases {
    int arrivals, missing;
    const Thread* maker;
    bool published = false;
    i64 bytes = 0;           // announced, and not there yet
    unsigned completed = 0;  // phases

    ANTKV_MACHINE bool is_over(unsigned parity) const { return (completed & 1) != parity; }
};

struct Warp;

struct Thread {
    struct {
        unsigned x;
    } index;
    Warp* warp;
    void* stack = nullptr;  // where it goes on
    Meeting* meeting = nullptr;
    unsigned generation = 0, exchanges = 0;
    Phases* phases = nullptr;
    unsigned parity = 0;
    bool done = false;
    std::vector<std::vector<Copy>> copies;  // groups; the last is not committed

    ANTKV_MACHINE bool can_run() const {
        return !done && (!meeting || meeting->generation != generation) && (!phases || phases->is_over(parity));
    }
};

// What the lanes of a warp show each other; two buffers, so that one meeting per exchange is enough.
struct Warp {
    Meeting meeting{kWarpSize};
    alignas(16) u8 shown[2][kWarpSize][64];
};

// A bulk copy under way.
struct BulkCopy {
    u8* to;
    const u8* from;
    unsigned bytes;
    Phases* phases;
};

struct Block {
    dim3 index, grid;
    u8* shared;
    size_t bytes, mapped;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Meeting meeting{0};
    Meeting named[16];
    std::unordered_map<const void*, Phases> barriers;
    std::vector<BulkCopy> copies;
    const std::function<void()>* kernel;
    void* launcher;  // its stack

    u8* allocation() const { return shared + (bytes + 127) / 128 * 128 + kPage - mapped; }
};

inline Block* block = nullptr;
inline Thread* thread = nullptr;
inline unsigned long long chance_state = 1;

ANTKV_MACHINE unsigned chance(unsigned choices) {
    chance_state = chance_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(chance_state >> 33) % choices;
}

ANTKV_MACHINE Warp& warp() { return *thread->warp; }
ANTKV_MACHINE int lane() { return (int)(thread->index.x % kWarpSize); }

void land_a_copy();

// Go on with the next thread that can.
ANTKV_MACHINE void yield() {
    Thread* from = thread;
    const unsigned count = (unsigned)block->threads.size();
    while (!block->copies.empty() && chance(4) == 0) land_a_copy();
    for (;;) {
        const unsigned first = chance(8) ? from->index.x + 1 : chance(count) / kWarpSize * kWarpSize;
        for (unsigned step = 0; step < count; ++step) {
            Thread& next = block->threads[(first + step) % count];
            if (!next.can_run()) continue;
            thread = &next;
            if (&next != from) emulation_switch(&from->stack, next.stack);
            return;
        }
        if (block->copies.empty()) break;
        land_a_copy();
    }
    for (const Thread& other : block->threads)
        if (!other.done) fail("thread %lld waits for threads or bytes that do not come", other.index.x);
    emulation_switch(&from->stack, block->launcher);
}

ANTKV_MACHINE void meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.generation;
    } else {
        thread->meeting = &meeting;
        thread->generation = meeting.generation;
        yield();
        thread->meeting = nullptr;
    }
}

// Show a value to the warp; what all of its lanes have shown.
template <typename T>
ANTKV_MACHINE const u8 (*show(const T& value))[64] {
    static_assert(sizeof(T) <= 64);
    auto& shown = warp().shown[thread->exchanges++ % 2];
    std::memcpy(shown[lane()], &value, sizeof value);
    meet(warp().meeting);
    return shown;
}
template <typename T>
ANTKV_MACHINE T read(const u8 (&shown)[64]) {
    T value;
    std::memcpy(&value, shown, sizeof value);
    return value;
}

inline void enter() {
    (*block->kernel)();
    for (const auto& group : thread->copies)
        if (!group.empty()) fail("thread %lld ends while copies are under way", thread->index.x);
    thread->done = true;
    const auto is_done = [](const Thread& each) { return each.done; };
    if (!block->copies.empty() && std::all_of(block->threads.begin(), block->threads.end(), is_done))
        fail("a block ends while bulk copies are under way");
    yield();
}

inline void* map_pages(size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) fail("no memory for %lld bytes", (long long)bytes);
    return at;
}

inline void prepare_block(Block& b, unsigned threads, size_t bytes) {
    b.bytes = bytes;
    b.mapped = (bytes + kPage - 1 + 127) / kPage * kPage + kPage;
    u8* pages = (u8*)map_pages(b.mapped);
    mprotect(pages + b.mapped - kPage, kPage, PROT_NONE);
    b.shared = pages + b.mapped - kPage - (bytes + 127) / 128 * 128;
    std::memset(b.shared, 0xff, bytes);
    b.warps = std::vector<Warp>((threads + kWarpSize - 1) / kWarpSize);
    b.meeting.size = threads;
}

inline void run(Block& b, unsigned threads) {
    static u8* stacks = nullptr;
    static size_t reserved = 0;
    if (reserved < threads) {
        reserved = threads;
        stacks = (u8*)map_pages(reserved * kStack);
    }
    b.threads = std::vector<Thread>(threads);
    for (unsigned number = 0; number < threads; ++number) {
        Thread& t = b.threads[number];
        t.index.x = number;
        t.warp = &b.warps[number / kWarpSize];
        t.copies.resize(1);
        // Six registers, the function to return to, and a place for its own return address, as the ABI aligns them.
        void** top = (void**)((size_t)(stacks + (number + 1) * kStack) & ~(size_t)15) - 2;
        *top = (void*)enter;
        t.stack = top - 6;
    }
    block = &b;
    thread = &b.threads[0];
    emulation_switch(&b.launcher, thread->stack);
    block = nullptr;
    thread = nullptr;
    munmap(b.allocation(), b.mapped);
}

// sizes: grid (3), threads of a CTA, bytes of shared memory.
inline void launch(const int* sizes, const std::function<void()>& kernel) {
    const dim3 grid{(unsigned)sizes[0], (unsigned)sizes[1], (unsigned)sizes[2]};
    const unsigned threads = (unsigned)sizes[3];
    chance_state = emulation_seed;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                Block b;
                b.kernel = &kernel;
                b.index = {x, y, z};
                b.grid = grid;
                prepare_block(b, threads, (size_t)sizes[4]);
                run(b, threads);
            }
}

}  // namespace emulation
