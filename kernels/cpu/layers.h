// All layers of a decoder in one call: some hundred operations without a return to Python. The operations, their order
// and their bits are those of kernels/layers.py. Included inside a level's namespace; see level_*.cpp.

// `_Layer` in stack.py has the same fields in the same order.
struct Layer {
    const act* input_norm;
    Weights qkv;
    const act *q_norm, *k_norm;
    char *k_cache, *v_cache;
    Weights o;
    const act* mlp_norm;
    Weights gate_up, down;
    int64_t window;
    const MoE* moe;  // or null: gate_up and down are the MLP
    const act *post_attention_norm, *post_mlp_norm;  // of the outputs of attention and MLP, or null
    const float* cos_sin;
    const float* sinks;  // or null
    int64_t gate;        // Output of gate_up
};

// `_Step` in stack.py has the same fields in the same order.
struct Step {
    const Layer* layers;
    const act* final_norm;
    act* residual;  // [T, hidden], overwritten
    act* out;       // [R, hidden]
    const int32_t* positions;
    const void* slots;
    const int32_t *block_tables, *seq_lens, *query_start;
    const int64_t* rows;  // [R], the tokens whose output is wanted
    int64_t layer_count, tokens, row_count, sequences, table_width, max_position, block_count, wide_slots;
    int64_t hidden, intermediate, heads, kv_heads, head_dim, block_size, kv_type;
    double eps, scale, softcap;  // softcap: of the scores, 0 for none
    quire::Ranks* ranks;  // the ranks that share the layers, or null
    const Adapters* adapters;  // of the tokens, or null if no token uses one
    const int32_t* interrupt;  // another thread sets it to end the call before the next layer; or null
};

// Results other than 0, read in stack.py: 1 + the index of an invalid token, sequence (plus kBadSequence) or wanted row
// (plus kBadRow), or kGivenUp, or kInterrupted.
constexpr int64_t kBadSequence = int64_t(1) << 40, kBadRow = int64_t(2) << 40;
constexpr int64_t kGivenUp = (int64_t(3) << 40) + 1, kInterrupted = (int64_t(4) << 40) + 1;

INLINE void gather_rows(const Step& s, const act* from, size_t width, act* to) {
    for (int64_t r = 0; r < s.row_count; ++r) memcpy(to + r * width, from + s.rows[r] * width, width * sizeof(act));
}

INLINE int64_t run_layers(const Step& s) {
    const size_t t = size_t(s.tokens), hidden = size_t(s.hidden), inner = size_t(s.intermediate);
    const size_t q_width = size_t(s.heads * s.head_dim), qkv_width = size_t((s.heads + 2 * s.kv_heads) * s.head_dim);
    const float eps = float(s.eps), softcap = float(s.softcap);
    for (int64_t r = 0; r < s.row_count; ++r)
        if (s.rows[r] < 0 || s.rows[r] >= s.tokens) return kBadRow + 1 + r;

    const size_t most = t > size_t(s.row_count) ? t : size_t(s.row_count);
    const size_t sizes[] = {hidden, qkv_width, q_width, q_width, inner, hidden, s.adapters ? gate_up_width(inner) : 0};
    act* buffers[7];
    size_t total = 0;
    for (size_t width : sizes) total += (most * width + 31) / 32 * 32;
    act* memory = (act*)quire::scratch(quire::kActivations, total * sizeof(act));
    for (int i = 0; i < 7; ++i) buffers[i] = memory, memory += (most * sizes[i] + 31) / 32 * 32;
    act *x = buffers[0], *qkv = buffers[1], *q = buffers[2], *mixed = buffers[3], *mlp = buffers[4];

    quire::AttentionPlan plan{};
    int64_t planned = -1;
    rms_norm(s.residual, nullptr, s.layers[0].input_norm, eps, t, hidden, x);
    for (int64_t i = 0; i < s.layer_count; ++i) {
        if (s.interrupt && __atomic_load_n(s.interrupt, __ATOMIC_RELAXED)) return kInterrupted;
        const Layer& layer = s.layers[i];
        const bool last = i + 1 == s.layer_count;
        linear({x, t, hidden, layer.qkv, qkv_width, qkv, kAct});
        if (s.adapters) adapt(s.adapters, s.adapters->tokens, size_t(i), kAdaptQkv, x, hidden, qkv, qkv_width);

        const Attention attention{
            {s.block_tables, s.seq_lens, s.query_start, size_t(s.table_width), size_t(s.sequences), t,
             size_t(s.block_count), int(s.heads), int(s.kv_heads), int(s.head_dim), int(s.block_size),
             int(layer.window)},
            q, layer.k_cache, layer.v_cache, mixed, softcap != 0.f ? softcap : float(s.scale), KvType(s.kv_type),
            softcap != 0.f ? float(s.scale) / softcap : 0.f, layer.sinks};
        if (planned != layer.window) {
            if (const int64_t bad = quire::plan_attention(attention.shape, &plan)) return kBadSequence + bad;
            planned = layer.window;
        }
        const Rope rope{qkv, s.positions, layer.cos_sin, s.slots, layer.k_cache, layer.v_cache, q, layer.q_norm,
                        layer.k_norm, t, size_t(s.max_position), size_t(s.block_count), size_t(s.block_size),
                        size_t(s.heads), size_t(s.kv_heads), size_t(s.head_dim), eps, int(s.wide_slots), KvType(s.kv_type)};
        if (const int64_t bad = rope_and_cache(rope)) return bad;
        if (last && s.row_count == 0) return 0;
        paged_attention(attention, plan);

        // After the last attention no token needs another one: only the wanted rows go on.
        const size_t rows = last ? size_t(s.row_count) : t;
        act *residual = s.residual, *attended = mixed;
        if (last) {
            attended = q, residual = buffers[5];
            gather_rows(s, mixed, q_width, attended);
            gather_rows(s, s.residual, hidden, residual);
        }
        linear({attended, rows, q_width, layer.o, hidden, x, kAct});
        const AdapterRows* adapted = s.adapters ? last ? &s.adapters->wanted : &s.adapters->tokens : nullptr;
        if (adapted) adapt(s.adapters, *adapted, size_t(i), kAdaptO, attended, q_width, x, hidden);
        if (s.ranks && !quire::all_reduce(s.ranks, x, rows * hidden, sizeof(act))) return kGivenUp;
        if (layer.post_attention_norm) rms_norm(x, nullptr, layer.post_attention_norm, eps, rows, hidden, x);
        rms_norm(x, residual, layer.mlp_norm, eps, rows, hidden, x);
        if (layer.moe) {
            moe_layer(*layer.moe, x, rows, hidden, x);
        } else if (adapted) {
            linear({x, rows, hidden, layer.gate_up, gate_up_width(inner), buffers[6], kAct});
            adapt_gate_up(s.adapters, *adapted, size_t(i), int(layer.gate), x, hidden, buffers[6], rows, inner, mlp);
        } else {
            linear({x, rows, hidden, layer.gate_up, inner, mlp, int(layer.gate)});
        }
        if (!layer.moe) linear({mlp, rows, inner, layer.down, hidden, x, kAct});
        if (adapted && !layer.moe) adapt(s.adapters, *adapted, size_t(i), kAdaptDown, mlp, inner, x, hidden);
        if (s.ranks && !quire::all_reduce(s.ranks, x, rows * hidden, sizeof(act))) return kGivenUp;
        if (layer.post_mlp_norm) rms_norm(x, nullptr, layer.post_mlp_norm, eps, rows, hidden, x);
        rms_norm(x, residual, last ? s.final_norm : s.layers[i + 1].input_norm, eps, rows, hidden, last ? s.out : x);
    }
    return 0;
}
