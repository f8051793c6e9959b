// The features of this processor and operating system that the levels need.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

static bool supports_avx2() {
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kF16c = 1u << 29;  // which __builtin_cpu_supports knows from GCC 14 on
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & kF16c);
}

static bool supports_avx512() {
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool supports_avx512bf16() { return supports_avx512() && __builtin_cpu_supports("avx512bf16"); }

static bool supports_avx512vnni() { return supports_avx512() && __builtin_cpu_supports("avx512vnni"); }

// Linux saves the state of the tiles, 8 KiB per thread, only for a process that has requested permission to use them.
static bool has_tiles_of(unsigned values) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kTile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & values) == 0 || (d & kTile) == 0) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; the number of the feature in XCR0
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool supports_amxint8() { return supports_avx512vnni() && has_tiles_of(1u << 25); }

static bool supports_amx() { return supports_avx512bf16() && has_tiles_of(1u << 22); }

}  // namespace quire

// Returns 1 if this processor and operating system run the level, by its number in levels.py.
extern "C" __attribute__((visibility("default"))) int quire_supports(int level) {
    using namespace quire;
    static constexpr bool (*kLevels[])() = {supports_avx2,       supports_avx512,  supports_avx512vnni,
                                            supports_avx512bf16, supports_amxint8, supports_amx};
    return level >= 0 && level < int(sizeof kLevels / sizeof *kLevels) && kLevels[level]();
}
