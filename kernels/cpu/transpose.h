// The order of values in a panel: out[word][column] = rows[column][word].
#pragma once
#include <cstddef>
#include <cstring>

namespace quire {

constexpr size_t kPanelColumns = 32;

// Writes ceil(bytes / sizeof(Word)) words of each of 32 rows of `bytes`. A null row gives zeros, and so does what the
// last word of a row lacks. Words are copied in blocks of 16, a cache line of each row, and written in order.
template <class Word>
void transpose_panel(const char* const* rows, size_t bytes, Word* out) {
    constexpr size_t kBlock = 64 / sizeof(Word);
    const size_t full = bytes / sizeof(Word), rest = bytes % sizeof(Word);
    bool has_all = true;
    for (size_t c = 0; c < kPanelColumns; ++c) has_all = has_all && rows[c];
    for (size_t w0 = 0; w0 < full; w0 += kBlock) {
        const size_t w1 = w0 + kBlock < full ? w0 + kBlock : full;
        for (size_t w = w0; w < w1; ++w)
            for (size_t c = 0; c < kPanelColumns; ++c) {
                Word word = 0;
                if (has_all || rows[c]) std::memcpy(&word, rows[c] + w * sizeof(Word), sizeof word);
                out[w * kPanelColumns + c] = word;
            }
    }
    for (size_t c = 0; rest && c < kPanelColumns; ++c) {
        Word word = 0;
        if (rows[c]) std::memcpy(&word, rows[c] + full * sizeof(Word), rest);
        out[full * kPanelColumns + c] = word;
    }
}

}  // namespace quire
