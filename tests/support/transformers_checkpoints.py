"""Small random checkpoints of kinds that Transformers computes. Each kind has a feature that matters for paging."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import BOS_TOKEN_ID, COMMON, EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer

TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
}
LLAMA_LIKE = COMMON | {"pad_token_id": EOS_TOKEN_ID}
GPT2_LIKE = TOKENS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 256}
TWO_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 48,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

GRANITE_HYBRID = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "rope",
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}

# Kind to model type and fields of its configuration.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2_LIKE),  # transposed weights; learned positions
    "gpt2-scaled": ("gpt2", GPT2_LIKE | {"scale_attn_by_inverse_layer_idx": True}),  # each layer has its own scale
    "gpt-bigcode": ("gpt_bigcode", GPT2_LIKE | {"multi_query": True}),
    "gpt-neox": ("gpt_neox", LLAMA_LIKE | {"rotary_pct": 0.25}),  # parallel MLP and attention; part of a head rotated
    "opt": (  # positions from 2 on; embeddings narrower than layers
        "opt",
        TOKENS
        | {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"max_position_embeddings": 256, "word_embed_proj_dim": 32},
    ),
    "gemma": ("gemma", LLAMA_LIKE | {"head_dim": 32}),  # scaled embeddings; norm weights are offsets from 1
    "gemma3": ("gemma3_text", LLAMA_LIKE | TWO_WINDOWS | {"head_dim": 16, "query_pre_attn_scalar": 24}),
    "cohere2": ("cohere2", LLAMA_LIKE | TWO_WINDOWS | {"logit_scale": 0.5}),  # no positions in some layers
    "phi": ("phi", LLAMA_LIKE | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", LLAMA_LIKE),  # merged projections
    "olmo2": ("olmo2", LLAMA_LIKE),  # norms after the layers
    "granite": ("granite", LLAMA_LIKE | {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "smollm3": ("smollm3", LLAMA_LIKE | {"no_rope_layers": [1, 0, 1], "layer_types": None}),
    "diffllama": ("diffllama", LLAMA_LIKE),  # two attentions in each layer
    "mixtral": ("mixtral", LLAMA_LIKE | EXPERTS | {"sliding_window": None, "moe_intermediate_size": None}),
    "qwen3-moe": ("qwen3_moe", LLAMA_LIKE | EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    # The model reads the dtype of its weights.
    "hunyuan-moe": ("hunyuan_v1_moe", LLAMA_LIKE | {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "deepseek-v3": (  # values are narrower than keys
        "deepseek_v3",
        LLAMA_LIKE
        | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "head_dim": 16, "qk_rope_head_dim": 16}
        | {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "longcat": (  # two attentions in a layer; a router that reads the weight of a layer and never calls it
        "longcat_flash",
        LLAMA_LIKE
        | {"num_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "head_dim": 16}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "moe_topk": 2}
        | {"zero_expert_num": 2, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96},
    ),
    # The class supports layers with states, but no layer has a state, as in Granite 4.0 micro.
    "granite-hybrid": ("granitemoehybrid", LLAMA_LIKE | GRANITE_HYBRID | {"layer_types": ["attention"] * 3}),
    # Models with their own type that compute as Llama does.
    "internlm3": ("internlm3", LLAMA_LIKE | {"head_dim": 16}),
    "iquestcoder": ("iquestcoder", LLAMA_LIKE | {"head_dim": 16}),
    "phimoe": ("phimoe", LLAMA_LIKE | EXPERTS),
    "llama-yarn": ("llama", LLAMA_LIKE | {"rope_parameters": YARN}),
    # The context is longer than max_position_embeddings.
    "llama-yarn-beyond": ("llama", LLAMA_LIKE | {"rope_parameters": YARN, "max_position_embeddings": 64}),
    # The kernels do not have these head sizes: the cache pads the keys.
    "llama-heads-of-20": ("llama", LLAMA_LIKE | {"head_dim": 20}),
    "gpt2-heads-of-24": ("gpt2", GPT2_LIKE | {"n_embd": 72, "n_head": 3}),
    # Attention sinks: a learned logit per head, in gpt-oss in all layers.
    "gpt-oss": (
        "gpt_oss",
        LLAMA_LIKE | TWO_WINDOWS | EXPERTS | {"head_dim": 16, "moe_intermediate_size": None},
    ),
    "granite-swa": ("granite_swa", LLAMA_LIKE | TWO_WINDOWS | {"attention_multiplier": 0.3}),
    "granitemoe-swa": ("granitemoe_swa", LLAMA_LIKE | TWO_WINDOWS | EXPERTS | {"attention_multiplier": 0.3}),
    "flint": ("flint", LLAMA_LIKE | EXPERTS | {"head_dim": 16}),
    # A soft cap, low enough to matter for random weights.
    "gemma2": ("gemma2", LLAMA_LIKE | TWO_WINDOWS | {"head_dim": 16, "attn_logit_softcapping": 4.0}),
    "vaultgemma": ("vaultgemma", LLAMA_LIKE | TWO_WINDOWS | {"head_dim": 16, "attn_logit_softcapping": 4.0}),
    # The widths of heads differ by layer; in the larger models the numbers of kv heads, too, and keys are values.
    "gemma4-text": ("gemma4_text", LLAMA_LIKE | GEMMA4),
    "gemma4-global-heads": (
        "gemma4_text",
        LLAMA_LIKE | GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-moe": (  # an MLP and experts in each layer
        "gemma4_text",
        LLAMA_LIKE
        | GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4-shared": ("gemma4_text", LLAMA_LIKE | GEMMA4 | {"num_kv_shared_layers": 2}),
    "gemma3n": (
        "gemma3n_text",
        LLAMA_LIKE
        | GEMMA4
        | {"num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2, "intermediate_size": [96] * 4}
        | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    # Layers with a window have twice the kv heads, and sinks.
    "mimo-v2": (
        "mimo_v2_flash",
        LLAMA_LIKE
        | TWO_WINDOWS
        | {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "num_key_value_heads": 2},
    ),
    "llama-gelu": ("llama", LLAMA_LIKE | {"hidden_act": "gelu"}),
}


def make_kind(folder: Path, kind: str, *, std: float = 0.2, **overrides: Any) -> Path:
    """Write a checkpoint of one of KINDS with a tokenizer into `folder`, and return the folder."""
    model_type, fields = KINDS[kind]
    return make_other(folder, model_type, std=std, **(fields | overrides))


def make_other(folder: Path, model_type: str, *, std: float = 0.2, **fields: Any) -> Path:
    """Write a checkpoint of any model type of Transformers with a tokenizer into `folder`, and return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Some configurations change their lists, which the kinds of this file share: Gemma 4 sets layer_types[-1].
    config = AutoConfig.for_model(model_type, **copy.deepcopy(fields))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith("weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=std)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def change(path: Path, file: str = "config.json", **fields: Any) -> None:
    """Set fields of a JSON file of a checkpoint."""
    target = path / file
    values = json.loads(target.read_text()) if target.exists() else {}
    target.write_text(json.dumps(values | fields))


# --- written checkpoints ----------------------------------------------------------------------------------------------
# Configurations of models whose attention Transformers writes out, for tiny random checkpoints.

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
