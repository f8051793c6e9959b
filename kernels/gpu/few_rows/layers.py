"""All layers of a step of a few rows: the door of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.gpu.attention import AttentionPlan
from quire.kernels.gpu.few_rows.products import GELU_MUL, SILU_MUL, product
from quire.kernels.gpu.linear import TritonLinear
from quire.kernels.gpu.rope import rope_and_cache
from quire.kernels.gpu.rows import rms_norm
from quire.kernels.moe import SILU
from quire.kernels.ops import DecoderLayer
from quire.kernels.stack import Stack

# Steps of more tokens go through single operations, whose products are those of cuBLAS. No card has measured where the
# two are equally fast.
MOST_ROWS = 8


def fits(stack: Stack) -> bool:
    """Return whether these kernels can compute the layers: dense ones of one process, with weights of 16 or 32 bits."""
    return stack.ranks is None and all(_is_plain(layer) for layer in stack.layers)


def _is_plain(layer: DecoderLayer) -> bool:
    products = layer.qkv, layer.o, layer.gate_up, layer.down
    others = layer.moe, layer.post_attention_norm, layer.post_mlp_norm, layer.per_layer_input
    return (
        all(isinstance(packed, TritonLinear) for packed in products)
        and all(other is None for other in others)
        and layer.output_scale == 1.0
    )


def run_few_rows(
    residual: Tensor,
    stack: Stack,
    positions: Tensor,
    slot_mapping: Tensor,
    plan: AttentionPlan,
    rows: Tensor,
) -> Tensor:
    """Compute `Ops.decoder_layers` for layers that `fits` allows. residual [T, hidden], T from 1 to MOST_ROWS.

    The other arguments are those of `kernels.gpu.layers.run_layers`. Returns [R, hidden] for
    rows [R], R from 1 to MOST_ROWS.
    """
    plan.dependent = plan.options.dependent_launch
    multiprocessors, pdl, last = plan.options.multiprocessors, plan.options.dependent_launch, len(stack.layers) - 1
    for index, layer in enumerate(stack.layers):
        k_cache, v_cache = stack.kv_cache[index]
        qkv, o, gate_up, down = layer.qkv, layer.o, layer.gate_up, layer.down
        assert isinstance(qkv, TritonLinear)
        assert isinstance(o, TritonLinear)
        assert isinstance(gate_up, TritonLinear)
        assert isinstance(down, TritonLinear)
        heads = product(residual, qkv.weight, qkv.bias, multiprocessors, pdl, norm=layer.input_norm, eps=stack.eps)
        q = rope_and_cache(
            heads, positions, stack.tables_of(index), slot_mapping, k_cache, v_cache, stack.num_heads,
            0 if layer.shares_kv else k_cache.shape[1], layer.q_norm, layer.k_norm, stack.eps, v_norm=layer.v_norm,
            pdl=pdl,
        )  # fmt: skip
        attended = torch.empty_like(q)
        plan.attend(q, k_cache, v_cache, stack.scale, layer.sliding_window, attended, None, layer.sinks, stack.softcap)
        attended = attended.view(len(q), -1)
        if index == last:  # only the wanted rows go on
            attended, residual = attended[rows], residual[rows]
        residual = product(attended, o.weight, o.bias, multiprocessors, pdl, residual=residual)
        inner = product(
            residual, gate_up.weight, gate_up.bias, multiprocessors, pdl, norm=layer.mlp_norm, eps=stack.eps,
            gate=SILU_MUL if layer.gate == SILU else GELU_MUL,
        )  # fmt: skip
        residual = product(inner, down.weight, down.bias, multiprocessors, pdl, residual=residual)
    return rms_norm(residual, None, stack.final_norm, stack.eps)
