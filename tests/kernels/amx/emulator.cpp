// AMX-TILE and AMX-BF16 for processors without them: a handler of SIGILL does what the instruction that a thread stopped at
// does by Intel's manual (volume 2), and lets the thread go on behind it. The instruction's first byte becomes a breakpoint:
// hypervisors look at illegal instructions first, so that SIGTRAP comes in a third of the time.
//
// Written from the manual, and knows nothing of csrc/cpu: plain.h there computes the same in another way. What a processor
// would refuse ends the process, with a sentence that names the instruction. Instructions that are not of AMX, and those of
// AMX that are not here, go to whoever handled SIGILL before.
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <initializer_list>

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kMaxRowBytes = 64;  // of palette 1, the only one there is
constexpr int kPage = 4096;
constexpr uint8_t kVex = 0xC4, kBreakpoint = 0xCC;  // the first byte of an instruction, and what it becomes

enum Kind { kLoadConfig, kStoreConfig, kRelease, kZero, kLoad, kStore, kDot, kKinds };
const char* const kNames[kKinds] = {"LDTILECFG", "STTILECFG", "TILERELEASE", "TILEZERO", "TILELOADD", "TILESTORED", "TDPBF16PS"};

// What a processor could do wrong: `emulator_mistake`.
enum Mistake { kNone, kKeepsDenormals, kSwapsPairs, kForgetsSums, kIgnoresStrides, kForgetsConfiguration };

// As LDTILECFG reads it, 64 bytes.
struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct alignas(64) Tile {
    uint8_t rows[kMaxRows][kMaxRowBytes];
};

// Of a thread. Where it is first touched memory may be allocated: no thread stops at one of these instructions in malloc.
thread_local Configuration configuration;
thread_local Tile tiles[kTiles];

bool permitted = false;
Mistake mistake = kNone;
uint64_t counts[kKinds];
struct sigaction before_ill, before_trap;

// An instruction, as far as it is in its bytes and in registers.
struct Instruction {
    Kind kind;
    const uint8_t* next;  // the byte behind it
    int reg, rm, vvvv;    // numbers of registers
    uint64_t address;     // base + displacement
    uint64_t stride;      // index times scale
};

[[noreturn]] void refuse(Kind kind, const char* format, ...) {
    char why[256], line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    const int length = snprintf(line, sizeof line, "emulated AMX: %s: %s.\n", kNames[kind], why);
    if (write(STDERR_FILENO, line, length) < 0) _exit(1);
    abort();
}

// What `prefix` (0; 1: 66; 2: F3; 3: F2) and `opcode` of the map 0F38 are. False where it is none of ours.
bool kind_of(int opcode, int prefix, bool of_memory, Kind& kind) {
    if (opcode == 0x49) {
        if (prefix == 0) kind = of_memory ? kLoadConfig : kRelease;
        else if (prefix == 1 && of_memory) kind = kStoreConfig;
        else if (prefix == 3 && !of_memory) kind = kZero;
        else return false;
        return true;
    }
    if (opcode == 0x4B && of_memory && prefix) {
        kind = prefix == 2 ? kStore : kLoad;  // 1 is TILELOADDT1, the same but for a hint
        return true;
    }
    kind = kDot;
    return opcode == 0x5C && prefix == 2 && !of_memory;
}

uint64_t signed_at(const uint8_t* at, bool one_byte) {
    if (one_byte) return (uint64_t)(int64_t)(int8_t)*at;
    int32_t number;
    memcpy(&number, at, sizeof number);
    return (uint64_t)(int64_t)number;
}

// Manual, volume 2, chapter 2: VEX of three bytes, opcode, ModRM, SIB, displacement.
bool decode(const uint8_t* at, const greg_t* registers, Instruction& found) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    if ((at[0] != kVex && at[0] != kBreakpoint) || (at[1] & 31) != 2 || at[2] & 0x84) return false;  // map 0F38, W = 0, L = 0
    const int more_reg = at[1] & 0x80 ? 0 : 8, more_index = at[1] & 0x40 ? 0 : 8, more_base = at[1] & 0x20 ? 0 : 8;
    const int modrm = at[4], mode = modrm >> 6, low = modrm & 7;
    found.vvvv = ~at[2] >> 3 & 15;
    found.reg = (modrm >> 3 & 7) + more_reg;
    found.rm = low + more_base;
    if (!kind_of(at[3], at[2] & 3, mode != 3, found.kind) || (found.vvvv && found.kind != kDot)) return false;
    // Fields that say nothing are 0.
    if (found.kind <= kRelease ? found.reg || (mode == 3 && low) : found.kind == kZero && low) return false;
    at += 5;
    found.address = found.stride = 0;
    if (mode != 3) {
        bool has_base = true, of_next = false;
        int base = found.rm;
        if (low == 4) {
            const int sib = *at++, index = (sib >> 3 & 7) + more_index;
            if (index != 4) found.stride = (uint64_t)registers[order[index]] << (sib >> 6);
            base = (sib & 7) + more_base;
            has_base = (sib & 7) != 5 || mode;
        } else if (found.kind == kLoad || found.kind == kStore) {
            return false;  // these ask for SIB
        } else if (low == 5 && !mode) {
            has_base = false, of_next = true;
        }
        if (has_base) found.address = (uint64_t)registers[order[base]];
        if (mode || !has_base) {
            found.address += signed_at(at, mode == 1);
            at += mode == 1 ? 1 : 4;
        }
        if (of_next) found.address += (uint64_t)at;
    }
    found.next = at;
    return true;
}

void load_configuration(const Configuration& next) {
    if (!next.palette) {
        memset(&configuration, 0, sizeof configuration);
        memset(tiles, 0, sizeof tiles);
        return;
    }
    if (next.palette != 1) refuse(kLoadConfig, "#GP, there is no palette %d", next.palette);
    if (next.start_row) refuse(kLoadConfig, "the emulator always begins with row 0, not %d", next.start_row);
    for (const uint8_t byte : next.reserved)
        if (byte) refuse(kLoadConfig, "#GP, a reserved byte is %d", byte);
    for (int tile = 0; tile < 16; ++tile) {
        const int rows = next.rows[tile], bytes = next.row_bytes[tile];
        if (tile >= kTiles && (rows || bytes)) refuse(kLoadConfig, "#GP, there is no tile %d", tile);
        if (rows > kMaxRows || bytes > kMaxRowBytes)
            refuse(kLoadConfig, "#GP, tile %d of %d rows of %d bytes is too large", tile, rows, bytes);
        if (!rows != !bytes) refuse(kLoadConfig, "#GP, tile %d has %d rows of %d bytes", tile, rows, bytes);
    }
    configuration = next;
    memset(tiles, 0, sizeof tiles);
}

// The tile, which is configured.
Tile& tile_of(Kind kind, int tile) {
    if (!configuration.palette) refuse(kind, "#UD, tiles are not configured");
    if (tile >= kTiles) refuse(kind, "#UD, there is no tile %d", tile);
    if (!configuration.rows[tile]) refuse(kind, "#UD, tile %d is not configured", tile);
    return tiles[tile];
}

void load(int tile, uint64_t address, uint64_t stride) {
    Tile& to = tile_of(kLoad, tile);
    const int bytes = configuration.row_bytes[tile];
    if (mistake == kIgnoresStrides) stride = bytes;
    memset(&to, 0, sizeof to);
    for (int row = 0; row < configuration.rows[tile]; ++row) memcpy(to.rows[row], (const void*)(address + row * stride), bytes);
}

void store(int tile, uint64_t address, uint64_t stride) {
    const Tile& from = tile_of(kStore, tile);
    for (int row = 0; row < configuration.rows[tile]; ++row)
        memcpy((void*)(address + row * stride), from.rows[row], configuration.row_bytes[tile]);
}

// The first of each pair of bfloat16 numbers, or the second, in float32.
__attribute__((target("avx512f"))) inline __m512 half_of(__m512i pairs, bool second) {
    return (__m512)(second ? _mm512_and_epi32(pairs, _mm512_set1_epi32((int)0xFFFF0000)) : _mm512_slli_epi32(pairs, 16));
}

// Sums += A B. Denormal numbers are for whoever calls this to switch off.
__attribute__((target("avx512f"), noinline)) void add_products(Tile& sums, const Tile& a, const Tile& b, int rows, int pairs,
                                                               int columns) {
    const __mmask16 used = (__mmask16)((1 << columns) - 1);
    for (int m = 0; m < rows; ++m) {
        __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
        for (int k = 0; k < pairs; ++k) {
            int32_t pair;
            memcpy(&pair, a.rows[m] + 4 * k, sizeof pair);
            const __m512i left = _mm512_set1_epi32(pair), right = _mm512_load_si512(b.rows[k]);
            first = _mm512_fmadd_ps(half_of(left, mistake == kSwapsPairs), half_of(right, false), first);
            second = _mm512_fmadd_ps(half_of(left, mistake != kSwapsPairs), half_of(right, true), second);
        }
        const __m512 before = mistake == kForgetsSums ? _mm512_setzero_ps() : _mm512_load_ps(sums.rows[m]);
        _mm512_store_ps(sums.rows[m], _mm512_maskz_add_ps(used, before, _mm512_add_ps(first, second)));
    }
    memset(sums.rows[rows], 0, sizeof sums.rows[0] * (kMaxRows - rows));
}

void dot(int sums, int a, int b) {
    Tile& to = tile_of(kDot, sums);
    const Tile &left = tile_of(kDot, a), &right = tile_of(kDot, b);
    const auto& [palette, start_row, reserved, bytes, rows] = configuration;
    if (sums == a || sums == b || a == b) refuse(kDot, "#UD, tiles %d, %d and %d are not three", sums, a, b);
    for (const int tile : {sums, a, b})
        if (bytes[tile] % 4) refuse(kDot, "#UD, rows of tile %d have %d bytes", tile, bytes[tile]);
    if (rows[sums] != rows[a]) refuse(kDot, "#UD, sums of %d rows, but A of %d", rows[sums], rows[a]);
    if (bytes[sums] != bytes[b]) refuse(kDot, "#UD, sums of rows of %d bytes, but B of %d", bytes[sums], bytes[b]);
    if (bytes[a] / 4 != rows[b]) refuse(kDot, "#UD, A of %d pairs in a row, but B of %d rows", bytes[a] / 4, rows[b]);
    // Whatever the thread's own say, to nearest; denormal numbers are 0, on the way in and out. A handler has its own.
    _mm_setcsr(0x1F80 | (mistake == kKeepsDenormals ? 0 : 0x8040));
    add_products(to, left, right, rows[a], rows[b], bytes[sums] / 4);
    _mm_setcsr(0x1F80);
}

void execute(const Instruction& found) {
    if (!permitted && found.kind != kStoreConfig && found.kind != kRelease)
        refuse(found.kind, "#NM, nobody asked Linux for tile registers");
    switch (found.kind) {
        case kLoadConfig: load_configuration(*(const Configuration*)(found.address + found.stride)); break;
        case kStoreConfig:
            memcpy((void*)(found.address + found.stride), &configuration, sizeof configuration);
            if (mistake == kForgetsConfiguration) memset((void*)(found.address + found.stride), 0, sizeof configuration);
            break;
        case kRelease: load_configuration({}); break;
        case kZero: memset(&tile_of(kZero, found.reg), 0, sizeof(Tile)); break;
        case kLoad: load(found.reg, found.address, found.stride); break;
        case kStore: store(found.reg, found.address, found.stride); break;
        default: dot(found.reg, found.rm, found.vvvv);
    }
    __atomic_fetch_add(&counts[found.kind], 1, __ATOMIC_RELAXED);
}

void pass_on(const struct sigaction& before, int signal, siginfo_t* info, void* context) {
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
    else sigaction(signal, &before, nullptr), raise(signal);
}

// Executes the tile instruction at `at`, and those right behind it: a signal costs more than they do. False where there is
// none.
bool run(const uint8_t* at, greg_t* registers) {
    Instruction found;
    bool any = false;
    for (; decode(at, registers, found); at = found.next, any = true) execute(found);
    if (any) registers[REG_RIP] = (greg_t)at;
    return any;
}

greg_t* registers_of(void* context) { return ((ucontext_t*)context)->uc_mcontext.gregs; }

void handle_ill(int signal, siginfo_t* info, void* context) {
    auto* at = (uint8_t*)registers_of(context)[REG_RIP];
    if (!run(at, registers_of(context))) return pass_on(before_ill, signal, info, context);
    auto* page = (void*)((uintptr_t)at & -(uintptr_t)kPage);
    if (!mprotect(page, kPage, PROT_READ | PROT_WRITE | PROT_EXEC)) __atomic_store_n(at, kBreakpoint, __ATOMIC_RELAXED);
}

void handle_trap(int signal, siginfo_t* info, void* context) {
    const auto* at = (const uint8_t*)registers_of(context)[REG_RIP] - 1;
    if (*at != kBreakpoint || !run(at, registers_of(context))) pass_on(before_trap, signal, info, context);
}

// Takes a signal, if somebody else has it.
void take(int signal, void (*handler)(int, siginfo_t*, void*), struct sigaction& before) {
    struct sigaction now, ours = {};
    sigaction(signal, nullptr, &now);
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == handler) return;
    before = now;
    ours.sa_sigaction = handler;
    ours.sa_flags = SA_SIGINFO;
    sigaction(signal, &ours, nullptr);
}

}  // namespace

extern "C" {

void emulator_install() {
    take(SIGILL, handle_ill, before_ill);
    take(SIGTRAP, handle_trap, before_trap);
}

// What Linux is asked by arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
void emulator_permit(int yes) { permitted = yes; }
void emulator_mistake(int which) { mistake = (Mistake)which; }
// How often an instruction was executed, in the order of `Kind`.
uint64_t emulator_count(int kind) { return __atomic_load_n(&counts[kind], __ATOMIC_RELAXED); }
}
