"""`decoder_layers` of the Triton kernels: attention is planned once, and new prompts need not read the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.gpu.attention import AttentionPlan
from quire.kernels.layers import run_layers_with
from quire.kernels.lora import AdapterBatch
from quire.kernels.ops import DecoderLayer
from quire.kernels.stack import Stack

if TYPE_CHECKING:
    from quire.kernels.gpu.ops import TritonOps


def run_layers(
    ops: TritonOps,
    residual: Tensor,
    stack: Stack,
    positions: Tensor,
    slot_mapping: Tensor,
    plan: AttentionPlan,
    rows: Tensor,
    adapters: AdapterBatch | None = None,
) -> Tensor:
    """Compute `Ops.decoder_layers` with checked arguments. plan: of this step; it must not have been used before."""
    heads, kv_heads, d = stack.num_heads, stack.num_kv_heads, stack.block_shape[-1]
    tokens = residual.shape[0]
    plan.split = tokens > len(plan.seq_lens) and plan.options.may_split

    def attend(qkv: Tensor, layer: DecoderLayer, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q = ops.kernels.rope_and_cache(
            qkv,
            positions,
            stack.cos_sin if layer.cos_sin is None else layer.cos_sin,
            slot_mapping,
            k_cache,
            v_cache,
            heads,
            kv_heads,
            layer.q_norm,
            layer.k_norm,
            stack.eps,
            keep_k=plan.split,
        )
        fresh = None
        if plan.split:
            k, v = torch.split(qkv.view(tokens, -1, d)[:, heads:], kv_heads, dim=1)
            fresh = k, v
        out = torch.empty_like(q)
        plan.attend(q, k_cache, v_cache, stack.scale, layer.sliding_window, out, fresh, layer.sinks, stack.softcap)
        return out.view(tokens, heads * d)

    return run_layers_with(ops, residual, stack, rows, attend, adapters, adapted_rows=ops.kernels.lora)
