// Copies of stored weights, converted to the type of the model and checked. Compiled for the base instruction set and
// for processors with AVX2; both give the same bits.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "thread_pool.h"

namespace quire {
namespace {

#define ON_VECTORS __attribute__((target_clones("arch=x86-64-v3", "default")))

enum Type { kFloat32, kBfloat16, kFloat16 };

constexpr size_t kWorthAThread = 64 << 10;  // least elements for another thread

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The functions below map the bits of a value to those of another type.

uint32_t same(uint32_t bits) { return bits; }

uint32_t widen_bfloat16(uint32_t bits) { return bits << 16; }

// The exponent moves from 5 to 8 bits. The product scales by 2^(127 - 15), which also normalises subnormal numbers.
uint32_t widen_float16(uint32_t bits) {
    const uint32_t magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    return bits_of(float_of(magnitude) * 0x1p112f) | special | sign;
}

// Rounds to even. A NaN stays one: the lower bits of a NaN could be all that it has.
uint32_t round_to_bfloat16(uint32_t bits) {
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return is_nan ? (bits >> 16 | 0x40) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t float16_to_bfloat16(uint32_t bits) { return round_to_bfloat16(widen_float16(bits)); }

// Converts values[begin, end). Returns false if a result is not finite: all bits of its exponent, `kExponent`, are set.
template <class From, class To, uint32_t (*kMap)(uint32_t), uint32_t kExponent>
inline __attribute__((always_inline)) bool convert_range(const void* values, void* out, size_t begin, size_t end) {
    const auto* from = static_cast<const From*>(values);
    auto* to = static_cast<To*>(out);
    To bad = 0;
    for (size_t i = begin; i < end; ++i) {
        const To bits = To(kMap(from[i]));
        to[i] = bits;
        bad = To(bad | To(To(bits & To(kExponent)) == To(kExponent)));
    }
    return bad == 0;
}

constexpr uint32_t kExponent32 = 0x7f800000, kExponentB16 = 0x7f80, kExponent16 = 0x7c00;

#define CONVERSION(name, From, To, map, exponent)                                                \
    ON_VECTORS bool name(const void* values, void* out, size_t begin, size_t end) {              \
        return convert_range<From, To, map, exponent>(values, out, begin, end);                  \
    }

CONVERSION(copy_float32, uint32_t, uint32_t, same, kExponent32)
CONVERSION(copy_bfloat16, uint16_t, uint16_t, same, kExponentB16)
CONVERSION(copy_float16, uint16_t, uint16_t, same, kExponent16)
CONVERSION(bfloat16_as_float32, uint16_t, uint32_t, widen_bfloat16, kExponent32)
CONVERSION(float16_as_float32, uint16_t, uint32_t, widen_float16, kExponent32)
CONVERSION(float32_as_bfloat16, uint32_t, uint16_t, round_to_bfloat16, kExponentB16)
CONVERSION(float16_as_bfloat16, uint16_t, uint16_t, float16_to_bfloat16, kExponentB16)

using Conversion = bool (*)(const void*, void*, size_t, size_t);

Conversion conversion(int from, int to) {
    constexpr int kTypes = 3;
    static const Conversion table[kTypes][kTypes] = {
        {copy_float32, float32_as_bfloat16, nullptr},
        {bfloat16_as_float32, copy_bfloat16, nullptr},
        {float16_as_float32, float16_as_bfloat16, copy_float16},
    };
    return from < 0 || from >= kTypes || to < 0 || to >= kTypes ? nullptr : table[from][to];
}

}  // namespace
}  // namespace quire

// Copies `count` values to `out` in another type (0: float32, 1: bfloat16, 2: float16), rounded to even. Returns 1 if
// all results are finite, 0 if not, and -1 for a pair of types that it does not convert.
extern "C" __attribute__((visibility("default"))) int quire_convert(const void* values, int from, void* out, int to,
                                                                     size_t count) {
    using namespace quire;
    const Conversion convert = conversion(from, to);
    if (!convert) return -1;
    std::atomic<bool> finite{true};
    parallel_ranges(count, kWorthAThread, [&](size_t begin, size_t end) {
        if (!convert(values, out, begin, end)) finite.store(false, std::memory_order_relaxed);
    });
    return finite ? 1 : 0;
}
