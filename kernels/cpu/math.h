// exp and what rests on it. Included inside a level's namespace; see level_*.cpp.

// e^v to about one unit in the last place for v in [-87.3, 88.3], and exactly 1 at 0; smaller v give 0, larger ones are
// clamped. NaN gives 0, so that a broken logit cannot be drawn.
INLINE F exp(F v) {
    const F lowest = set1(-87.3f);
    const Mask counts = greater_equal(v, lowest);
    v = min(max(v, lowest), set1(88.3f));
    const F n = round_even(mul(v, set1(1.44269504088896341f)));
    F r = fma(n, set1(-0.693359375f), v);  // ln 2 in two parts, the first of which multiplies exactly
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

INLINE F silu(F v) { return div(v, add(set1(1.f), exp(sub(zero(), v)))); }
