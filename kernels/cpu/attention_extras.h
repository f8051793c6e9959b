// Soft caps and sinks of attention, which some models have. Included inside a level's namespace; see level_*.cpp.

// Replaces the scores [from, to) of a row by their tanh. input_scale: of the scores inside tanh. scales: of the keys, or
// null.
INLINE void cap_scores(int from, int to, const float* scales, float input_scale, float* scores) {
    const F scale = set1(input_scale);
    for (int i = from; i < to; i += W) {
        const F v = mul(load(scores + i), scale);
        store(scores + i, tanh(scales ? mul(v, load(scales + i)) : v));
    }
}

// Returns the factor of the weighted values of a row: 1 / (sum of the weights), with the sink of the head in the sum.
// largest, sink: the largest score and the sink in base 2; total: the sum of the weights relative to the largest.
INLINE F factor_with_sink(float largest, float total, float sink) {
    const F base = max(set1(largest), set1(sink)), keep = exp2_negative(sub(set1(largest), base));
    return div(keep, add(mul(set1(total), keep), exp2_negative(sub(set1(sink), base))));
}
