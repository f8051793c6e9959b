// AVX-512 vectors of 16 floats. Included inside a level's namespace; see level_*.cpp.
//
// Every function has the same result, bit for bit, as the one in simd_avx2.h, so that all levels with float activations
// compute the same values. Reductions combine lane i with lane i + 8 first, and continue as in simd_reduce.h.
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
INLINE F scale_pow2(F v, F n) {  // v * 2^n for whole n in [-126, 0]; 0 for n below
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.f), _CMP_GE_OQ), v, n);
}
INLINE float sum(F v) {
    return sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
INLINE float max_of(F v) {
    return max_of_8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
INLINE float lane0(F v) { return _mm512_cvtss_f32(v); }

INLINE Mask first(int n) { return n >= W ? Mask(0xffff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1); }
INLINE Mask between(int lo, int hi) { return first(hi) & Mask(~first(lo)); }  // lanes lo..hi-1
INLINE Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE Mask greater_equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE Mask both(Mask a, Mask b) { return a & b; }
INLINE unsigned bits(Mask m) { return m; }
INLINE F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
INLINE F keep(Mask m, F v) { return _mm512_maskz_mov_ps(m, v); }  // zero in the other lanes
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
    const __m512d both = _mm512_add_pd(low, high);
    return sum_of_4(_mm256_add_pd(_mm512_castpd512_pd256(both), _mm512_extractf64x4_pd(both, 1)));
}

// 16-bit values in memory

INLINE F load_float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F load_bfloat16(const uint16_t* p) {
    const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
}
// The first or the second value of each pair.
INLINE F bfloat16_of_pairs(const uint32_t* p, int which) {
    const __m512i v = _mm512_loadu_si512(p);
    return _mm512_castsi512_ps(which ? _mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000)))
                                     : _mm512_slli_epi32(v, 16));
}

// Integers of 32 bits

using I = __m512i;

INLINE I int_zero() { return _mm512_setzero_si512(); }
INLINE I int_set1(int v) { return _mm512_set1_epi32(v); }
INLINE I int_load(const void* p) { return _mm512_loadu_si512(p); }
INLINE I int_add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I int_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I int_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I int_max(I a, I b) { return _mm512_max_epi32(a, b); }
INLINE I shift_right_2(I a) { return _mm512_srli_epi32(a, 2); }
INLINE I shift_right_4(I a) { return _mm512_srli_epi32(a, 4); }
INLINE I shift_right_8(I a) { return _mm512_srli_epi32(a, 8); }
INLINE I add_ones(I counts, Mask m) { return _mm512_mask_add_epi32(counts, m, counts, _mm512_set1_epi32(1)); }
INLINE int int_sum(I v) {
    return int_sum_of_8(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
}
INLINE int int_max_of(I v) {
    return int_max_of_8(_mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
}
INLINE I bits_of(F v) { return _mm512_castps_si512(v); }
INLINE I round_to_int(F v) { return _mm512_cvtps_epi32(v); }  // to even
INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
INLINE F float_of_bits(I v) { return _mm512_castsi512_ps(v); }
// The values of the codes in the lowest 4 or 8 bits.
INLINE F float_of_e2m1(I v) {
    const F values = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f,
                                    -6.f);
    return _mm512_permutexvar_ps(v, values);
}
INLINE F float_of_table(I v, F values) { return _mm512_permutexvar_ps(v, values); }
INLINE F float_of_uint4(I v) {
    const F values = _mm512_setr_ps(0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, 8.f, 9.f, 10.f, 11.f, 12.f, 13.f, 14.f, 15.f);
    return _mm512_permutexvar_ps(v, values);
}
INLINE F float_of_uint8(I v) { return to_float(int_and(v, int_set1(255))); }
INLINE F float_of_int8(I v) { return to_float(_mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24)); }
INLINE F float_of_e4m3(I v) {  // exponent and mantissa in the place of those of a float, whose exponent is less by 120
    const I number = _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 4);
    return mul(float_of_bits(int_and(number, int_set1(int(0x87f00000)))), set1(0x1p120f));
}
INLINE __m256i int16_of(I v) { return _mm512_cvtepi32_epi16(v); }
INLINE I int_broadcast(const uint32_t* p) { return _mm512_set1_epi32(int(*p)); }
INLINE I load_uint16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE I twice_uint16(const void* p) {  // each value of 16 bits in both halves of 32 bits
    const I v = load_uint16(p);
    return _mm512_or_si512(v, _mm512_slli_epi32(v, 16));
}
#if defined(LEVEL_VNNI)
// Adds the products of four unsigned bytes of a and four signed bytes of b to each sum.
INLINE I add_dot_int8(I sums, I a, I b) { return _mm512_dpbusd_epi32(sums, a, b); }
// Adds the two products of 16-bit integers to each sum.
INLINE I add_dot_int16(I sums, I a, I b) { return _mm512_dpwssd_epi32(sums, a, b); }
#else
INLINE I add_int16(I a, I b) { return _mm512_add_epi16(a, b); }
INLINE I dot_int16(I a, I b) { return _mm512_madd_epi16(a, b); }  // sums of two products of 16-bit integers
INLINE I dot_int8(I a, I b) { return _mm512_maddubs_epi16(a, b); }  // of unsigned and signed bytes, to 16 bits
INLINE I odd_bytes(I v) { return _mm512_srli_epi16(v, 8); }         // as unsigned 16-bit integers
#endif

#ifdef ACT_BF16

using act = uint16_t;
constexpr int kPerWord = 2;
using Word = __m512i;

INLINE Word word_load(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE Word word_low(Word v) {  // the first value of each pair, zero for the second
    return _mm512_and_si512(v, _mm512_set1_epi32(0xffff));
}
INLINE void word_store(uint32_t* p, Word v) { _mm512_storeu_si512(p, v); }
INLINE Word word_of(F first, F second) {  // pairs of values, rounded
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                            21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(places, halves);
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
INLINE Word word_low(Word v) { return v; }
INLINE void word_store(uint32_t* p, Word v) { _mm512_storeu_ps(p, v); }
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
