"""Paged attention for models whose attention Transformers writes out in each layer, where no name replaces it.

Each family has an adapter here. It replaces either the method that computes scores and their product with the values,
or the whole `forward` of the layer's attention, by one that calls `attention.attend_causal`. All of these
models are causal; the trial of `bridge.py` compares each of them with its own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from quire.worker.models.transformers.alibi import AlibiBias, mpt_slopes_of, slopes_of
from quire.worker.models.transformers.attention import UnsupportedAttention, attend_causal

# Replaces a part of an attention module. The arguments are the module, the configuration and the positions.
Adapt = Callable[[Any, Any, "TokenPositions"], None]
# Fields of MPT that Transformers ignores, and the values that it assumes.
MPT_FIELDS = {"attn_type": "multihead_attention", "alibi": True, "qk_ln": False, "prefix_lm": False}


class TokenPositions:
    """The positions of the tokens that the model now computes, int64 [T]. ALiBi needs them, and layers are not told."""

    def __init__(self, model: nn.Module, is_passed_on: bool) -> None:
        """is_passed_on: the model takes positions itself."""
        self.of_step = torch.zeros(0)
        self._is_passed_on = is_passed_on
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given, ids = kwargs.get("position_ids"), kwargs["input_ids"]
        self.of_step = torch.arange(ids.shape[1], device=ids.device) if given is None else given[0]
        return args, kwargs if self._is_passed_on else {
            key: value for key, value in kwargs.items() if key != "position_ids"
        }


def is_written_out(model_class: Any) -> bool:
    """Return whether a class of Transformers has an adapter here."""
    return model_class.__name__ in FAMILIES


def prepare(model: Any) -> None:
    """Change what a model of FAMILIES computes by itself, if its own attention is not the right reference."""
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":
            module.__class__ = nn.Linear  # FalconLinear does the same, in two operations
    if type(model).__name__ == "FalconForCausalLM":
        # The attention that Transformers calls eager adds ALiBi twice.
        model.config._attn_implementation_internal = "sdpa"
    if type(model).__name__ == "MptForCausalLM":
        # Transformers ignores alibi_bias_max, and computes with 8. MPT-7B-StoryWriter has 16.
        body = model.transformer
        largest = model.config.attn_config.alibi_bias_max
        body.build_mpt_alibi_tensor = partial(body.build_mpt_alibi_tensor, alibi_bias_max=largest)


def replace_attention(model: Any, name: str) -> None:
    """Let the model call the attention function of this name, by its configuration or by adapters."""
    if not is_written_out(type(model)):
        model.set_attn_implementation(name)
        return
    is_new = not getattr(model, "has_adapters", False)
    if type(model).__name__ != "MptForCausalLM":  # MPT converts the mask, and would get None
        model.config._attn_implementation_internal = name
    if is_new:
        model.has_adapters = True
        part, adapt = FAMILIES[type(model).__name__]
        positions = TokenPositions(model, type(model).__name__ not in WITHOUT_POSITIONS)
        for module in model.modules():
            if type(module).__name__ == part:
                adapt(module, model.config, positions)


def has_alibi(model: Any) -> bool:
    """Return whether positions are biases of the scores, which need a cache of 16 bits or more."""
    return type(model).__name__ in WITHOUT_POSITIONS or bool(getattr(model.config, "alibi", False))


def _named(module: Any, config: Any, positions: TokenPositions) -> None:
    """Do nothing: the layer calls the attention function by its name already, although its class does not say so."""


def _inner(module: Any, config: Any, positions: TokenPositions) -> None:
    """Replace the method `_attn` of GPT-J, CodeGen, GPT-Neo and GPT-NeoX Japanese."""
    head_dim = getattr(module, "head_dim", None) or module.head_size
    is_neo = hasattr(module, "attention_type")  # GPT-Neo does not scale scores
    window = config.window_size if is_neo and module.attention_type == "local" else 0
    scale = 1.0 if is_neo else head_dim**-0.5

    def attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        mixed = attend_causal(module, query.to(value.dtype), key.to(value.dtype), value, scale, window)
        return mixed.transpose(1, 2), None

    module._attn = attend


def _openai(module: Any, config: Any, positions: TokenPositions) -> None:
    def attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> list[torch.Tensor]:
        scale = value.shape[-1] ** -0.5 if module.scale else 1.0
        return [attend_causal(module, query, key.transpose(2, 3), value, scale).transpose(1, 2)]

    module._attn = attend


def _bloom(module: Any, config: Any, positions: TokenPositions) -> None:
    slopes = slopes_of(module.num_heads, module.query_key_value.weight.device)
    alibi = AlibiBias(slopes, module.inv_norm_factor)

    def forward(hidden_states: Any, residual: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        query, key = alibi.extend(query, key, positions.of_step)
        mixed = attend_causal(module, query, key, value, module.inv_norm_factor)
        return residual + module.dense(mixed.flatten(2)), None

    module.forward = forward


def _mpt(module: Any, config: Any, positions: TokenPositions) -> None:
    settings = config.attn_config
    for name, expected in MPT_FIELDS.items():
        if getattr(settings, name) != expected:
            raise UnsupportedAttention(f"{name} of its attn_config is {getattr(settings, name)!r}, not {expected!r}")
    device = module.Wqkv.weight.device
    alibi = AlibiBias(mpt_slopes_of(module.n_heads, settings.alibi_bias_max, device), module.softmax_scale)

    def forward(hidden_states: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        heads = mixed.unflatten(2, (3, module.n_heads, module.head_dim)).transpose(1, 3)  # [1, H, 3, T, D]
        query, key = alibi.extend(heads[:, :, 0], heads[:, :, 1], positions.of_step)
        return module.out_proj(attend_causal(module, query, key, heads[:, :, 2], module.softmax_scale).flatten(2)), None

    module.forward = forward


def _falcon(module: Any, config: Any, positions: TokenPositions) -> None:
    from transformers.models.falcon import modeling_falcon

    rotate: Any = modeling_falcon.apply_rotary_pos_emb
    heads, kv_heads, head_dim = module.num_heads, module.num_kv_heads, module.head_dim
    slopes = slopes_of(heads, module.query_key_value.weight.device)
    bias = AlibiBias(slopes, 1.0, rounded=True) if config.alibi else None

    def forward(hidden_states: Any, *_: Any, position_embeddings: Any = None, **__: Any) -> tuple[torch.Tensor, None]:
        # Query heads of a group, then their key and value.
        grouped = module.query_key_value(hidden_states).unflatten(2, (kv_heads, heads // kv_heads + 2, head_dim))
        query = grouped[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
        key, value = (grouped[:, :, :, at].transpose(1, 2) for at in (-2, -1))
        if bias is None:
            query, key = rotate(query, key, *position_embeddings)
        else:
            # The biases of a group differ by head, so each head has keys of its own.
            key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
            query, key = bias.extend(query, key, positions.of_step)
        mixed = attend_causal(module, query, key, value, module.inv_norm_factor)
        return module.dense(mixed.flatten(2)), None

    module.forward = forward


def _xglm(module: Any, config: Any, positions: TokenPositions) -> None:
    def forward(hidden_states: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = (
            projection(hidden_states).unflatten(2, (-1, module.head_dim)).transpose(1, 2) for projection in projections
        )
        return module.out_proj(attend_causal(module, query, key, value, module.scaling).flatten(2)), None

    module.forward = forward


# The class of a model to the class of its attention modules and their adapter.
FAMILIES: dict[str, tuple[str, Adapt]] = {
    "BioGptForCausalLM": ("BioGptAttention", _named),
    "BloomForCausalLM": ("BloomAttention", _bloom),
    "CodeGenForCausalLM": ("CodeGenAttention", _inner),
    "FalconForCausalLM": ("FalconAttention", _falcon),
    "GPTJForCausalLM": ("GPTJAttention", _inner),
    "GPTNeoForCausalLM": ("GPTNeoSelfAttention", _inner),
    "GPTNeoXJapaneseForCausalLM": ("GPTNeoXJapaneseAttention", _inner),
    "MptForCausalLM": ("MptAttention", _mpt),
    "OpenAIGPTLMHeadModel": ("Attention", _openai),
    "StableLmForCausalLM": ("StableLmAttention", _named),
    "XGLMForCausalLM": ("XGLMAttention", _xglm),
}
# Models with ALiBi that do not take positions.
WITHOUT_POSITIONS = ("BloomForCausalLM", "MptForCausalLM")
