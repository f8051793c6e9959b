// AVX2 vectors of 16 floats, as pairs of registers, for float activations only. The names, their meaning and their
// results, bit for bit, are those of simd_avx512.h. Included inside a level's namespace; see level_*.cpp.

constexpr int W = 16;

struct F {
    __m256 low, high;
};
struct Mask {
    __m256 low, high;
};

INLINE F set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
INLINE F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
INLINE F max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE F min(F a, F b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
INLINE F round_even(F a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, kMode), _mm256_round_ps(a.high, kMode)};
}
INLINE __m256 pow2_of_half(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F pow2(F n) { return {pow2_of_half(n.low), pow2_of_half(n.high)}; }
INLINE F scale_pow2(F v, F n) {
    const F lowest = set1(-126.f), scaled = mul(v, pow2(max(n, lowest)));
    return {_mm256_and_ps(scaled.low, _mm256_cmp_ps(n.low, lowest.low, _CMP_GE_OQ)),
            _mm256_and_ps(scaled.high, _mm256_cmp_ps(n.high, lowest.high, _CMP_GE_OQ))};
}
INLINE float sum(F v) { return sum_of_8(_mm256_add_ps(v.low, v.high)); }
INLINE float max_of(F v) { return max_of_8(_mm256_max_ps(v.low, v.high)); }
INLINE float lane0(F v) { return _mm256_cvtss_f32(v.low); }

INLINE __m256i first_of_half(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE Mask first(int n) {
    return {_mm256_castsi256_ps(first_of_half(n)), _mm256_castsi256_ps(first_of_half(n - 8))};
}
INLINE Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
INLINE Mask between(int lo, int hi) {
    const Mask below = first(lo), end = first(hi);
    return {_mm256_andnot_ps(below.low, end.low), _mm256_andnot_ps(below.high, end.high)};
}
INLINE Mask less(F a, F b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
INLINE Mask greater_equal(F a, F b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ)};
}
INLINE unsigned bits(Mask m) { return unsigned(_mm256_movemask_ps(m.low) | _mm256_movemask_ps(m.high) << 8); }
INLINE F select(Mask m, F yes, F no) {
    return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}
INLINE F keep(Mask m, F v) { return {_mm256_and_ps(m.low, v.low), _mm256_and_ps(m.high, v.high)}; }
INLINE F load(const float* p, int n) {
    return {_mm256_maskload_ps(p, first_of_half(n)), _mm256_maskload_ps(p + 8, first_of_half(n - 8))};
}
INLINE void store(float* p, F v, int n) {
    _mm256_maskstore_ps(p, first_of_half(n), v.low);
    _mm256_maskstore_ps(p + 8, first_of_half(n - 8), v.high);
}
// For each mask of 8 lanes: the chosen lanes in order.
struct ChosenLanes {
    uint8_t lanes[256][8];
    constexpr ChosenLanes() : lanes() {
        for (int mask = 0; mask < 256; ++mask)
            for (int lane = 0, n = 0; lane < 8; ++lane)
                if (mask >> lane & 1) lanes[mask][n++] = uint8_t(lane);
    }
};
constexpr ChosenLanes kChosenLanes;
INLINE int compress_half(float* p, __m256 v, unsigned mask) {
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kChosenLanes.lanes[mask]));
    _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(v, lanes));
    return __builtin_popcount(mask);
}
INLINE int compress(float* p, F v, Mask m) {
    const int n = compress_half(p, v.low, unsigned(_mm256_movemask_ps(m.low)));
    return n + compress_half(p + n, v.high, unsigned(_mm256_movemask_ps(m.high)));
}
INLINE double sum_double(F v) {
    const __m256d first = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v.low)),
                                        _mm256_cvtps_pd(_mm256_castps256_ps128(v.high)));
    const __m256d second = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(v.low, 1)),
                                         _mm256_cvtps_pd(_mm256_extractf128_ps(v.high, 1)));
    return sum_of_4(_mm256_add_pd(first, second));
}

// 16-bit values in memory

INLINE F load_float16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE F load_bfloat16(const uint16_t* p) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
INLINE __m256 bfloat16_of_8_pairs(__m256i v, int which) {
    v = which ? _mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))) : _mm256_slli_epi32(v, 16);
    return _mm256_castsi256_ps(v);
}
INLINE F bfloat16_of_pairs(const uint32_t* p, int which) {
    return {bfloat16_of_8_pairs(_mm256_loadu_si256((const __m256i*)p), which),
            bfloat16_of_8_pairs(_mm256_loadu_si256((const __m256i*)(p + 8)), which)};
}

// Integers of 32 bits

struct I {
    __m256i low, high;
};

INLINE I int_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I int_set1(int v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
INLINE I int_load(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE I int_add(I a, I b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
INLINE I int_sub(I a, I b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
INLINE I int_and(I a, I b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
INLINE I int_max(I a, I b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
INLINE I shift_right_8(I a) { return {_mm256_srli_epi32(a.low, 8), _mm256_srli_epi32(a.high, 8)}; }
INLINE I shift_right_2(I a) { return {_mm256_srli_epi32(a.low, 2), _mm256_srli_epi32(a.high, 2)}; }
INLINE I shift_right_4(I a) { return {_mm256_srli_epi32(a.low, 4), _mm256_srli_epi32(a.high, 4)}; }
INLINE I add_ones(I counts, Mask m) {
    return {_mm256_sub_epi32(counts.low, _mm256_castps_si256(m.low)),
            _mm256_sub_epi32(counts.high, _mm256_castps_si256(m.high))};
}
INLINE int int_sum(I v) { return int_sum_of_8(_mm256_add_epi32(v.low, v.high)); }
INLINE int int_max_of(I v) { return int_max_of_8(_mm256_max_epi32(v.low, v.high)); }
INLINE I bits_of(F v) { return {_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
INLINE I round_to_int(F v) { return {_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)}; }
INLINE F to_float(I v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
INLINE F float_of_uint4(I v) { return to_float(int_and(v, int_set1(15))); }
INLINE F float_of_uint8(I v) { return to_float(int_and(v, int_set1(255))); }
INLINE F float_of_int8(I v) {
    return to_float({_mm256_srai_epi32(_mm256_slli_epi32(v.low, 24), 24),
                     _mm256_srai_epi32(_mm256_slli_epi32(v.high, 24), 24)});
}
INLINE F float_of_bits(I v) { return {_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)}; }
INLINE __m256 float_of_table_half(__m256i v, F values) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(v, 28));  // its sign is the highest bit of the code
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.low, v), _mm256_permutevar8x32_ps(values.high, v), upper);
}
INLINE F float_of_table(I v, F values) {
    return {float_of_table_half(v.low, values), float_of_table_half(v.high, values)};
}
INLINE __m256 float_of_e2m1_half(__m256i v) {
    const __m256 values = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(8)), 28);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(values, v), _mm256_castsi256_ps(sign));
}
INLINE F float_of_e2m1(I v) { return {float_of_e2m1_half(v.low), float_of_e2m1_half(v.high)}; }
INLINE __m256 float_of_e4m3_half(__m256i v) {
    const __m256i number = _mm256_srai_epi32(_mm256_slli_epi32(v, 24), 4);
    const __m256i bits = _mm256_and_si256(number, _mm256_set1_epi32(int(0x87f00000)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}
INLINE F float_of_e4m3(I v) { return {float_of_e4m3_half(v.low), float_of_e4m3_half(v.high)}; }
INLINE __m256i int16_of(I v) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), _MM_SHUFFLE(3, 1, 2, 0));
}
INLINE I int_broadcast(const uint32_t* p) {
    const __m256i v = _mm256_set1_epi32(int(*p));
    return {v, v};
}
INLINE __m256i twice_8_uint16(const void* p) {
    const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_or_si256(v, _mm256_slli_epi32(v, 16));
}
INLINE I twice_uint16(const void* p) { return {twice_8_uint16(p), twice_8_uint16((const char*)p + 16)}; }
INLINE I add_int16(I a, I b) { return {_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)}; }
INLINE I dot_int16(I a, I b) { return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)}; }
INLINE I dot_int8(I a, I b) { return {_mm256_maddubs_epi16(a.low, b.low), _mm256_maddubs_epi16(a.high, b.high)}; }
INLINE I odd_bytes(I v) { return {_mm256_srli_epi16(v.low, 8), _mm256_srli_epi16(v.high, 8)}; }

using act = float;
constexpr int kPerWord = 1;
using Word = F;

INLINE Word word_load(const uint32_t* p) { return load((const float*)p); }
INLINE Word word_low(Word v) { return v; }
INLINE void word_store(uint32_t* p, Word v) { store((float*)p, v); }
INLINE Word word_broadcast(const uint32_t* p) {
    const __m256 v = _mm256_broadcast_ss((const float*)p);
    return {v, v};
}
INLINE F dot(F acc, Word a, Word b) { return fma(a, b, acc); }

INLINE F act_load(const act* p) { return load(p); }
INLINE F act_load(const act* p, int n) { return load(p, n); }
INLINE void act_store(act* p, F v) { store(p, v); }
INLINE void act_store(act* p, F v, int n) { store(p, v, n); }
INLINE F act_round(F v) { return v; }
INLINE F act_store_rounded(act* p, F v) {
    store(p, v);
    return v;
}

INLINE void copy_line(uint32_t* out, const act* in, int n) { store((float*)out, load(in, n)); }
