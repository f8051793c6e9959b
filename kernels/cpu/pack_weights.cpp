// Packing of the weights of linear layers into panels (see gemm.h). Compiled for the base instruction set.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "thread_pool.h"
#include "transpose.h"

namespace quire {
namespace {

constexpr size_t kGroup = 32;  // values of 4 bits with one multiplier

// Calls pack_panel(rows, panel) for each panel, with the rows of the weight, of row_bytes each, that are its columns. A
// column of zeros has a null row.
template <class PackPanel>
void for_panels(const void* weight, size_t n, size_t row_bytes, bool gate_up, PackPanel pack_panel) {
    const size_t half = n / 2, width = gate_up ? 16 : 32, columns = gate_up ? half : n;
    parallel_ranges((columns + width - 1) / width, 1, [&](size_t begin, size_t end) {
        for (size_t p = begin; p < end; ++p) {
            const char* rows[kPanelColumns];
            for (size_t c = 0; c < kPanelColumns; ++c) {
                const size_t column = gate_up ? p * 16 + c % 16 : p * 32 + c;
                const size_t row = gate_up && c >= 16 ? half + column : column;
                rows[c] = column < columns ? static_cast<const char*>(weight) + row * row_bytes : nullptr;
            }
            pack_panel(rows, p);
        }
    });
}

template <class Word>
void pack(const void* weight, size_t n, size_t row_bytes, bool gate_up, size_t panel_bytes, char* out) {
    for_panels(weight, n, row_bytes, gate_up, [&](const char* const* rows, size_t panel) {
        transpose_panel(rows, row_bytes, reinterpret_cast<Word*>(out + panel * panel_bytes));
    });
}

// Each group of 32 values: the multipliers of 32 columns, and then 16 bytes of each column, as gemm.h has them.
void pack_nibbles(const uint8_t* weight, const int16_t* multipliers, size_t n, size_t k, bool gate_up,
                  char* out) {
    const size_t groups = (k + kGroup - 1) / kGroup, group_bytes = kPanelColumns * (2 + kGroup / 2);
    for_panels(weight, n, k, gate_up, [&](const char* const* rows, size_t panel) {
        char* to = out + panel * groups * group_bytes;
        for (size_t g = 0; g < groups; ++g, to += group_bytes) {
            const size_t count = std::min(kGroup, k - g * kGroup);
            for (size_t c = 0; c < kPanelColumns; ++c) {
                uint8_t values[kGroup] = {};
                int16_t multiplier = 0;
                if (rows[c]) {
                    std::memcpy(values, rows[c] + g * kGroup, count);
                    multiplier = multipliers[size_t(rows[c] - reinterpret_cast<const char*>(weight)) / k * groups + g];
                }
                std::memcpy(to + c * 2, &multiplier, 2);
                char* bytes = to + kPanelColumns * 2 + c * 4;
                for (size_t i = 0; i < kGroup; i += 8, bytes += kPanelColumns * 4)
                    for (size_t j = 0; j < 4; ++j) bytes[j] = char(values[i + j] | values[i + j + 4] << 4);
            }
        }
    });
}

}  // namespace
}  // namespace quire

#define EXPORT extern "C" __attribute__((visibility("default")))

// Packs weight [n], rows of row_bytes, into panels of words of 2 or 4 bytes (see gemm.h).
EXPORT void quire_pack(const void* weight, size_t n, size_t row_bytes, int word_bytes, int gate_up, size_t panel_bytes,
                       char* out) {
    if (word_bytes == 2)
        quire::pack<uint16_t>(weight, n, row_bytes, gate_up, panel_bytes, out);
    else
        quire::pack<uint32_t>(weight, n, row_bytes, gate_up, panel_bytes, out);
}

// Packs weight [n, k] of values 0..15, one per byte, with multipliers [n, ceil(k / 32)].
EXPORT void quire_pack_nibbles(const uint8_t* weight, const int16_t* multipliers, size_t n, size_t k, int gate_up,
                               char* out) {
    quire::pack_nibbles(weight, multipliers, n, k, gate_up, out);
}
