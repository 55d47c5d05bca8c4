// Who could have seen what: happens-before among the threads of a CTA and its bulk copies. See races.cpp.
#pragma once

namespace emulation {
struct Thread;
struct Block;
}  // namespace emulation

namespace races {

// How far each thread and agent of the CTA had come, as far as is known; empty: nothing is.
using Clock = std::vector<u32>;
// A bulk copy: something like a thread, which starts with what its issuer knows.
struct Agent {
    u32 number, time;
    Clock known;
};

void begin(const emulation::Block&);
void end();
// By the thread that runs; `site` is where in the code.
void touch(const void* address, size_t bytes, bool writes, const void* site = __builtin_return_address(0));
void release(emulation::Thread&, Clock& to);
void acquire(emulation::Thread&, const Clock& from);
void turn(Clock& coming, Clock& together);
Agent start(emulation::Thread&, const void* to, size_t bytes, const void* site = __builtin_return_address(0));
void land(const Agent&, Clock& to);
void fence(emulation::Thread&);

}  // namespace races
