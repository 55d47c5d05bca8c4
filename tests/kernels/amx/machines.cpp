// What tests do with tile registers, one instruction at a time, and everything of csrc/cpu/tiles/registers.h in those of AMX and
// in plain ones.
#include <signal.h>
#include <ucontext.h>

#include "tiles/tiles.h"

using namespace antkv;

namespace {

// Calls use(tiles) with plain tiles or those of AMX.
template <typename Use>
void with_machine(bool plain, Use use) {
    if (plain) use(PlainTiles{});
    else use(AmxTiles{});
}

template <typename Tiles>
struct RegistersOf;
template <typename Registers>
struct RegistersOf<RegisterTiles<Registers>> {
    using Type = Registers;
};

template <typename Use>
void with_heads(int heads, Use use) {
    switch (heads) {
        case 1: return use(std::integral_constant<int, 1>{});
        case 2: return use(std::integral_constant<int, 2>{});
        case 4: return use(std::integral_constant<int, 4>{});
        case 8: return use(std::integral_constant<int, 8>{});
        default: return use(std::integral_constant<int, 16>{});
    }
}

alignas(64) uint8_t of_nobody[64];

int num_stepped_over;
void step_over(int, siginfo_t*, void* context) {
    ++num_stepped_over;
    ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] += 2;
}

}  // namespace

asm(".text\nlone_release: tilerelease\nret\n");

extern "C" {

void lone_release();

void configure(const uint8_t* bytes) { asm volatile("ldtilecfg %0" ::"m"(*(const uint8_t(*)[64])bytes)); }
void configuration(uint8_t* bytes) { asm volatile("sttilecfg %0" : "=m"(*(uint8_t(*)[64])bytes)); }
// By an address relative to the instruction.
void configure_from_static(const uint8_t* bytes) {
    std::memcpy(of_nobody, bytes, sizeof of_nobody);
    asm volatile("ldtilecfg %0" ::"m"(of_nobody));
}
void release() { asm volatile("tilerelease"); }
void zero() { AmxRegisters::zero<0>(); }
void load(const void* from, int64_t stride) { AmxRegisters::load<0>(from, stride); }
void store(void* to, int64_t stride) { AmxRegisters::store<0>(to, stride); }
void dot() { AmxRegisters::dot<0, 4, 6>(); }
// tdpbf16ps tmm0, tmm4, tmm4, which assemblers refuse.
void dot_of_two() { asm volatile(".byte 0xC4, 0xE2, 0x5A, 0x5C, 0xC4"); }
void illegal() { asm volatile("ud2"); }
// tilerelease but for a bit.
void nearly_release() { asm volatile(".byte 0xC4, 0xE2, 0x78, 0x49, 0xC1"); }

// Loads tile 0 by an address of some form, and stores it with rows of 64 bytes.
void load_by(int form, const char* from, int64_t stride, void* to) {
    switch (form) {
        case 0: asm volatile("tileloadd 64(%0,%1,1), %%tmm0" ::"r"(from - 64), "r"(stride) : "memory"); break;
        case 1: asm volatile("tileloadd -4096(%0,%1,2), %%tmm0" ::"r"(from + 4096), "r"(stride / 2) : "memory"); break;
        case 2:
            asm volatile("mov %0, %%r13\n mov %1, %%r12\n tileloadd (%%r13,%%r12,4), %%tmm0" ::"r"(from), "r"(stride / 4)
                         : "memory", "r12", "r13");
            break;
        case 3:
            asm volatile("mov %0, %%r12\n mov %1, %%r15\n tileloaddt1 (%%r12,%%r15,8), %%tmm0" ::"r"(from), "r"(stride / 8)
                         : "memory", "r12", "r15");
            break;
        case 4: asm volatile("tileloadd 128(%0,%1,1), %%tmm0" ::"r"(from + 15 * stride - 128), "r"(-stride) : "memory"); break;
        default: asm volatile("tileloadd (%0), %%tmm0" ::"r"(from) : "memory");
    }
    AmxRegisters::store<0>(to, 64);
}

// How often a handler that was there before the emulator is called for two instructions that are nobody's.
int passed_on(void (*install)()) {
    struct sigaction before, mine = {};
    mine.sa_sigaction = step_over;
    mine.sa_flags = SA_SIGINFO;
    num_stepped_over = 0;
    sigaction(SIGILL, &mine, &before);
    install();
    illegal();
    release();
    illegal();
    sigaction(SIGILL, &before, nullptr);
    install();
    return num_stepped_over;
}

// Whether the handler of SIGILL goes on behind an instruction that it has replaced meanwhile.
bool met_twice() {
    struct sigaction now;
    ucontext_t context = {};
    greg_t& next = context.uc_mcontext.gregs[REG_RIP];
    lone_release();
    next = (greg_t)lone_release;
    sigaction(SIGILL, nullptr, &now);
    now.sa_sigaction(SIGILL, nullptr, &context);
    return next == (greg_t)lone_release + 5;
}

// Sums += A B of tiles of any shapes, rows of 64 bytes.
void multiply(bool plain, const TileShapes* shapes, const BFloat* a, const BFloat* b, float* sums) {
    with_machine(plain, [&](auto tiles) {
        using R = typename RegistersOf<decltype(tiles)>::Type;
        const typename decltype(tiles)::Scope scope(*shapes);
        R::template load<0>(sums, 64);
        R::template load<4>(a, 64);
        R::template load<6>(b, 64);
        R::template dot<0, 4, 6>();
        R::template store<0>(sums, 64);
    });
}

// a: (2, depth, 16, 32); b: the same; sums: (32, 32), added to; few: (16, 32).
void product(bool plain, const BFloat* a, const BFloat* b, int depth, float* sums, float* few) {
    const Operand left = {a, kTileElements, (int64_t)depth * kTileElements};
    const Operand right = {b, kTileElements, (int64_t)depth * kTileElements};
    with_machine(plain, [&](auto tiles) {
        using Tiles = decltype(tiles);
        const typename Tiles::Scope scope;
        Tiles::template product<true>(left, right, depth, sums, 32, [] {});
        Tiles::few_rows(left, right, 16, depth, few, 32);
    });
}

// keys: (32, 64); queries: (heads, 64); out: (heads, 32), products, then those with the first half of the channels added.
void logits(bool plain, int heads, const BFloat* keys, const BFloat* queries, float* out) {
    with_machine(plain, [&](auto tiles) {
        with_heads(heads, [&](auto num_heads) {
            using Logits = typename decltype(tiles)::template Logits<num_heads>;
            alignas(64) BFloat packed[2 * Logits::kQueryElements], halves[kKeys * kTileDepth];
            for (int i = 0; i < 2; ++i) {
                BitLanes rows[num_heads];
                for (int h = 0; h < num_heads; ++h) rows[h] = load_pairs(queries + h * 2 * kTileDepth + i * kTileDepth);
                Logits::pack(rows, packed + i * Logits::kQueryElements);
            }
            for (int t = 0; t < kKeys; ++t) std::memcpy(halves + t * kTileDepth, keys + t * 2 * kTileDepth, 2 * kTileDepth);
            Logits products;
            products.template multiply<2, false>(keys, packed, num_heads, out, kKeys);
            products.template multiply<1, true>(halves, packed, num_heads, out, kKeys);
        });
    });
}

// Rows from last to first. rows: (32, 64); queries: (heads, 64); weights: (heads, 32), of up to 8 heads; out: (heads, 32);
// added: (heads, 64), added to.
void rows_anywhere(bool plain, int heads, const BFloat* rows, const BFloat* queries, const float* weights, float* out,
                   float* added) {
    const BFloat* listed[kKeys];
    for (int t = 0; t < kKeys; ++t) listed[t] = rows + (kKeys - 1 - t) * kValues;
    with_machine(plain, [&](auto tiles) {
        using Tiles = decltype(tiles);
        const auto put = [&](int h, int first, Lanes products) { store_lanes(out + h * kKeys + first, products); };
        Tiles::dot_rows(heads, queries, listed, kValues, kKeys, put);
        with_heads(std::min(heads, 8), [&](auto num_heads) {
            if constexpr (num_heads <= 8) {
                using Values = typename Tiles::template Values<num_heads>;
                alignas(64) BFloat packed[Values::kWeightElements];
                Values sums;
                sums.clear();
                Values::pack(weights, kKeys, num_heads, packed);
                sums.add_rows([&](int t, int half) { return load_pairs(listed[t] + half * kTileDepth); }, 2, packed);
                sums.add_to(added, kValues, num_heads, kValues);
            }
        });
    });
}

// rows: (32, 64); weights: (heads, 32), heads at most 8; out: (heads, 64), added to twice.
void values(bool plain, int heads, const BFloat* rows, const float* weights, float* out) {
    with_machine(plain, [&](auto tiles) {
        with_heads(heads, [&](auto num_heads) {
            if constexpr (num_heads <= 8) {
                using Values = typename decltype(tiles)::template Values<num_heads>;
                alignas(64) BFloat packed[Values::kWeightElements];
                Values sums;
                sums.clear();
                Values::pack(weights, kKeys, num_heads, packed);
                for (int i = 0; i < 2; ++i) sums.add(rows, packed);
                sums.add_to(out, kValues, num_heads, kValues);
            }
        });
    });
}
}
