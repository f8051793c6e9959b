"""Configurations of models whose attention Transformers writes out, for tiny random checkpoints."""

from __future__ import annotations

from typing import Any

from tests.support.transformers_checkpoints import GPT2_LIKE, LLAMA_LIKE, TOKENS

FALCON_ALIBI = LLAMA_LIKE | {"alibi": True, "parallel_attn": False, "eos_token_id": 1}

# Kind to model type and fields of its configuration.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", TOKENS | {"hidden_size": 64, "n_layer": 3, "n_head": 4, "seq_length": 256}),
    "bloom-6-heads": ("bloom", TOKENS | {"hidden_size": 96, "n_layer": 3, "n_head": 6, "seq_length": 256}),
    "mpt": ("mpt", TOKENS | {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}),
    "mpt-clipped": (
        "mpt",
        TOKENS
        | {"d_model": 96, "n_layers": 3, "n_heads": 6, "max_seq_len": 256}
        | {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.2, "alibi_bias_max": 4}},
    ),
    "gpt-neo": (  # a window in every second layer; scores that are not scaled
        "gpt_neo",
        TOKENS
        | {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "intermediate_size": 96, "window_size": 8}
        | {"max_position_embeddings": 256, "attention_types": [[["global", "local"], 1], [["global"], 1]]},
    ),
    "gptj": ("gptj", GPT2_LIKE | {"rotary_dim": 8}),
    "codegen": ("codegen", GPT2_LIKE | {"rotary_dim": 8}),
    "falcon": ("falcon", LLAMA_LIKE | {"multi_query": True, "parallel_attn": True}),
    "falcon-alibi": ("falcon", FALCON_ALIBI | {"multi_query": False, "bias": True}),
    "falcon-alibi-one-key": ("falcon", FALCON_ALIBI | {"multi_query": True}),
    "falcon-new": ("falcon", LLAMA_LIKE | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "stablelm": ("stablelm", LLAMA_LIKE | {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "xglm": (
        "xglm",
        TOKENS
        | {"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}
        | {"max_position_embeddings": 256, "pad_token_id": 1},
    ),
    "biogpt": ("biogpt", LLAMA_LIKE),
    "openai-gpt": ("openai-gpt", GPT2_LIKE),
    "gpt-neox-japanese": ("gpt_neox_japanese", LLAMA_LIKE | {"intermediate_multiple_size": 2}),
}
