"""Small random checkpoints of models that keep recurrent states, one for each family that Transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.transformers_checkpoints import EXPERTS, GRANITE_HYBRID, LLAMA_LIKE, TOKENS, make_other

MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
PURE = TOKENS | {"hidden_size": 64, "num_hidden_layers": 2}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "head_dim": 16, "qk_rope_head_dim": 16}

# Family to model type and fields of its configuration. Families differ in the kind of their states.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", LLAMA_LIKE | SHORT_CONVOLUTIONS),
    "lfm2-moe": ("lfm2_moe", LLAMA_LIKE | EXPERTS | SHORT_CONVOLUTIONS | {"num_dense_layers": 1}),
    "lfm3": ("lfm3", LLAMA_LIKE | EXPERTS | SHORT_CONVOLUTIONS),
    "granite-moe-hybrid": (
        "granitemoehybrid",
        LLAMA_LIKE | GRANITE_HYBRID | MAMBA_2 | {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "bamba": ("bamba", LLAMA_LIKE | MAMBA_2 | {"attn_layer_indices": [1]}),
    "falcon-h1": ("falcon_h1", LLAMA_LIKE | MAMBA_2 | {"mamba_d_ssm": 128, "head_dim": 16}),  # both kinds in a layer
    "nemotron-h": (  # a layer is a Mamba-2, attention or experts
        "nemotron_h",
        LLAMA_LIKE
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "moe", "mamba"], "head_dim": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 32},
    ),
    "qwen3-next": ("qwen3_next", LLAMA_LIKE | SHARED_EXPERT | DELTA_NET),
    "qwen3.5": ("qwen3_5_text", LLAMA_LIKE | DELTA_NET),
    "qwen3.5-moe": ("qwen3_5_moe_text", LLAMA_LIKE | SHARED_EXPERT | DELTA_NET),
    "olmo-hybrid": ("olmo_hybrid", LLAMA_LIKE | DELTA_NET),
    "kimi-linear": (
        "kimi_linear",
        LLAMA_LIKE
        | EXPERTS
        | LATENT
        | {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1}
        | {"linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16}},
    ),
    "minimax": (  # a state without a convolution
        "minimax",
        LLAMA_LIKE
        | EXPERTS
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16, "block_size": 8},
    ),
    "zamba2": (  # the attention layers share weights
        "zamba2",
        LLAMA_LIKE
        | {"mamba_d_state": 16, "n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid", "mamba"]}
        | {"num_mem_blocks": 1, "chunk_size": 8},
    ),
    "zaya": ("zaya", LLAMA_LIKE),
    # States of Mamba-1 continue one token at a time.
    "jamba": (
        "jamba",
        LLAMA_LIKE | EXPERTS | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
    ),
    "zamba": (
        "zamba",
        LLAMA_LIKE | {"mamba_d_state": 16, "n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    ),
    # No attention at all, and no limit of the context.
    "mamba": ("mamba", PURE | {"state_size": 4}),
    "falcon-mamba": ("falcon_mamba", PURE | {"state_size": 4}),
    "mamba2": ("mamba2", PURE | {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
}
ONE_BY_ONE = ("jamba", "zamba", "mamba", "falcon-mamba")


def make_hybrid(folder: Path, family: str, *, std: float = 0.2, **overrides: Any) -> Path:
    """Write a checkpoint of one of FAMILIES with a tokenizer into `folder`, and return the folder."""
    model_type, fields = FAMILIES[family]
    return make_other(folder, model_type, std=std, **(fields | overrides))
