// AVX-512 vectors of 16 floats. Included inside a level's namespace; see level_*.cpp.
//
// A "word" is 4 bytes of a matrix operand: two bf16 values or one float. `dot` multiplies words and adds the products
// to floats.

constexpr int W = 16;
using F = __m512;
using Mask = __mmask16;

INLINE F set1(float v) { return _mm512_set1_ps(v); }
INLINE F zero() { return _mm512_setzero_ps(); }
INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// If an operand is NaN, the result is the second operand, as the instruction defines it.
INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F round_even(F a) { return _mm512_roundscale_ps(a, 8); }
INLINE F pow2(F n) {  // 2^n for whole n in [-126, 127]
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE F scale_pow2(F v, F n) { return _mm512_scalef_ps(v, n); }  // v * 2^n for whole n <= 0, or 0
INLINE float sum(F v) { return _mm512_reduce_add_ps(v); }
INLINE float max_of(F v) { return _mm512_reduce_max_ps(v); }
INLINE float lane0(F v) { return _mm512_cvtss_f32(v); }

INLINE Mask first(int n) { return n >= W ? Mask(0xffff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1); }
INLINE Mask between(int lo, int hi) { return first(hi) & Mask(~first(lo)); }  // lanes lo..hi-1
INLINE Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE Mask greater_equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE Mask both(Mask a, Mask b) { return a & b; }
INLINE unsigned bits(Mask m) { return m; }
INLINE F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
INLINE F load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE void store(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
// Stores the selected lanes contiguously and returns their number. The memory at p must have room for W floats.
INLINE int compress(float* p, F v, Mask m) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, v));
    return __builtin_popcount(m);
}
INLINE double sum_double(F v) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

#ifdef ACT_BF16

using act = uint16_t;
constexpr int kPerWord = 2;
using Word = __m512i;

INLINE Word word_load(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE Word word_load_low(const uint32_t* p) {  // the first value of each pair, zero for the second
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff));
}
INLINE Word word_broadcast(const uint32_t* p) { return _mm512_set1_epi32(int(*p)); }
INLINE F dot(F acc, Word a, Word b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

INLINE F widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
INLINE __m256i narrow(F v) { return (__m256i)_mm512_cvtneps_pbh(v); }
INLINE F act_load(const act* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F act_load(const act* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
INLINE void act_store(act* p, F v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
INLINE void act_store(act* p, F v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(v)); }
INLINE F act_round(F v) { return widen(narrow(v)); }
INLINE F act_store_rounded(act* p, F v) {  // stores, and returns what was stored
    const __m256i stored = narrow(v);
    _mm256_storeu_si256((__m256i*)p, stored);
    return widen(stored);
}

// Copies n <= 32 values to a full 64-byte line and fills it with zeros.
INLINE void copy_line(uint32_t* out, const act* in, int n) {
    if (n >= 32)
        _mm512_storeu_si512(out, _mm512_loadu_si512(in));
    else
        _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), in));
}

#else

using act = float;
constexpr int kPerWord = 1;
using Word = __m512;

INLINE Word word_load(const uint32_t* p) { return _mm512_loadu_ps(p); }
INLINE Word word_load_low(const uint32_t* p) { return word_load(p); }
INLINE Word word_broadcast(const uint32_t* p) { return _mm512_set1_ps(*(const float*)p); }
INLINE F dot(F acc, Word a, Word b) { return _mm512_fmadd_ps(a, b, acc); }

INLINE F act_load(const act* p) { return load(p); }
INLINE F act_load(const act* p, int n) { return load(p, n); }
INLINE void act_store(act* p, F v) { store(p, v); }
INLINE void act_store(act* p, F v, int n) { store(p, v, n); }
INLINE F act_round(F v) { return v; }
INLINE F act_store_rounded(act* p, F v) {
    store(p, v);
    return v;
}

INLINE void copy_line(uint32_t* out, const act* in, int n) {
    _mm512_storeu_ps(out, _mm512_maskz_loadu_ps(first(n), in));
}

#endif
