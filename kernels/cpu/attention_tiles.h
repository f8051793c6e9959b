// The inner loops of paged attention: scores of some rows against 32 keys, and weighted sums of values.
// Included inside a level's namespace; see level_*.cpp and attention.h.

using quire::kChunkKeys;

constexpr int kChunkGroups = kChunkKeys / 16;
constexpr int kWeighRows = W == 16 ? 6 : 2;

// The memory of the next chunk, asked for in even shares while this chunk is computed: its pieces lie all over the
// cache, where no hardware prefetcher finds them. Into the second level, because the few miss buffers of the first
// would limit the rate.
struct Lookahead {
    const uint32_t* pieces[kChunkGroups * 2];
    size_t count = 0, words = 0, share = 0, piece = 0, word = 0;

    void advance() {
        for (size_t n = 0; n < share && piece < count; ++n) {
            _mm_prefetch((const char*)(pieces[piece] + word), _MM_HINT_T1);
            if ((word += 16) >= words) word = 0, ++piece;
        }
    }
};

// Scores of the 16 keys at b0 and the 16 at b1.
template <int MR>
void score_tile(const uint32_t* rows, const uint32_t* b0, const uint32_t* b1, size_t words, float* out) {
    F acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    multiply<MR, 16, kFetchNothing>(rows, b0, b1, words, nullptr, acc);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) store(out + r * kChunkKeys + c * W, acc[r][c]);
}

// out[r][0 .. NS * W) = sum over words of the chunk of weight[r] . value, from word `begin` to `end`.
template <int MR, int NS>
void weigh_tile(const uint32_t* weights, const uint32_t* const* units, Lookahead& ahead, int per_unit, int begin,
                int end, bool odd, size_t d, float* out) {
    F acc[MR][NS];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) acc[r][c] = zero();
    const auto step = [&](const uint32_t* w, const uint32_t* values, bool low) {
        Word b[NS];
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) b[c] = low ? word_load_low(values + c * W) : word_load(values + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const Word x = word_broadcast(w + r * 16);
#pragma GCC unroll 8
            for (int c = 0; c < NS; ++c) acc[r][c] = dot(acc[r][c], x, b[c]);
        }
    };
    const int full = end - odd;
    for (int first = begin; first < end; first += per_unit) {
        const uint32_t* w = weights + first / 16 * MR * 16 + first % 16;
        const uint32_t* values = units[first / per_unit];
        const int stop = full - first < per_unit ? full - first : per_unit;
        ahead.advance();
        for (int i = 0; i < stop; ++i, values += d) step(w + i, values, false);
        if (stop < per_unit && odd) step(w + stop, values, true);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) store(out + r * d + c * W, acc[r][c]);
}

using ScoreTile = void (*)(const uint32_t*, const uint32_t*, const uint32_t*, size_t, float*);
using WeighTile = void (*)(const uint32_t*, const uint32_t* const*, Lookahead&, int, int, int, bool, size_t, float*);
#define WEIGH(n) {weigh_tile<n, 1>, weigh_tile<n, 2>, weigh_tile<n, 4>}
#if defined(LEVEL_AVX2)
constexpr ScoreTile kScoreTiles[] = {nullptr, score_tile<1>, score_tile<2>, score_tile<3>};
constexpr WeighTile kWeighTiles[][3] = {{}, WEIGH(1), WEIGH(2)};
#else
constexpr ScoreTile kScoreTiles[] = {nullptr,        score_tile<1>,  score_tile<2>,  score_tile<3>, score_tile<4>,
                                     score_tile<5>,  score_tile<6>,  score_tile<7>,  score_tile<8>, score_tile<9>,
                                     score_tile<10>, score_tile<11>, score_tile<12>};
constexpr WeighTile kWeighTiles[][3] = {{}, WEIGH(1), WEIGH(2), WEIGH(3), WEIGH(4), WEIGH(5), WEIGH(6)};
#endif
#undef WEIGH
