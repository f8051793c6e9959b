// Mixtures of experts: the choice of experts for each row, and the products of grouped_linear.h over the rows, sorted by
// expert. Included inside a level's namespace; see level_*.cpp.

// `_MoE` in moe.py has the same fields in the same order.
struct MoE {
    Weights router;                 // [count, hidden]
    const Weights *gate_up, *down;  // [count]: of each expert; all have the same formats
    int64_t count, top_k, inner;
    int64_t normalised;  // weights are the softmax of the chosen logits, not of all
    int64_t output;      // Output of the first product
    const float* scales;  // [count], factors of the weights of chosen experts; or null
};

constexpr size_t kExpertTokens = 1024;  // of one pass, which bounds the memory of the sorted rows

INLINE float expert_exp(float v) {
    alignas(64) float lanes[W];
    store(lanes, exp(set1(v)));
    return lanes[0];
}

// Chooses the experts of a row by its logits, the largest first and of equals the lower expert, and their weights. NaN
// counts as minus infinity. Overwrites the logits.
INLINE void choose_experts(const MoE& moe, float* logits, int32_t* ids, float* weights) {
    const float lowest = -__builtin_inff();
    const size_t count = size_t(moe.count), top_k = size_t(moe.top_k);
    float largest = lowest, all = 0.f;
    for (size_t e = 0; e < count; ++e) {
        if (!(logits[e] == logits[e])) logits[e] = lowest;
        if (logits[e] > largest) largest = logits[e];
    }
    if (!moe.normalised)
        for (size_t e = 0; e < count; ++e) all += expert_exp(logits[e] - largest);
    float sum = 0.f;
    for (size_t k = 0; k < top_k; ++k) {
        int64_t best = -1;
        for (size_t e = 0; e < count; ++e)
            if (logits[e] == logits[e] && (best < 0 || logits[e] > logits[best])) best = int64_t(e);
        ids[k] = int32_t(best);
        weights[k] = expert_exp(logits[best] - largest);
        sum += weights[k];
        logits[best] = __builtin_nanf("");  // taken
    }
    const float total = moe.normalised ? sum : all;
    for (size_t k = 0; k < top_k; ++k) {
        weights[k] /= total;
        if (moe.scales) weights[k] *= moe.scales[ids[k]];
    }
}

// Computes `rows` rows of x [rows, hidden] into out, which may be x. router_input [rows, hidden] may be x, too.
INLINE void experts_pass(const MoE& moe, const act* router_input, const act* x, size_t rows, size_t hidden,
                         act* out) {
    const size_t count = size_t(moe.count), top_k = size_t(moe.top_k), inner = size_t(moe.inner), pairs = rows * top_k;
    const auto line = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
    const size_t sizes[] = {line(rows * count * sizeof(act)), line(rows * count * 4), line(pairs * 4),
                            line(pairs * 4),                  line(pairs * 4),        line((count + 1) * 4),
                            line(pairs * hidden * sizeof(act)), line(pairs * inner * sizeof(act))};
    size_t total = 0;
    for (size_t size : sizes) total += size;
    char* memory = (char*)quire::scratch(quire::kExperts, total);
    char* parts[8];
    for (int i = 0; i < 8; ++i) parts[i] = memory, memory += sizes[i];
    act *logits = (act*)parts[0], *sorted = (act*)parts[6], *mlp = (act*)parts[7];
    float *wide = (float*)parts[1], *weights = (float*)parts[3];
    int32_t *ids = (int32_t*)parts[2], *place = (int32_t*)parts[4], *starts = (int32_t*)parts[5];

    linear({router_input, rows, hidden, moe.router, count, logits, kAct});
    quire::parallel_ranges(rows, 1 + (1 << 10) / count, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            float* own = wide + row * count;
            for (size_t e = 0; e < count; e += W) {
                const int left = count - e < size_t(W) ? int(count - e) : W;
                alignas(64) float lanes[W];
                store(lanes, act_load(logits + row * count + e, left));
                for (int i = 0; i < left; ++i) own[e + size_t(i)] = lanes[i];
            }
            choose_experts(moe, own, ids + row * top_k, weights + row * top_k);
        }
    });
    for (size_t e = 0; e <= count; ++e) starts[e] = 0;
    for (size_t i = 0; i < pairs; ++i) ++starts[ids[i] + 1];
    for (size_t e = 0; e < count; ++e) starts[e + 1] += starts[e];
    for (size_t i = 0; i < pairs; ++i) place[i] = starts[ids[i]]++;
    for (size_t e = count; e > 0; --e) starts[e] = starts[e - 1];  // each start had moved to the end of its rows
    starts[0] = 0;
    quire::parallel_ranges(rows, 1 + (8 << 10) / hidden, [&](size_t begin, size_t end) {
        for (size_t i = begin * top_k; i < end * top_k; ++i)
            memcpy(sorted + size_t(place[i]) * hidden, x + i / top_k * hidden, hidden * sizeof(act));
    });

    const ExpertRows experts{starts, count};
    grouped_linear({sorted, experts, hidden, inner, moe.gate_up, mlp, int(moe.output)});
    grouped_linear({mlp, experts, inner, hidden, moe.down, sorted, kAct});
    quire::parallel_ranges(rows, 1 + (8 << 10) / hidden, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row)
            for (size_t i = 0; i < hidden; i += W) {
                const int left = hidden - i < size_t(W) ? int(hidden - i) : W;
                F sum = zero();
                for (size_t k = 0; k < top_k; ++k) {
                    const act* from = sorted + size_t(place[row * top_k + k]) * hidden + i;
                    sum = add(sum, mul(act_load(from, left), set1(weights[row * top_k + k])));
                }
                act_store(out + row * hidden + i, sum, left);
            }
    });
}

INLINE void moe_layer(const MoE& moe, const act* router_input, const act* x, size_t rows, size_t hidden, act* out) {
    for (size_t first = 0; first < rows; first += kExpertTokens) {
        const size_t count = rows - first < kExpertTokens ? rows - first : kExpertTokens;
        const size_t at = first * hidden;
        experts_pass(moe, router_input + at, x + at, count, hidden, out + at);
    }
}
