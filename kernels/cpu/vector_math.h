// Exponential functions of vectors. Included inside a level's namespace; see level_*.cpp.

// e^v with an error of about one unit in the last place for v in [-87.3, 88.3]; exactly 1 at 0. Smaller v give 0,
// larger v are clamped. NaN gives 0, so that sampling never draws an id with an invalid logit.
INLINE F exp(F v) {
    const F lowest = set1(-87.3f);
    const Mask counts = greater_equal(v, lowest);
    v = min(max(v, lowest), set1(88.3f));
    const F n = round_even(mul(v, set1(1.44269504088896341f)));
    F r = fma(n, set1(-0.693359375f), v);  // ln 2 in two parts; products with the first part are exact
    r = fma(n, set1(2.12194440e-4f), r);
    // Taylor coefficients to r^7; |r| <= ln(2)/2 makes the rest 4e-9 of the result.
    F p = set1(1.f / 5040);
    p = fma(p, r, set1(1.f / 720));
    p = fma(p, r, set1(1.f / 120));
    p = fma(p, r, set1(1.f / 24));
    p = fma(p, r, set1(1.f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.f));
    p = fma(p, r, set1(1.f));
    return select(counts, mul(p, pow2(n)), zero());
}

// 2^v for v <= 0: exactly 1 at 0; 0 below the range of floats, for minus infinity and for NaN. Taylor series of 2^r on
// |r| <= 1/2. If the result becomes a bf16 value, the error with three terms less is still only 2^-15.
INLINE F exp2_negative(F v) {
    v = max(v, set1(-200.f));
    const F n = round_even(v), r = sub(v, n);
    F p = kPerWord == 2 ? set1(9.6181291e-3f) : set1(1.5252734e-5f);
    if (kPerWord == 1) {
        p = fma(p, r, set1(1.5403530e-4f));
        p = fma(p, r, set1(1.3333558e-3f));
        p = fma(p, r, set1(9.6181291e-3f));
    }
    p = fma(p, r, set1(5.5504109e-2f));
    p = fma(p, r, set1(2.4022651e-1f));
    p = fma(p, r, set1(6.9314718e-1f));
    p = fma(p, r, set1(1.f));
    return scale_pow2(p, n);
}

// tanh with an error of about one unit in the last place. NaN gives -1.
INLINE F tanh(F v) {
    // A polynomial that was fitted on |v| <= 0.6, with an error of 5e-9 of the result, and an exponential beyond.
    const F z = mul(v, v);
    F p = set1(2.37350166e-3f);
    p = fma(p, z, set1(-8.41254089e-3f));
    p = fma(p, z, set1(2.17891019e-2f));
    p = fma(p, z, set1(-5.39616533e-2f));
    p = fma(p, z, set1(1.33333132e-1f));
    p = fma(p, z, set1(-3.33333343e-1f));
    const F near_zero = fma(mul(p, z), v, v), one = set1(1.f);
    const F beyond = sub(one, div(set1(2.f), add(exp(add(v, v)), one)));
    return select(less(max(v, sub(zero(), v)), set1(0.6f)), near_zero, beyond);
}

INLINE F silu(F v) { return div(v, add(set1(1.f), exp(sub(zero(), v)))); }

// GELU with the approximation by tanh.
INLINE F gelu_tanh(F v) {
    const F cube = mul(mul(v, v), v);
    const F inner = mul(set1(0.79788456080286536f), add(v, mul(set1(0.044715f), cube)));
    return mul(mul(set1(0.5f), v), add(set1(1.f), tanh(inner)));
}

// The gated activation of gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate), with the gate at most 7 and up in -7..7.
INLINE F clamped_gate(F gate, F up) {
    const F limit = set1(7.f), one = set1(1.f);
    gate = min(gate, limit);
    up = min(max(up, set1(-7.f)), limit);
    return mul(add(up, one), div(gate, add(one, exp(mul(gate, set1(-1.702f))))));
}
