// A program that runs the kernel of primitives.cu: `primitives SEED [SITE left out|wrong]` says whether its results are
// right and which races there were; `primitives sites` names the places to change.
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

}  // namespace

extern "C" const char* races_found();

int main(int count, char** arguments) {
    const bool names_sites = std::string(arguments[1]) == "sites";
    if (!names_sites) emulation_seed = std::stoull(arguments[1]);
    if (count > 2) emulation_change(arguments[2], std::string(arguments[3]) == "wrong");
    const bool right = streams_pages();
    if (names_sites) return std::fputs(emulation_sites(), stdout) < 0;
    std::puts(right ? "right" : "wrong");
    std::fputs(races_found(), stdout);
}
