// AVX2 vectors of 8 floats, for float activations only. The names and their meaning are those of simd_avx512.h.
// Included inside a level's namespace; see level_*.cpp.

constexpr int W = 8;
using F = __m256;
using Mask = __m256;

INLINE F set1(float v) { return _mm256_set1_ps(v); }
INLINE F zero() { return _mm256_setzero_ps(); }
INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
INLINE F round_even(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F pow2(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F scale_pow2(F v, F n) {  // v * 2^n for whole n <= 0, or 0
    const F in_range = _mm256_cmp_ps(n, set1(-126.f), _CMP_GE_OQ);
    return _mm256_and_ps(mul(v, pow2(max(n, set1(-126.f)))), in_range);
}
INLINE float sum(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float max_of(F v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

INLINE float lane0(F v) { return _mm256_cvtss_f32(v); }

INLINE __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }
INLINE Mask first(int n) { return _mm256_castsi256_ps(first_lanes(n)); }
INLINE Mask between(int lo, int hi) { return _mm256_andnot_ps(first(lo), first(hi)); }
INLINE Mask less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
INLINE Mask greater_equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
INLINE unsigned bits(Mask m) { return unsigned(_mm256_movemask_ps(m)); }
INLINE F select(Mask m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
INLINE F load(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
INLINE void store(float* p, F v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
INLINE int compress(float* p, F v, Mask m) {
    float values[W];
    store(values, v);
    int n = 0;
    for (unsigned chosen = bits(m); chosen; chosen &= chosen - 1) p[n++] = values[__builtin_ctz(chosen)];
    return n;
}
INLINE double sum_double(F v) {
    const __m256d s = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                                    _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

using act = float;
constexpr int kPerWord = 1;
using Word = __m256;

INLINE Word word_load(const uint32_t* p) { return _mm256_loadu_ps((const float*)p); }
INLINE Word word_load_low(const uint32_t* p) { return word_load(p); }
INLINE Word word_broadcast(const uint32_t* p) { return _mm256_broadcast_ss((const float*)p); }
INLINE F dot(F acc, Word a, Word b) { return _mm256_fmadd_ps(a, b, acc); }

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
    float* line = (float*)out;
    store(line, load(in, n));
    store(line + W, n > W ? load(in + W, n - W) : zero());
}
