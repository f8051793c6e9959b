"""The tensors of a checkpoint of the Llama family, as Transformers names and shapes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.worker.models.config import ModelConfig

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All but embedding and head, which have a row per token of the vocabulary and may be one."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {FINAL_NORM: (hidden,)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        projections = {
            "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
    return shapes
