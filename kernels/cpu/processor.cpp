// The features of this processor and operating system that level_*.cpp ask for.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "level_prelude.h"

namespace quire {

bool supports_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool supports_avx512() {
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool supports_avx512bf16() { return supports_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Linux saves the state of the tiles, 8 KiB per thread, only for a process that has requested permission to use them.
bool supports_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    if (!supports_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & kBf16) == 0 || (d & kTile) == 0) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; the number of the feature in XCR0
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace quire
