"""Tiny configurations of the architectures in docs/models.md, besides those of other files of checkpoints here.

Each is one that Transformers knows as a causal language model. The measure of docs/models.md is
`tests/support/served_models.py`.
"""

from __future__ import annotations

from typing import Any

from tests.support.transformers_checkpoints import (
    EXPERTS,
    GRANITE_HYBRID,
    KINDS,
    LLAMA_LIKE,
    TOKENS,
    TWO_WINDOWS,
    WRITTEN,
)

Kind = tuple[str, dict[str, Any]]

HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 24}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
LATENT = {  # keys and values of DeepSeek: MLA
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1}
MAMBA |= {"mamba_chunk_size": 8}
NEXT_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV_LAYERS = {"layer_types": ["conv", "full_attention", "conv"]}
BERT = LLAMA_LIKE | {"is_decoder": True, "pad_token_id": 0}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def _llama(model_type: str, *parts: dict[str, Any], **fields: Any) -> Kind:
    merged: dict[str, Any] = dict(LLAMA_LIKE)
    for part in (*parts, fields):
        merged |= part
    return model_type, merged


ARCHITECTURES: dict[str, Kind] = {
    "llama": _llama("llama"),
    "mistral-window": _llama("mistral", WINDOW),
    "mistral-full": _llama("mistral", sliding_window=None),
    "qwen2": _llama("qwen2"),
    "qwen3": _llama("qwen3", HEAD),
    "llama-heads-of-8": _llama("llama", head_dim=8),
    "llama-heads-of-24": _llama("llama", head_dim=24),
    "llama-gqa3": _llama("llama", num_attention_heads=6, num_key_value_heads=2, hidden_size=96),
    "mixtral-window": _llama("mixtral", EXPERTS, WINDOW, moe_intermediate_size=None),
    "qwen2_moe": _llama("qwen2_moe", EXPERTS, SHARED_EXPERT),
    "gemma2": _llama("gemma2", HEAD, WINDOW),
    "gemma2-nocap": _llama("gemma2", HEAD, WINDOW, attn_logit_softcapping=None),
    "gemma3n_text": _llama(
        "gemma3n_text",
        HEAD,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=TOKENS["vocab_size"],
        num_kv_shared_layers=0,
        laurel_rank=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        activation_sparsity_pattern=[0.0, 0.0, 0.0],
    ),
    "gemma4_text-hd": _llama("gemma4_text", TWO_WINDOWS, HEAD, global_head_dim=32, hidden_size_per_layer_input=0),
    "gemma4_text": _llama("gemma4_text", TWO_WINDOWS, HEAD, global_head_dim=16, hidden_size_per_layer_input=0),
    "phi3-window": _llama("phi3", WINDOW),
    "phi4-partial": _llama("phi3", partial_rotary_factor=0.75),
    "phi3-longrope": _llama("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=128),
    "starcoder2-window": _llama("starcoder2", WINDOW),
    "starcoder2": _llama("starcoder2"),
    "olmo": _llama("olmo"),
    "olmo-clip": _llama("olmo", clip_qkv=1.0),
    "olmo3": _llama("olmo3", TWO_WINDOWS),
    "olmoe": _llama("olmoe", EXPERTS),
    "flex_olmo": _llama("flex_olmo", EXPERTS),
    "cohere": _llama("cohere", logit_scale=0.5),
    "cohere-qknorm": _llama("cohere", logit_scale=0.5, use_qk_norm=True),
    "cohere2_moe": _llama("cohere2_moe", TWO_WINDOWS, EXPERTS, logit_scale=0.5),
    "glm": _llama("glm", HEAD),
    "glm4": _llama("glm4", HEAD),
    "glm4_moe": _llama("glm4_moe", ROUTED, HEAD),
    "glm_moe_dsa": _llama("glm_moe_dsa", LATENT, ROUTED, INDEXER),
    "glm_moe_dsa-topk2048": _llama("glm_moe_dsa", LATENT, ROUTED, INDEXER, index_topk=2048),
    "glm4_moe_lite": _llama("glm4_moe_lite", LATENT, ROUTED),
    "granitemoe": _llama("granitemoe", EXPERTS),
    "granitemoeshared": _llama("granitemoeshared", EXPERTS, shared_intermediate_size=32),
    "granitemoehybrid": _llama("granitemoehybrid", GRANITE_HYBRID, MAMBA, layer_types=["mamba", "attention", "mamba"]),
    "nemotron_h": _llama(
        "nemotron_h",
        HEAD,
        ROUTED,
        num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=8,
        moe_shared_expert_intermediate_size=32,
    ),
    "nemotron": _llama("nemotron"),
    "deepseek_v2": _llama("deepseek_v2", LATENT, ROUTED),
    "deepseek_v2-lite": _llama("deepseek_v2", LATENT, ROUTED, q_lora_rank=None),
    "deepseek_v2-mla-real": _llama(
        "deepseek_v2", LATENT, ROUTED, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64
    ),
    "deepseek_v3-group": _llama("deepseek_v3", LATENT, ROUTED, n_group=2, topk_group=1),
    "deepseek_v3-yarn": _llama(
        "deepseek_v3",
        LATENT,
        ROUTED,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3-real-dims": _llama(
        "deepseek_v3", LATENT, ROUTED, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64
    ),
    "deepseek_v3-rank-512": _llama("deepseek_v3", LATENT, ROUTED, kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64),
    "deepseek_v32": _llama("deepseek_v32", LATENT, ROUTED, INDEXER),
    "deepseek_v32-topk2048": _llama("deepseek_v32", LATENT, ROUTED, INDEXER, index_topk=2048),
    "deepseek_v4": _llama("deepseek_v4", ROUTED, HEAD, q_lora_rank=24),
    "gpt_oss": _llama("gpt_oss", HEAD, EXPERTS, TWO_WINDOWS, moe_intermediate_size=None),
    "llama4_text": _llama("llama4_text", HEAD, EXPERTS, attention_chunk_size=32, num_experts_per_tok=1),
    "llama4_text-tuned": _llama(  # chunks; a layer without positions whose queries are scaled by position
        "llama4_text",
        HEAD,
        EXPERTS,
        attention_chunk_size=16,
        num_experts_per_tok=1,
        no_rope_layers=[1, 0, 1],
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        floor_scale=8,
        attn_scale=0.5,
    ),
    "llama4_text-short": _llama(
        "llama4_text", HEAD, EXPERTS, attention_chunk_size=256, num_experts_per_tok=1, attn_temperature_tuning=False
    ),
    "exaone4": _llama("exaone4", TWO_WINDOWS),
    "exaone_moe": _llama("exaone_moe", TWO_WINDOWS, HEAD, EXPERTS, num_shared_experts=1, n_group=1, topk_group=1),
    "ernie4_5": _llama("ernie4_5", HEAD),
    "ernie4_5_moe": _llama("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    "hunyuan_v1_dense": _llama("hunyuan_v1_dense", HEAD),
    "hy_v3": _llama("hy_v3", HEAD, EXPERTS, num_shared_experts=1),
    "mamba": _llama("mamba", state_size=8, expand=2),
    "mamba2": _llama("mamba2", state_size=16, expand=2, num_heads=8, head_dim=16, n_groups=1, chunk_size=8),
    "falcon_mamba": _llama("falcon_mamba", state_size=8, expand=2),
    "jamba": _llama(
        "jamba",
        EXPERTS,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_expand=2,
        use_mamba_kernels=False,
    ),
    "bamba": _llama("bamba", MAMBA, attn_layer_indices=[1], num_key_value_heads=2),
    "zamba": _llama("zamba", mamba_d_state=16, n_mamba_heads=2, layers_block_type=["mamba", "hybrid", "mamba"]),
    "zamba2": _llama(
        "zamba2",
        mamba_d_state=16,
        n_mamba_heads=8,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_mem_blocks=1,
        chunk_size=8,
    ),
    "falcon_h1": _llama("falcon_h1", MAMBA, HEAD, mamba_d_ssm=128),
    "rwkv": _llama("rwkv", attention_hidden_size=64),
    "persimmon": _llama("persimmon"),
    "helium": _llama("helium", HEAD),
    "minimax": _llama("minimax", HEAD, EXPERTS, NEXT_LAYERS, block_size=8),
    "minimax_m2": _llama("minimax_m2", HEAD, EXPERTS),
    "dbrx": (
        "dbrx",
        TOKENS
        | {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 500.0}}
        | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    ),
    "arcee": _llama("arcee", HEAD),
    "apertus": _llama("apertus"),
    "qwen3_next": _llama("qwen3_next", HEAD, EXPERTS, SHARED_EXPERT, LINEAR, NEXT_LAYERS),
    "qwen3_5_text": _llama("qwen3_5_text", HEAD, LINEAR, NEXT_LAYERS),
    "qwen3_5_moe_text": _llama("qwen3_5_moe_text", HEAD, EXPERTS, SHARED_EXPERT, LINEAR, NEXT_LAYERS),
    "seed_oss": _llama("seed_oss", HEAD),
    "kimi_linear": _llama(
        "kimi_linear",
        LATENT,
        EXPERTS,
        q_lora_rank=None,
        n_routed_experts=4,
        first_k_dense_replace=1,
        linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16},
    ),
    "lfm2": _llama("lfm2", CONV_LAYERS),
    "lfm2_moe": _llama("lfm2_moe", EXPERTS, CONV_LAYERS, num_dense_layers=1),
    "lfm3": _llama("lfm3", EXPERTS, CONV_LAYERS),
    "ministral": _llama("ministral", TWO_WINDOWS, HEAD),
    "ministral3": _llama("ministral3", HEAD),
    "dots1": _llama("dots1", HEAD, ROUTED),
    "afmoe": _llama("afmoe", HEAD, EXPERTS, TWO_WINDOWS, num_shared_experts=1, num_dense_layers=1),
    "bitnet": _llama("bitnet"),
    "doge": _llama("doge"),
    "ctrl": ("ctrl", TOKENS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "dff": 96, "n_positions": 256}),
    "cwm": _llama("cwm", HEAD, TWO_WINDOWS),
    "nanochat": _llama("nanochat"),
    "jetmoe": _llama("jetmoe", EXPERTS, kv_channels=16, num_key_value_heads=2),
    "modernbert-decoder": _llama("modernbert-decoder"),
    "mimo_v2_flash": _llama("mimo_v2_flash", HEAD, EXPERTS, TWO_WINDOWS, v_head_dim=16, swa_v_head_dim=16),
    "vaultgemma": _llama("vaultgemma", HEAD, TWO_WINDOWS),
    "minicpm3": _llama("minicpm3", LATENT),
    "youtu": _llama("youtu", LATENT),
    "hyperclovax": _llama("hyperclovax"),
    "jais2": _llama("jais2", HEAD),
    "solar_open": _llama("solar_open", HEAD, ROUTED),
    "granite_swa": _llama("granite_swa", TWO_WINDOWS),
    "recurrent_gemma": _llama("recurrent_gemma", lru_width=64, attention_window_size=24),
    "olmo_hybrid": _llama("olmo_hybrid", HEAD, LINEAR, NEXT_LAYERS),
    "mellum": _llama("mellum", HEAD, EXPERTS),
    "laguna": _llama("laguna", HEAD, EXPERTS, SHARED_EXPERT),
    "axk1": _llama("axk1", LATENT, ROUTED),
    "roberta-decoder": _llama("roberta", is_decoder=True, pad_token_id=5),
    "bert-decoder": ("bert", BERT),
    "xlstm": _llama("xlstm", num_heads=4, num_blocks=3),
    "zaya": _llama("zaya"),
    "flint": _llama("flint", HEAD),
    "kolibri1": _llama("kolibri1", HEAD),
    "hy_v4": _llama("hy_v4", HEAD, EXPERTS),
    "hrm_text": _llama("hrm_text", HEAD),
    "qwen4_exp_text": _llama("qwen4_exp_text", HEAD, EXPERTS),
    "beam": _llama("beam", HEAD),
    "minimax_m3_vl_text": _llama("minimax_m3_vl_text", HEAD, EXPERTS),
    "ministral3-scaled": _llama("ministral3", HEAD, max_position_embeddings=512),
}
ARCHITECTURES |= {{"gemma3": "gemma3_text"}.get(name, name): kind for name, kind in (KINDS | WRITTEN).items()}
