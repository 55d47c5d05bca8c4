// A program that runs the kernels of primitives.cu: `primitives KERNEL SEED [SITE left out|wrong]` says whether their
// results are right and which races there were; `primitives KERNEL sites` names the places to change.
#include "primitives.cu"

#include <numeric>
#include <string>

namespace {

bool streams_pages() {
    constexpr int kBlocks = 2, kPages = 11, kNumbers = kPages * stream::kPage;
    alignas(16) static u32 in[kBlocks][kNumbers], out[kBlocks];
    for (int block = 0; block < kBlocks; ++block)
        for (int i = 0; i < kNumbers; ++i) in[block][i] = (u32)(i * 2654435761u) ^ (u32)block;
    const int sizes[] = {kBlocks, 1, 1, stream::kThreads, sizeof(stream::Shared)};
    emulation::launch(sizes, [] { stream_pages(in[0], out, kPages); });
    for (int block = 0; block < kBlocks; ++block)
        if (out[block] != std::accumulate(in[block], in[block] + kNumbers, 0u)) return false;
    return true;
}

bool exchanges_numbers() {
    using namespace exchange;
    static u32 in[kBlocks][kNumbers], out[kBlocks][kNumbers];
    for (int block = 0; block < kBlocks; ++block)
        for (int i = 0; i < kNumbers; ++i) in[block][i] = (u32)(1 << block * 8) + (u32)i;
    const int sizes[] = {kBlocks, 1, 1, kNumbers, sizeof(Shared)};
    emulation::launch(sizes, [] { exchange_numbers(in[0], out[0]); }, kBlocks);
    for (int block = 0; block < kBlocks; ++block)
        for (int i = 0; i < kNumbers; ++i) {
            u32 expected = in[(block + kBlocks - 1) % kBlocks][i];
            for (int other = 0; other < kBlocks; ++other) expected += in[other][i];
            if (out[block][i] != expected) return false;
        }
    return true;
}

}  // namespace

extern "C" const char* races_found();

int main(int count, char** arguments) {
    const bool names_sites = std::string(arguments[2]) == "sites";
    if (!names_sites) emulation_seed = std::stoull(arguments[2]);
    if (count > 3) emulation_change(arguments[3], std::string(arguments[4]) == "wrong");
    const bool right = std::string(arguments[1]) == "stream" ? streams_pages() : exchanges_numbers();
    if (names_sites) return std::fputs(emulation_sites(), stdout) < 0;
    std::puts(right ? "right" : "wrong");
    std::fputs(races_found(), stdout);
}
