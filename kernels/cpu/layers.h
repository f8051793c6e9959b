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
    const MoE* moe;  // or null: gate_up and down are the MLP; with router_norm the layer has both
    const act *post_attention_norm, *post_mlp_norm;  // of the outputs of attention and MLP, or null
    const float* cos_sin;
    const float* sinks;  // or null
    int64_t gate;        // Output of gate_up
    int64_t kv_heads, head_dim;  // of the caches
    int64_t inner;               // of gate_up and down
    int64_t shares_kv;           // the caches are those of an earlier layer, and qkv has queries alone
    const act* v_norm;           // or null
    const act *router_norm, *experts_norm, *mlp_output_norm, *experts_output_norm;  // `ExpertNorms`, or null
    Weights input_gate, input_projection;  // `PerLayerInput`
    const act* input_norm_of_own;          // or null: the layer has no input of its own
    double output_scale;                   // of the residual at the end
    int64_t uses_key_ends;                 // attention sees the keys that key_ends of the step says
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
    const int32_t* key_ends;  // [T], or null
    const int64_t* rows;  // [R], the tokens whose output is wanted
    const act* layer_inputs;  // [T, layers, input_width], or null
    int64_t layer_count, tokens, row_count, sequences, table_width, max_position, block_count, wide_slots;
    int64_t hidden, heads, block_size, kv_type;
    int64_t qkv_width, q_width, inner, input_width;  // the most of all layers
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

// Returns the first of the layers at the end that all share the caches of earlier layers; layer_count without such layers.
INLINE int64_t first_sharing_layer(const Step& s) {
    int64_t first = s.layer_count;
    while (first > 0 && s.layers[first - 1].shares_kv) --first;
    return first;
}

// True if the wanted rows of each sequence are its last tokens, in order. Then layers that write no keys and values need
// no other token. starts [sequences + 1]: where the wanted rows of each sequence start.
INLINE bool are_last_tokens(const Step& s, int32_t* starts) {
    int64_t row = 0;
    starts[0] = 0;
    for (int64_t i = 0; i < s.sequences; ++i) {
        const int64_t begin = s.query_start[i], end = s.query_start[i + 1], first = row;
        while (row < s.row_count && s.rows[row] >= begin && s.rows[row] < end) ++row;
        for (int64_t r = first; r < row; ++r)
            if (s.rows[r] != end - (row - r)) return false;
        starts[i + 1] = int32_t(row);
    }
    return row == s.row_count;
}

INLINE int64_t run_layers(const Step& whole) {
    Step s = whole;
    size_t t = size_t(s.tokens);
    const size_t hidden = size_t(s.hidden), input_width = size_t(s.input_width);
    const float eps = float(s.eps), softcap = float(s.softcap);
    for (int64_t r = 0; r < s.row_count; ++r)
        if (s.rows[r] < 0 || s.rows[r] >= s.tokens) return kBadRow + 1 + r;

    const size_t most = t > size_t(s.row_count) ? t : size_t(s.row_count);
    const size_t most_q = size_t(s.q_width), most_inner = size_t(s.inner > s.input_width ? s.inner : s.input_width);
    bool has_both = false;  // a layer with an MLP and experts
    for (int64_t i = 0; i < s.layer_count; ++i) has_both |= s.layers[i].router_norm != nullptr;
    const size_t sizes[] = {hidden,     size_t(s.qkv_width), most_q, most_q,
                            most_inner, hidden,              s.adapters ? gate_up_width(size_t(s.inner)) : 0,
                            has_both ? hidden : 0, has_both ? hidden : 0};
    constexpr int kBuffers = 9;
    act* buffers[kBuffers];
    size_t total = 0;
    for (size_t width : sizes) total += (most * width + 31) / 32 * 32;
    const size_t wanted_ints = size_t(2 * s.row_count + s.sequences + 1);
    act* memory = (act*)quire::scratch(quire::kActivations, total * sizeof(act) + wanted_ints * sizeof(int32_t));
    for (int i = 0; i < kBuffers; ++i) buffers[i] = memory, memory += (most * sizes[i] + 31) / 32 * 32;
    act *x = buffers[0], *qkv = buffers[1], *q = buffers[2], *mixed = buffers[3], *mlp = buffers[4];

    int32_t *wanted_positions = (int32_t*)memory, *wanted_ends = wanted_positions + s.row_count;
    int32_t* wanted_starts = wanted_ends + s.row_count;
    const int64_t sharing = first_sharing_layer(s);
    bool is_cut = false;  // only the wanted rows are left

    quire::AttentionPlan plan{};
    const Layer* planned = nullptr;
    const int32_t* planned_ends = nullptr;
    // The weights of a norm of layer i for rows: those of the layer, or of their adapters.
    const auto norm_of = [&](int64_t i, OwnNorm which, const act* weight, const AdapterRows* rows) {
        const bool has_own = rows && s.adapters->norms;
        return RowNorm{weight, has_own ? s.adapters->norms : nullptr, has_own ? rows->index : nullptr,
                       size_t(i) * kOwnNorms + which};
    };
    const AdapterRows* all = s.adapters ? &s.adapters->tokens : nullptr;
    rms_norm(s.residual, nullptr, norm_of(0, kInputNorm, s.layers[0].input_norm, all), eps, t, hidden, x);
    for (int64_t i = 0; i < s.layer_count; ++i) {
        if (s.interrupt && __atomic_load_n(s.interrupt, __ATOMIC_RELAXED)) return kInterrupted;
        const Layer& layer = s.layers[i];
        const bool last = i + 1 == s.layer_count;
        if (i == sharing && s.row_count < s.tokens && are_last_tokens(s, wanted_starts)) {
            for (int64_t r = 0; r < s.row_count; ++r) {  // rows move forward: they are in order
                const size_t from = size_t(s.rows[r]);
                wanted_positions[r] = s.positions[from];
                if (s.key_ends) wanted_ends[r] = s.key_ends[from];
                memmove(x + size_t(r) * hidden, x + from * hidden, hidden * sizeof(act));
                memmove(s.residual + size_t(r) * hidden, s.residual + from * hidden, hidden * sizeof(act));
            }
            t = size_t(s.row_count);
            if (s.key_ends) s.key_ends = wanted_ends;
            s.positions = wanted_positions, s.query_start = wanted_starts, s.tokens = s.row_count;
            planned = nullptr, is_cut = true;
            if (t == 0) return 0;
        }
        const AdapterRows* adapted_tokens = s.adapters ? is_cut ? &s.adapters->wanted : &s.adapters->tokens : nullptr;
        const size_t q_width = size_t(s.heads * layer.head_dim), inner = size_t(layer.inner);
        const size_t kv_heads = layer.shares_kv ? 0 : size_t(layer.kv_heads);
        const size_t qkv_width = q_width + 2 * kv_heads * size_t(layer.head_dim);
        linear({x, t, hidden, layer.qkv, qkv_width, qkv, kAct});
        if (adapted_tokens) adapt(s.adapters, *adapted_tokens, size_t(i), kAdaptQkv, x, hidden, qkv, qkv_width);

        const int32_t* key_ends = layer.uses_key_ends ? s.key_ends : nullptr;
        const Attention attention{
            {s.block_tables, s.seq_lens, s.query_start, size_t(s.table_width), size_t(s.sequences), t,
             size_t(s.block_count), int(s.heads), int(layer.kv_heads), int(layer.head_dim), int(s.block_size),
             int(layer.window), key_ends},
            q, layer.k_cache, layer.v_cache, mixed, softcap != 0.f ? softcap : float(s.scale), KvType(s.kv_type),
            softcap != 0.f ? float(s.scale) / softcap : 0.f, layer.sinks};
        if (!planned || planned->window != layer.window || planned->kv_heads != layer.kv_heads ||
            planned->head_dim != layer.head_dim || planned_ends != key_ends) {
            if (const int64_t bad = quire::plan_attention(attention.shape, &plan)) return kBadSequence + bad;
            planned = &layer, planned_ends = key_ends;
        }
        const Rope rope{qkv, s.positions, layer.cos_sin, s.slots, layer.k_cache, layer.v_cache, q,
                        norm_of(i, kQNorm, layer.q_norm, adapted_tokens),
                        norm_of(i, kKNorm, layer.k_norm, adapted_tokens), layer.v_norm, t, size_t(s.max_position),
                        size_t(s.block_count),
                        size_t(s.block_size), size_t(s.heads), kv_heads, size_t(layer.head_dim), eps,
                        int(s.wide_slots), KvType(s.kv_type)};
        if (const int64_t bad = rope_and_cache(rope)) return bad;
        if (last && s.row_count == 0) return 0;
        paged_attention(attention, plan);

        // After the last attention no token needs another one: only the wanted rows go on.
        const size_t rows = last ? size_t(s.row_count) : t;
        act *residual = s.residual, *attended = mixed;
        if (last && !is_cut) {
            attended = q, residual = buffers[5];
            gather_rows(s, mixed, q_width, attended);
            gather_rows(s, s.residual, hidden, residual);
        }
        linear({attended, rows, q_width, layer.o, hidden, x, kAct});
        const AdapterRows* adapted = s.adapters && last ? &s.adapters->wanted : adapted_tokens;
        if (adapted) adapt(s.adapters, *adapted, size_t(i), kAdaptO, attended, q_width, x, hidden);
        if (s.ranks && !quire::all_reduce(s.ranks, x, rows * hidden, sizeof(act))) return kGivenUp;
        if (layer.post_attention_norm)
            rms_norm(x, nullptr, norm_of(i, kPostAttentionNorm, layer.post_attention_norm, adapted), eps, rows, hidden, x);
        rms_norm(x, residual, norm_of(i, kMlpNorm, layer.mlp_norm, adapted), eps, rows, hidden, x);
        const bool has_mlp = !layer.moe || layer.router_norm;
        if (!has_mlp) {
            moe_layer(*layer.moe, x, x, rows, hidden, x);
        } else if (adapted) {
            linear({x, rows, hidden, layer.gate_up, gate_up_width(inner), buffers[6], kAct});
            adapt_gate_up(s.adapters, *adapted, size_t(i), int(layer.gate), x, hidden, buffers[6], rows, inner, mlp);
        } else {
            linear({x, rows, hidden, layer.gate_up, inner, mlp, int(layer.gate)});
        }
        if (has_mlp) linear({mlp, rows, inner, layer.down, hidden, x, kAct});
        if (adapted && has_mlp) adapt(s.adapters, *adapted, size_t(i), kAdaptDown, mlp, inner, x, hidden);
        if (s.ranks && !quire::all_reduce(s.ranks, x, rows * hidden, sizeof(act))) return kGivenUp;
        if (layer.router_norm) {
            act *router_input = buffers[7], *experts = buffers[8];
            rms_norm(residual, nullptr, {layer.router_norm}, eps, rows, hidden, router_input);
            rms_norm(residual, nullptr, {layer.experts_norm}, eps, rows, hidden, experts);
            moe_layer(*layer.moe, router_input, experts, rows, hidden, experts);
            if (s.ranks && !quire::all_reduce(s.ranks, experts, rows * hidden, sizeof(act))) return kGivenUp;
            rms_norm(x, nullptr, {layer.mlp_output_norm}, eps, rows, hidden, x);
            rms_norm(experts, nullptr, {layer.experts_output_norm}, eps, rows, hidden, experts);
            add_rows(experts, x, rows, hidden);
        }
        if (layer.post_mlp_norm)
            rms_norm(x, nullptr, norm_of(i, kPostMlpNorm, layer.post_mlp_norm, adapted), eps, rows, hidden, x);
        if (layer.input_norm_of_own) {
            const act* own = s.layer_inputs + size_t(i) * input_width;
            const size_t stride = size_t(s.layer_count) * input_width;
            add_rows(x, residual, rows, hidden);
            linear({residual, rows, hidden, layer.input_gate, input_width, mlp, kAct});
            if (last || is_cut)
                gelu_mul_rows(mlp, own, stride, rows, input_width, [&](size_t r) { return size_t(s.rows[r]); });
            else
                gelu_mul_rows(mlp, own, stride, rows, input_width, [](size_t r) { return r; });
            linear({mlp, rows, input_width, layer.input_projection, hidden, x, kAct});
            rms_norm(x, nullptr, {layer.input_norm_of_own}, eps, rows, hidden, x);
        }
        // The final norm is the input norm of a layer after the last one.
        const RowNorm next_norm =
            norm_of(i + 1, kInputNorm, last ? s.final_norm : s.layers[i + 1].input_norm, adapted);
        const bool is_scaled = layer.output_scale != 1.0;
        if (is_scaled) {
            add_rows(x, residual, rows, hidden);
            scale_rows(residual, float(layer.output_scale), rows, hidden);
        }
        rms_norm(is_scaled ? residual : x, is_scaled ? nullptr : residual, next_norm, eps, rows, hidden,
                 last ? s.out : x);
    }
    return 0;
}
