// The kernels of one instruction-set level and their C interface, which `LevelFunctions` in library.py declares.
//
// A level_*.cpp file selects the instructions and the type of the activations, and then includes this file inside its
// namespace. Later includes use names of earlier ones.
//
// build.py compiles each level in parts, see parts.h.
//
// Python has checked sizes, types and pointers. Ids, slots and block tables are checked here: a function returns 0, or
// 1 + the index of the first invalid token or sequence, and has then written nothing.

#include "vector_math.h"

#include "gemm.h"

#if defined(LEVEL_TILES)
#include "tiles.h"
#endif

#if defined(LEVEL_AMX)
#include "gemm_amx.h"
#else
#include "gemm_simd.h"
#endif

#ifndef ACT_BF16
#include "gemm_int.h"

#include "gemm_int4.h"
#endif

#include "gemm_grouped.h"

#include "parts.h"

#include "linear.h"

#include "grouped_linear.h"

#if LEVEL_PART == 0

#include "embed.h"

#include "kv_cache.h"

#include "rows.h"

#if defined(LEVEL_AMX)
#include "attention_amx.h"
#else
#include "attention_simd.h"
#endif

#include "attention_extras.h"

#include "latent.h"

#include "attention.h"

#include "lora.h"

#include "experts.h"

#include "layers.h"

#include "sampling.h"

#include "logprobs.h"

EXPORT(void, _linear)
(const void* x, size_t t, size_t k, const void* weights, size_t n, void* out, int output) {
    linear({(const act*)x, t, k, *(const Weights*)weights, n, out, output});
}

EXPORT(void, _moe)
(const void* router_input, const void* x, size_t rows, size_t hidden, const void* moe, void* out) {
    moe_layer(*(const MoE*)moe, (const act*)router_input, (const act*)x, rows, hidden, (act*)out);
}

EXPORT(void, _adapt_embeddings)
(const void* adapters, const void* ids, void* embeddings, size_t hidden) {
    adapt_embeddings((const Adapters*)adapters, (const int64_t*)ids, (act*)embeddings, hidden);
}

EXPORT(void, _adapt_logits)
(const void* adapters, const void* x, size_t hidden, void* logits, size_t vocab) {
    const auto* step = (const Adapters*)adapters;
    adapt(step, step->wanted, 0, kAdaptHead, (const act*)x, hidden, (float*)logits, vocab);
}

EXPORT(void, _rms_norm)
(const void* x, void* residual, const void* weight, float eps, size_t rows, size_t n, void* out) {
    rms_norm((const act*)x, (act*)residual, {(const act*)weight}, eps, rows, n, (act*)out);
}

EXPORT(int64_t, _embed)
(const void* ids, int wide, size_t rows, const void* table, int format, size_t vocab, size_t n, void* out) {
    return wide ? embed((const int64_t*)ids, rows, table, format, vocab, n, (act*)out)
                : embed((const int32_t*)ids, rows, table, format, vocab, n, (act*)out);
}

EXPORT(int64_t, _rope_and_cache)
(const void* qkv, const void* positions, const void* cos_sin, const void* slots, void* k_cache, void* v_cache, void* q,
 const void* q_norm, const void* k_norm, const void* v_norm, size_t t, size_t max_position, size_t block_count,
 size_t block_size, size_t h, size_t h_kv, size_t d, float eps, int wide_slots, int kv_type) {
    return rope_and_cache({(const act*)qkv, (const int32_t*)positions, (const float*)cos_sin, slots, (char*)k_cache,
                           (char*)v_cache, (act*)q, {(const act*)q_norm}, {(const act*)k_norm}, (const act*)v_norm, t,
                           max_position, block_count, block_size, h, h_kv, d, eps, wide_slots, KvType(kv_type)});
}

EXPORT(int64_t, _paged_attention)
(const void* q, const void* k_cache, const void* v_cache, const void* block_tables, const void* seq_lens,
 const void* query_start, void* out, size_t table_width, size_t sequences, size_t tokens, size_t block_count, int heads,
 int kv_heads, int head_dim, int block_size, int window, float scale, int kv_type, const void* sinks,
 float softcap, const void* key_ends) {
    const Attention job{{(const int32_t*)block_tables, (const int32_t*)seq_lens, (const int32_t*)query_start,
                         table_width, sequences, tokens, block_count, heads, kv_heads, head_dim, block_size, window,
                         (const int32_t*)key_ends},
                        (const act*)q,
                        (const char*)k_cache,
                        (const char*)v_cache,
                        (act*)out,
                        softcap != 0.f ? softcap : scale,
                        KvType(kv_type),
                        softcap != 0.f ? scale / softcap : 0.f,
                        (const float*)sinks};
    quire::AttentionPlan plan;
    if (const int64_t bad = quire::plan_attention(job.shape, &plan)) return bad;
    paged_attention(job, plan);
    return 0;
}

EXPORT(int64_t, _cache_latent)
(const void* rows, const void* slots, void* cache, size_t t, size_t block_count, size_t block_size, size_t d,
 int wide_slots, int kv_type) {
    return cache_latent(
        {(const act*)rows, slots, (char*)cache, t, block_count, block_size, d, wide_slots, KvType(kv_type)});
}

EXPORT(int64_t, _latent_attention)
(const void* q, const void* cache, const void* block_tables, const void* seq_lens, const void* query_start, void* out,
 size_t table_width, size_t sequences, size_t tokens, size_t block_count, int heads, int width, int value_dim,
 int block_size, int window, float scale, int kv_type) {
    const Attention job{{(const int32_t*)block_tables, (const int32_t*)seq_lens, (const int32_t*)query_start,
                         table_width, sequences, tokens, block_count, heads, 1, width, block_size, window},
                        (const act*)q,
                        (const char*)cache,
                        nullptr,
                        (act*)out,
                        scale,
                        KvType(kv_type),
                        0.f,
                        nullptr,
                        value_dim};
    quire::AttentionPlan plan;
    if (const int64_t bad = quire::plan_attention(job.shape, &plan)) return bad;
    paged_attention(job, plan);
    return 0;
}

EXPORT(void, _linear_groups)
(const void* x, size_t groups, size_t t, size_t k, const void* weights, size_t n, void* out) {
    for (size_t g = 0; g < groups; ++g)
        linear({(const act*)x + g * t * k, t, k, ((const Weights*)weights)[g], n, (act*)out + g * t * n, kAct});
}

EXPORT(int64_t, _layers)(const void* step) { return run_layers(*(const Step*)step); }

EXPORT(void, _argmax)(const void* logits, size_t rows, size_t n, void* out) {
    argmax((const float*)logits, rows, n, (int32_t*)out);
}

EXPORT(void, _sample)
(const void* logits, size_t rows, size_t n, const void* temperature, const void* top_k, const void* top_p,
 const void* min_p, const void* uniform, void* out) {
    sample({(const float*)logits, rows, n, (const float*)temperature, (const int32_t*)top_k, (const float*)top_p,
            (const float*)min_p, (const double*)uniform, (int32_t*)out});
}

EXPORT(void, _top_logprobs)(const void* logits, size_t rows, size_t n, size_t count, void* values, void* ids) {
    top_logprobs((const float*)logits, rows, n, count, (float*)values, (int32_t*)ids);
}

EXPORT(int64_t, _logprobs_of)(const void* logits, size_t rows, size_t n, const void* ids, void* out) {
    return logprobs_of((const float*)logits, rows, n, (const int64_t*)ids, (float*)out);
}

#endif  // LEVEL_PART == 0
