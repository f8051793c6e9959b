// The KV cache: the types of its values, the layout of a block, and the conversions from and to activations. Included
// inside a level's namespace; see level_*.cpp.
//
// A block has, for each kv head, groups of G = min(16, block_size) tokens:
//   K: [D / P][G][P]: the same P values of G keys are contiguous, so that one vector load reads a unit of 16 keys;
//   V: [G / P][D][P]: keys in units of P, so that a 4-byte word of bf16 values holds two keys.
// P is 1 for floats, and 2 for all narrower values. A group of int8 values ends with the scales of its tokens, G floats:
// a value is its integer times the scale. A scale belongs to one token and one kv head, so the stored bytes of a token
// depend on that token alone: not on the rest of its block, nor on the step that computed it.
//
// Attention converts values that do not have the type of the activations while it reads them: in registers (load_line),
// or group by group before (widen), if many rows read the group. All stored values are exact in the type of the activations, so the sums have the same bits as over a cache of that type
// with the same values. Scales multiply scores and weights, not values.

constexpr int kMaxHeadDim = 640;  // 512 for keys and values apart; more for the rows of a latent cache (latent.h)

enum KvType { kKvAct, kKvBf16, kKvInt8, kKvFp8 };  // `_KV_TYPES` in ops.py; kKvBf16 is for float activations

struct KvLayout {
    KvType type;
    size_t d, block_size;

    size_t group() const { return block_size < 16 ? block_size : 16; }
    size_t unit() const { return type == kKvAct ? kPerWord : 2; }
    size_t value_bytes() const { return type == kKvAct ? sizeof(act) : type == kKvBf16 ? 2 : 1; }
    bool has_scales() const { return type == kKvInt8; }
    size_t scales_at() const { return group() * d * value_bytes(); }
    size_t group_bytes() const { return scales_at() + (has_scales() ? group() * sizeof(float) : 0); }
    size_t head_bytes() const { return block_size / group() * group_bytes(); }  // of one block and one kv head
};

// Conversions of a row of D activations to the type of the cache

// Rounds to the nearest bf16 value, ties to even. NaN stays NaN.
INLINE void narrow_bf16(const float* x, size_t d, uint16_t* out) {
    for (size_t i = 0; i < d; ++i) {
        uint32_t v;
        memcpy(&v, x + i, 4);
        const bool is_nan = (v & 0x7fffffff) > 0x7f800000;
        out[i] = uint16_t((is_nan ? v | 0x400000 : v + 0x7fff + (v >> 16 & 1)) >> 16);
    }
}

// Returns the scale, the largest absolute value / 127. NaN becomes -127.
INLINE float narrow_int8(const float* x, size_t d, int8_t* out) {
    F largest = zero();
    for (size_t i = 0; i < d; i += W) largest = max(max(load(x + i), sub(zero(), load(x + i))), largest);
    const float most = max_of(largest), inverse = most > 0.f ? 127.f / most : 0.f;
    for (size_t i = 0; i < d; ++i) {
        float v = x[i] * inverse;
        v = v > -127.f ? v : -127.f;
        v = v < 127.f ? v : 127.f;
        out[i] = int8_t(int32_t((v + 12582912.f) - 12582912.f));  // 1.5 * 2^23: rounds to the nearest, ties to even
    }
    return most / 127.f;
}

// Rounds to the nearest e4m3 value, ties to even. Values beyond 448, and NaN, become 448 with their sign.
INLINE void narrow_fp8(const float* x, size_t d, uint8_t* out) {
    for (size_t i = 0; i < d; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        const uint32_t sign = bits >> 24 & 0x80;
        bits &= 0x7fffffff;
        float a;
        memcpy(&a, &bits, 4);
        a = a < 448.f ? a : 448.f;
        uint32_t normal, small;
        memcpy(&normal, &a, 4);
        normal = (normal + 0x7ffff + (normal >> 20 & 1) - (120u << 23)) >> 20;
        const float shifted = a + 16384.f;  // below 2^-6, values are multiples of 2^-9: the last bit of this sum
        memcpy(&small, &shifted, 4);
        small -= 0x46800000;  // 16384.f
        out[i] = uint8_t(sign | (a < 0.015625f ? small : normal));
    }
}

template <class Unit>
INLINE void write_key(char* group, size_t keys, size_t at, size_t d, const void* row) {
    Unit* to = (Unit*)group + at;
    const Unit* from = (const Unit*)row;
    for (size_t i = 0; i < d; ++i) to[i * keys] = from[i];
}

template <class Value>
INLINE void write_value(char* group, size_t at, size_t unit, size_t d, const void* row) {
    Value* to = (Value*)group + at / unit * d * unit + at % unit;
    const Value* from = (const Value*)row;
    if (unit == 1) {
        memcpy(to, from, d * sizeof(Value));
        return;
    }
    for (size_t i = 0; i < d; ++i) to[i * 2] = from[i];
}

// Writes one key or value to the block and kv head at `block`. is_key: else a value. offset: of the token in the block.
INLINE void write_row(const KvLayout& l, bool is_key, char* block, size_t offset, const act* row) {
    const size_t keys = l.group(), at = offset % keys, d = l.d;
    char* group = block + offset / keys * l.group_bytes();
    if (l.type == kKvAct) {
        is_key ? write_key<uint32_t>(group, keys, at, d / kPerWord, row)
               : write_value<act>(group, at, kPerWord, d, row);
        return;
    }
    alignas(64) float wide[kMaxHeadDim];
    alignas(64) uint16_t narrow[kMaxHeadDim];
    for (size_t i = 0; i < d; i += W) store(wide + i, act_load(row + i));
    if (l.type == kKvBf16) {
        narrow_bf16(wide, d, narrow);
        is_key ? write_key<uint32_t>(group, keys, at, d / 2, narrow) : write_value<uint16_t>(group, at, 2, d, narrow);
        return;
    }
    if (l.type == kKvInt8)
        ((float*)(group + l.scales_at()))[at] = narrow_int8(wide, d, (int8_t*)narrow);
    else
        narrow_fp8(wide, d, (uint8_t*)narrow);
    is_key ? write_key<uint16_t>(group, keys, at, d / 2, narrow) : write_value<uint8_t>(group, at, 2, d, narrow);
}

// Conversions of a line, 16 units, to words of activations: of the first values of the units, and then of the second
// values, where a word is one value

template <KvType kType>
constexpr int kLineBytes = kType == kKvAct || kType == kKvBf16 ? 64 : 32;
template <KvType kType>
constexpr int kLineWords = kType == kKvAct || kPerWord == 2 ? 1 : 2;

#ifdef ACT_BF16

template <KvType kType>
INLINE void load_line(const char* from, Word (&out)[1]) {
    if (kType == kKvAct) {
        out[0] = word_load((const uint32_t*)from);
        return;
    }
    if (kType == kKvInt8) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + 16))));
        out[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        return;
    }
    // The exponent and mantissa of an e4m3 value are moved to those of bf16. With an exponent of zero, the value is its
    // mantissa / 512, and comes from a table.
    const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
    const __m512i table = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i magnitude = _mm512_add_epi16(
        _mm512_and_si512(_mm512_slli_epi16(v, 4), _mm512_set1_epi16(0x7f0)), _mm512_set1_epi16(0x3c00));
    const __mmask32 is_small = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x78));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(v, 8), _mm512_set1_epi16(short(0x8000)));
    out[0] = _mm512_or_si512(_mm512_mask_permutexvar_epi16(magnitude, is_small, v, table), sign);
}

#elif defined(LEVEL_AVX2)

// Half a line: 8 units. An e4m3 value is moved to the place of an fp16 value with the same mantissa, whose exponent is
// less by 8.
template <KvType kType>
INLINE void load_half_line(const char* from, __m256& first, __m256& second) {
    if (kType == kKvBf16) {
        const __m256i v = _mm256_loadu_si256((const __m256i*)from);
        first = bfloat16_of_8_pairs(v, 0), second = bfloat16_of_8_pairs(v, 1);
        return;
    }
    const __m128i v = _mm_loadu_si128((const __m128i*)from);
    if (kType == kKvInt8) {
        const __m128i low = _mm_srai_epi16(_mm_slli_epi16(v, 8), 8), high = _mm_srai_epi16(v, 8);
        first = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(low));
        second = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(high));
        return;
    }
    const __m128i mask = _mm_set1_epi16(short(0xbf80));
    const __m128i low = _mm_srai_epi16(_mm_slli_epi16(v, 8), 1), high = _mm_srai_epi16(v, 1);
    const __m256 scale = _mm256_set1_ps(256.f);
    first = _mm256_mul_ps(_mm256_cvtph_ps(_mm_and_si128(low, mask)), scale);
    second = _mm256_mul_ps(_mm256_cvtph_ps(_mm_and_si128(high, mask)), scale);
}

template <KvType kType>
INLINE void load_line(const char* from, Word (&out)[1]) {
    out[0] = word_load((const uint32_t*)from);
}

template <KvType kType>
INLINE void load_line(const char* from, Word (&out)[2]) {
    load_half_line<kType>(from, out[0].low, out[1].low);
    load_half_line<kType>(from + kLineBytes<kType> / 2, out[0].high, out[1].high);
}

#else

template <KvType kType>
INLINE void load_line(const char* from, Word (&out)[1]) {
    out[0] = word_load((const uint32_t*)from);
}

template <KvType kType>
INLINE void load_line(const char* from, Word (&out)[2]) {
    if (kType == kKvBf16) {
        for (int i = 0; i < 2; ++i) out[i] = bfloat16_of_pairs((const uint32_t*)from, i);
        return;
    }
    const __m256i v = _mm256_loadu_si256((const __m256i*)from);
    if (kType == kKvInt8) {
        const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), high = _mm256_srai_epi16(v, 8);
        out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(low));
        out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(high));
        return;
    }
    // An e4m3 value is moved to the place of an fp16 value with the same mantissa, whose exponent is less by 8.
    const __m256i mask = _mm256_set1_epi16(short(0xbf80));
    const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), high = _mm256_srai_epi16(v, 1);
    out[0] = mul(_mm512_cvtph_ps(_mm256_and_si256(low, mask)), set1(256.f));
    out[1] = mul(_mm512_cvtph_ps(_mm256_and_si256(high, mask)), set1(256.f));
}

#endif

// Stores the words of `lines` lines at `to`, those of the second values `apart` words after those of the first, and
// returns the number of bytes read. next: the lines to prefetch.
template <KvType kType>
INLINE size_t widen_lines(const char* from, size_t lines, const char* next, uint32_t* to, size_t apart) {
    for (size_t i = 0; i < lines; ++i) {
        if (kLineBytes<kType> == 64 || i % 2 == 0) _mm_prefetch(next + i * kLineBytes<kType>, _MM_HINT_T1);
        Word words[kLineWords<kType>];
        load_line<kType>(from + i * kLineBytes<kType>, words);
        for (int k = 0; k < kLineWords<kType>; ++k) word_store(to + i * 16 + k * apart, words[k]);
    }
    return lines * kLineBytes<kType>;
}

template <KvType kType>
INLINE void widen(bool is_key, const char* from, size_t d, const char* next, uint32_t* to) {
    // The words of a line are those of 16 keys, or of 16 values of one key or two.
    const size_t per_line = size_t(kLineWords<kType>), run = is_key ? 1 : d / 16, runs = is_key ? d / 2 : 8;
    for (size_t i = 0, at = 0; i < runs; ++i, to += run * 16 * per_line)
        at += widen_lines<kType>(from + at, run, next + at, to, run * 16);
}

// Converts a group of 16 keys, or of 16 values, to words of activations in the order of a cache of activations. next:
// the group to prefetch.
INLINE void widen(const KvLayout& l, bool is_key, const char* from, const char* next, uint32_t* to) {
    if (l.type == kKvInt8)
        widen<kKvInt8>(is_key, from, l.d, next, to);
    else if (l.type == kKvFp8)
        widen<kKvFp8>(is_key, from, l.d, next, to);
#ifndef ACT_BF16
    else
        widen<kKvBf16>(is_key, from, l.d, next, to);
#endif
}
