"""The architectures of GGUF files that are read, and what the metadata of each says in the fields of `config.json`.

A property that llama.cpp fixes in code for an architecture, such as the period of its windows, is fixed here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.shared.model.gguf.keys import ModelKeys

Fields = dict[str, Any]

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_THETA = "rope.freq_base_swa"
NEXTN = "nextn_predict_layers"
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_SHARED_EXPERT = "expert_shared_feed_forward_length"
_STATES = (
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    *("attention.recurrent_layers", "full_attention_interval", "rope.dimension_sections", NEXTN),
)
# Layers of the largest models, whose scores are divided by the root of another number than the size of a head.
_GEMMA2_27B, _GEMMA3_27B = 46, 62
_NOPE_PERIOD = 4  # of SmolLM3: each fourth layer has no positions


@dataclass(frozen=True)
class Architecture:
    """class_name, model_type: in Transformers. fields: those that differ from the fields of all architectures.

    keys: those that `fields` reads. partial: only a part of a head may be rotated. scalings: types of RoPE scaling.
    """

    class_name: str
    model_type: str
    fields: Callable[[ModelKeys, Fields], Fields]
    keys: tuple[str, ...] = ()
    partial: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn")


def _llama(keys: ModelKeys, config: Fields) -> Fields:
    """Llama, and as other classes Mistral and Mixtral."""
    has_bias, window = _has_bias(keys), _window_or_none(keys, config)
    if keys.integer("expert_count", 0, default=0):
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window}
        experts = _experts(keys)
        return names | {name: experts[name] for name in ("num_local_experts", "num_experts_per_tok")}
    if window is not None:
        if has_bias:
            raise keys.fault(WINDOW, "no such key for a model with biases")
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {"attention_bias": has_bias, "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias")}


def _qwen2(keys: ModelKeys, config: Fields) -> Fields:
    return {}


def _with_bias(keys: ModelKeys, config: Fields) -> Fields:
    return {"attention_bias": _has_bias(keys)}


def _qwen2moe(keys: ModelKeys, config: Fields) -> Fields:
    shared = {"shared_expert_intermediate_size": keys.integer(_SHARED_EXPERT)}
    return _experts(keys) | shared | {"norm_topk_prob": False, "qkv_bias": _has_bias(keys)}


def _qwen3moe(keys: ModelKeys, config: Fields) -> Fields:
    return _experts(keys) | {"norm_topk_prob": True, "attention_bias": _has_bias(keys)}


def _gemma(keys: ModelKeys, config: Fields, largest: int) -> Fields:
    """Fields of both Gemmas. largest: the layers of the model whose scores are scaled by the width of the model."""
    of_width = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": of_width if keys.layers == largest else config["head_dim"],
    }


def _gemma2(keys: ModelKeys, config: Fields) -> Fields:
    return _gemma(keys, config, _GEMMA2_27B) | {
        "sliding_window": keys.integer(WINDOW, default=4096),
        "layer_types": _layer_types(keys, 2),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: ModelKeys, config: Fields) -> Fields:
    window = keys.integer(WINDOW, 0, default=0)
    cap = "final_logit_softcapping"
    return _gemma(keys, config, _GEMMA3_27B) | {
        "sliding_window": window or None,
        "layer_types": _layer_types(keys, 6) if window else [FULL] * config["num_hidden_layers"],
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number(LOCAL_THETA, 10_000.0),
        cap: keys.number(cap) if cap in keys else None,
    }


def _phi3(keys: ModelKeys, config: Fields) -> Fields:
    share = keys.integer("rope.dimension_count", default=config["head_dim"]) / config["head_dim"]
    rope: Fields = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": share}
    longest = config["max_position_embeddings"]
    original = keys.integer("rope.scaling.original_context_length", default=longest)
    long, short = keys.factors(LONG_FACTORS), keys.factors(SHORT_FACTORS)
    if long and short:
        rope |= {"rope_type": "longrope", "long_factor": list(long), "short_factor": list(short)}
        usual = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original else 1.0
        factor = keys.number("rope.scaling.attn_factor", usual)
        if not math.isclose(factor, usual, rel_tol=1e-5):
            rope["attention_factor"] = factor
    elif long or short or keys.text("rope.scaling.type", "none") != "none":
        raise keys.fault("rope.scaling.type", f"longrope, with the tensors {LONG_FACTORS} and {SHORT_FACTORS}")
    return {
        "rope_parameters": rope,
        "rope_scaling": None,
        "original_max_position_embeddings": original,
        "sliding_window": keys.integer(WINDOW, 0, default=0) or None,
        "pad_token_id": None,
    }


def _gpt_oss(keys: ModelKeys, config: Fields) -> Fields:
    rope = config["rope_scaling"] or {"rope_type": "default"}
    rope |= {"rope_theta": config["rope_theta"]} | ({"truncate": False} if rope["rope_type"] == "yarn" else {})
    experts = _experts(keys)
    return experts | {
        "intermediate_size": experts["moe_intermediate_size"],
        "moe_intermediate_size": None,
        "attention_bias": _has_bias(keys),
        "sliding_window": keys.integer(WINDOW),
        "layer_types": _layer_types(keys, 2),
        "rope_parameters": rope,
        "rope_scaling": None,
    }


def _smollm3(keys: ModelKeys, config: Fields) -> Fields:
    layers = range(config["num_hidden_layers"])
    return {
        "attention_bias": _has_bias(keys),
        "mlp_bias": False,
        "use_sliding_window": False,
        "no_rope_layers": [int((layer + 1) % _NOPE_PERIOD > 0) for layer in layers],
        "no_rope_layer_interval": _NOPE_PERIOD,
        "pad_token_id": None,
    }


def _olmo2(keys: ModelKeys, config: Fields) -> Fields:
    """OLMo 2, and with a window OLMo 3, where only the layers without a window have scaled positions."""
    fields: Fields = {"attention_bias": _has_bias(keys), "pad_token_id": None}
    window = keys.integer(WINDOW, 0, default=0)
    if not window:
        return fields
    theta = config["rope_theta"]
    local = {"rope_type": "default", "rope_theta": keys.number(LOCAL_THETA, theta)}
    return fields | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(keys, 4),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta} | (config["rope_scaling"] or {}),
            "sliding_attention": local,
        },
    }


def _granite(keys: ModelKeys, config: Fields) -> Fields:
    if keys.get("rope.scaling.finetuned") not in (None, True):
        raise keys.fault("rope.scaling.finetuned", "true: a model without positions is not read")
    scales = {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
        "attention_multiplier": ("attention.scale", config["head_dim"] ** -0.5),
    }
    fields: Fields = {name: keys.number(key, default) for name, (key, default) in scales.items()}
    return fields | {"attention_bias": _has_bias(keys), "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias")}


def _qwen35(keys: ModelKeys, config: Fields) -> Fields:
    layers = config["num_hidden_layers"]
    value_heads = keys.integer("ssm.time_step_rank", maximum=65_536)
    values = keys.integer("ssm.inner_size")
    if values % value_heads:
        raise keys.fault("ssm.inner_size", f"a multiple of ssm.time_step_rank, which is {value_heads}")
    key_heads = keys.integer("ssm.group_count", maximum=65_536)
    if value_heads % key_heads:
        raise keys.fault("ssm.group_count", f"a divisor of ssm.time_step_rank, which is {value_heads}")
    sections = keys.integers("rope.dimension_sections")
    rotated = keys.integer("rope.dimension_count", default=config["head_dim"])
    rope: Fields = {
        "rope_type": "default",
        "rope_theta": config["rope_theta"],
        "partial_rotary_factor": rotated / config["head_dim"],
    }
    if sections:
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    has_states = [keys.has_tensor(f"blk.{layer}.ssm_conv1d.weight") for layer in range(layers)]
    return {
        "attention_bias": False,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": values // value_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "layer_types": [LINEAR if has_state else FULL for has_state in has_states],
        "rope_parameters": rope,
        "rope_scaling": None,
    }


def _qwen35moe(keys: ModelKeys, config: Fields) -> Fields:
    shared = {"shared_expert_intermediate_size": keys.integer(_SHARED_EXPERT)}
    return _qwen35(keys, config) | _experts(keys) | shared


def _experts(keys: ModelKeys) -> Fields:
    count = keys.integer("expert_count", maximum=65_536)
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count", maximum=count),
        "moe_intermediate_size": keys.of_all_layers("expert_feed_forward_length", default=1),
    }


def _has_bias(keys: ModelKeys) -> bool:
    return keys.has_tensor("blk.0.attn_q.bias")


def _window_or_none(keys: ModelKeys, config: Fields) -> int | None:
    """Return the window of all layers; None for one that is as long as the context."""
    window = keys.integer(WINDOW, 0, default=0)
    return window if 0 < window < config["max_position_embeddings"] else None


def _layer_types(keys: ModelKeys, period: int) -> list[str]:
    """Return the kind of attention of each layer. period: the last layer of each period has full attention."""
    if isinstance(keys.get(WINDOW_PATTERN), int):
        period = keys.integer(WINDOW_PATTERN)
    elif windows := keys.flags(WINDOW_PATTERN):
        return [SLIDING if has_window else FULL for has_window in windows]
    return [SLIDING if (layer + 1) % period else FULL for layer in range(keys.layers)]


_WINDOWS = (WINDOW, WINDOW_PATTERN)
_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale", "rope.scaling.finetuned")
_PHI = (WINDOW, "rope.scaling.attn_factor")
_LINEAR = ("linear",)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _llama, (WINDOW, *_EXPERTS)),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _qwen2),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2moe, (*_EXPERTS, _SHARED_EXPERT)),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _with_bias),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3moe, _EXPERTS),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35, _STATES, partial=True, scalings=()),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _qwen35moe,
        (*_STATES, *_EXPERTS, _SHARED_EXPERT),
        partial=True,
        scalings=(),
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _gemma2, (*_WINDOWS, *_CAPS), scalings=_LINEAR),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", _gemma3, (*_WINDOWS, _CAPS[1], LOCAL_THETA), scalings=_LINEAR
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _phi3, _PHI, partial=True, scalings=("longrope",)),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _gpt_oss, (*_WINDOWS, *_EXPERTS)),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _smollm3),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _olmo2, (*_WINDOWS, LOCAL_THETA)),
    "granite": Architecture("GraniteForCausalLM", "granite", _granite, _SCALES),
}
