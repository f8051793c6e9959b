"""`decoder_layers` of the Triton kernels: attention is planned once, and new prompts need not read the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.gpu.attention import AttentionPlan
from quire.kernels.layers import rope_rows, run_layers_with
from quire.kernels.lora import AdapterBatch, OwnNorms
from quire.kernels.ops import AddedRows
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
    layer_inputs: Tensor | None = None,
    added: AddedRows | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """Compute `Ops.decoder_layers` with checked arguments. plan: of this step; it must not have been used before."""
    heads, tokens = stack.num_heads, residual.shape[0]
    plan.split = tokens > len(plan.seq_lens) and plan.options.may_split
    # Keys and values of this step by the address of their cache, for later layers that share the cache.
    fresh_of: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(index: int, qkv: Tensor, own: OwnNorms | None) -> Tensor:
        layer, (k_cache, v_cache) = stack.layers[index], stack.kv_cache[index]
        d, kv_heads = k_cache.shape[3], 0 if layer.shares_kv else k_cache.shape[1]

        def rope(qkv: Tensor, at: Tensor, slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
            return ops.kernels.rope_and_cache(
                qkv,
                at,
                stack.tables_of(index),
                slots,
                k_cache,
                v_cache,
                heads,
                kv_heads,
                q_norm,
                k_norm,
                stack.eps,
                keep_k=plan.split,
                v_norm=layer.v_norm,
            )

        q = rope_rows(rope, index, qkv, positions, slot_mapping, layer, own)
        if plan.split and kv_heads:
            k, v = torch.split(qkv.view(tokens, -1, d)[:, heads:], kv_heads, dim=1)
            fresh_of[k_cache.data_ptr()] = k, v
        fresh = fresh_of[k_cache.data_ptr()] if plan.split else None
        out = torch.empty_like(q)
        ends = key_ends if layer.uses_key_ends else None
        window, sinks = layer.sliding_window, layer.sinks
        plan.attend(q, k_cache, v_cache, stack.scale, window, out, fresh, sinks, stack.softcap, ends)
        return out.view(tokens, heads * d)

    return run_layers_with(
        ops,
        residual,
        stack,
        rows,
        attend,
        adapters,
        adapted_rows=ops.kernels.lora,
        layer_inputs=layer_inputs,
        added=added,
    )
