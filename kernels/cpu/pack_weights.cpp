// Packing of the weights of linear layers into panels (see gemm.h). Compiled for the base instruction set.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "thread_pool.h"

namespace quire {
namespace {

// Packs one panel of 32 columns: out[word][column] = rows[column][word]. A null row gives zeros.
template <class Value, int kPerWord>
void pack_panel(const Value* const* rows, size_t k, uint32_t* out) {
    const size_t words = (k + kPerWord - 1) / kPerWord;
    for (size_t w0 = 0; w0 < words; w0 += 16) {
        const size_t w1 = std::min(words, w0 + 16);
        for (size_t c = 0; c < 32; ++c)
            for (size_t w = w0; w < w1; ++w) {
                uint32_t word = 0;
                const size_t values = std::min<size_t>(kPerWord, k - w * kPerWord);
                if (rows[c]) std::memcpy(&word, rows[c] + w * kPerWord, values * sizeof(Value));
                out[w * 32 + c] = word;
            }
    }
}

template <class Value, int kPerWord>
void pack(const Value* weight, size_t n, size_t k, bool gate_up, uint32_t* out) {
    const size_t words = (k + kPerWord - 1) / kPerWord, half = n / 2, width = gate_up ? 16 : 32;
    const size_t panels = ((gate_up ? half : n) + width - 1) / width;
    parallel_ranges(panels, 1, [&](size_t begin, size_t end) {
        for (size_t p = begin; p < end; ++p) {
            const Value* rows[32];
            for (size_t c = 0; c < 32; ++c) {
                const size_t column = gate_up ? p * 16 + c % 16 : p * 32 + c;
                const size_t row = gate_up && c >= 16 ? half + column : column;
                rows[c] = column < (gate_up ? half : n) ? weight + row * k : nullptr;
            }
            pack_panel<Value, kPerWord>(rows, k, out + p * words * 32);
        }
    });
}

}  // namespace
}  // namespace quire

// Packs weight [n, k], row-major, of 2-byte or 4-byte values, into panels (see gemm.h).
extern "C" __attribute__((visibility("default"))) void quire_pack(const void* weight, size_t n, size_t k,
                                                                  int value_size, int gate_up, void* out) {
    if (value_size == 2)
        quire::pack<uint16_t, 2>(static_cast<const uint16_t*>(weight), n, k, gate_up, static_cast<uint32_t*>(out));
    else
        quire::pack<uint32_t, 1>(static_cast<const uint32_t*>(weight), n, k, gate_up, static_cast<uint32_t*>(out));
}
