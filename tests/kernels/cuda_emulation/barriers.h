// What compute capability 9.0 adds: barriers in shared memory, and bulk copies that they wait for.
//
// A bulk copy lands at any time that a thread waits for something, the last one issued as readily as the first; until
// then its destination is NaN, for whoever comes too early and for whoever is not done with what was there.
#pragma once

namespace emulation {

inline constexpr unsigned long long kBarrierMark = 0x7ff4'ba12'7ff4'ba12ull;

inline Phases& phases_of(const Barrier* barrier) {
    const auto found = block->barriers.find(barrier);
    if (found == block->barriers.end()) fail("a barrier that nobody has made is used");
    if (barrier->word != kBarrierMark) fail("a barrier was overwritten");
    return found->second;
}

inline void end_phase_if_complete(Phases& phases) {
    if (phases.missing || phases.bytes) return;
    phases.missing = phases.arrivals;
    ++phases.completed;
}

inline void arrive_at(Phases& phases, i64 bytes) {
    if (phases.missing == 0) fail("more threads arrive at a barrier than it was made for");
    --phases.missing;
    phases.bytes += bytes;
    end_phase_if_complete(phases);
}

inline void land_a_copy() {
    const size_t which = chance((unsigned)block->copies.size());
    const BulkCopy copy = block->copies[which];
    block->copies.erase(block->copies.begin() + (long)which);
    std::memcpy(copy.to, copy.from, copy.bytes);
    if (copy.phases->bytes < copy.bytes) fail("%lld bytes come that no thread has announced at their barrier", copy.bytes);
    copy.phases->bytes -= copy.bytes;
    end_phase_if_complete(*copy.phases);
}

inline void start_copy(void* to, const void* from, unsigned bytes, Phases& phases) {
    if (!phases.published) fail("the barrier of a bulk copy was not published");
    if (((size_t)to | (size_t)from | bytes) % 16) fail("a bulk copy of %lld bytes is not aligned", bytes);
    if (bytes == 0) fail("a bulk copy is empty");
    std::memset(to, 0xff, bytes);
    block->copies.push_back({(u8*)to, (const u8*)from, bytes, &phases});
}

}  // namespace emulation

inline void make_barrier(Barrier* barrier, int arrivals) {
    if ((size_t)barrier % 8) emulation::fail("a barrier is not aligned");
    if (arrivals <= 0) emulation::fail("a barrier is made for %lld threads", arrivals);
    barrier->word = emulation::kBarrierMark;
    emulation::block->barriers[barrier] = {arrivals, arrivals, emulation::thread};
}
inline void publish_barriers() {
    for (auto& [barrier, phases] : emulation::block->barriers) phases.published |= phases.maker == emulation::thread;
}
inline void arrive(Barrier* barrier) {
    emulation::arrive_at(emulation::phases_of(barrier), 0);
}
// The copies that the thread has not waited for land as bulk copies do; unlike those, they need no fence.
inline void arrive_when_copied(Barrier* barrier) {
    emulation::Phases& phases = emulation::phases_of(barrier);
    for (auto& group : emulation::thread->copies) {
        for (const emulation::Copy& copy : group) {
            phases.bytes += 16;
            emulation::start_copy(copy.to, copy.from, 16, phases);
        }
        group.clear();
    }
    emulation::arrive_at(phases, 0);
}
inline void arrive_expecting(Barrier* barrier, u32 bytes) { emulation::arrive_at(emulation::phases_of(barrier), bytes); }
inline void wait(Barrier* barrier, u32 parity) {
    emulation::Phases& phases = emulation::phases_of(barrier);
    if (!phases.is_over(parity)) {
        emulation::thread->phases = &phases;
        emulation::thread->parity = parity;
        emulation::yield();
        emulation::thread->phases = nullptr;
    }
}
// Here a copy sees what was written before: on a GPU compute-sanitizer looks after fences.
inline void fence_before_bulk_copies() {}
inline void copy_bulk(void* shared, const void* global, u32 bytes, Barrier* barrier) {
    emulation::start_copy(shared, global, bytes, emulation::phases_of(barrier));
}

template <int kThreads>
void sync_threads(int name) {
    static_assert(kThreads % emulation::kWarpSize == 0);
    emulation::Meeting& meeting = emulation::block->named[name];
    if (meeting.arrived && meeting.size != kThreads) emulation::fail("threads disagree how many meet at barrier %lld", name);
    meeting.size = kThreads;
    emulation::meet(meeting);
}
