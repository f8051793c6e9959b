"""The names of tensors in GGUF files, and the order of the rows that llama.cpp changes."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.shared.model.gguf.config import EMBEDDING, OUTPUT

_WHOLE = {"model.embed_tokens": EMBEDDING, "lm_head": OUTPUT, "model.norm": "output_norm.weight"}
_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def stored_name(name: str) -> str:
    """Return the name in a GGUF file of a tensor with this canonical name."""
    module, _, end = name.rpartition(".")
    if module in _WHOLE:
        return _WHOLE[module]
    _, _, index, part = module.split(".", 3)
    return f"blk.{index}.{_OF_LAYER[part]}.{end}"


def row_order(num_heads: int, num_rows: int) -> Tensor:
    """Return the stored row of each row of a query or key projection of the architecture llama, int64 [num_rows].

    llama.cpp rotates neighbours, and stores the two halves of a head alternately; Transformers rotates halves.
    """
    size = num_rows // num_heads
    return torch.arange(num_rows).reshape(num_heads, size // 2, 2).transpose(1, 2).flatten()
