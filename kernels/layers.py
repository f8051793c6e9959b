"""The layers of a decoder as a sequence of operations: the definition of `Ops.decoder_layers`."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import checks
from quire.kernels.interrupt import Interrupt
from quire.kernels.lora import AdaptedRows, AdapterBatch, RowsWithAdapters
from quire.kernels.moe import SILU
from quire.kernels.ops import DecoderLayer, Ops, PackedLinear
from quire.kernels.stack import Stack

# The attention of one layer: (qkv [T, (H + 2 H_kv) * D], layer, k_cache, v_cache) -> [T, H * D].
Attend = Callable[[Tensor, DecoderLayer, Tensor, Tensor], Tensor]


def run_layers(
    ops: Ops,
    residual: Tensor,
    stack: Stack,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    adapters: AdapterBatch | None = None,
    interrupt: Interrupt | None = None,
) -> Tensor:
    """Compute `Ops.decoder_layers` with single operations of `ops`. Arguments, result and errors as there."""
    checks.tensor("rows", rows, torch.int64, (rows.shape[0],))

    def attend(qkv: Tensor, layer: DecoderLayer, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q = ops.rope_and_cache(
            qkv,
            positions,
            stack.cos_sin if layer.cos_sin is None else layer.cos_sin,
            slot_mapping,
            k_cache,
            v_cache,
            stack.num_heads,
            stack.num_kv_heads,
            layer.q_norm,
            layer.k_norm,
            stack.eps,
        )
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            query_start_loc,
            stack.scale,
            layer.sliding_window,
            sinks=layer.sinks,
            softcap=stack.softcap,
        )

    return run_layers_with(ops, residual, stack, rows, attend, adapters, interrupt)


def run_layers_with(
    ops: Ops,
    residual: Tensor,
    stack: Stack,
    rows: Tensor,
    attend: Attend,
    adapters: AdapterBatch | None = None,
    interrupt: Interrupt | None = None,
    adapted_rows: type[RowsWithAdapters] = AdaptedRows,
) -> Tensor:
    """Compute all layers, with the rotation, the cache write and the attention of each layer left to `attend`.

    residual [T, hidden] is overwritten; rows [R] int64: the tokens whose output is wanted. adapted_rows: computes the
    products of adapters. Returns [R, hidden].
    """
    all_reduce = stack.ranks.all_reduce if stack.ranks else identity
    hidden = ops.rms_norm(residual, stack.layers[0].input_norm, stack.eps)
    last = len(stack.layers) - 1
    adapted = adapted_rows(adapters.adapters, adapters.tokens, residual.device) if adapters else None
    for index, (layer, (k_cache, v_cache)) in enumerate(zip(stack.layers, stack.kv_cache, strict=True)):
        if interrupt is not None:
            interrupt.check()
        qkv = ops.linear(hidden, layer.qkv)
        if adapted:
            adapted.apply(index, "qkv", hidden, qkv)
        hidden = attend(qkv, layer, k_cache, v_cache)
        if index == last:  # after the last attention no token needs another one: only the wanted rows go on
            hidden, residual = hidden[rows], residual[rows]
            adapted = adapted_rows(adapters.adapters, adapters.wanted, residual.device) if adapters else None
        attended, hidden = hidden, ops.linear(hidden, layer.o)
        if adapted:
            adapted.apply(index, "o", attended, hidden)
        hidden = all_reduce(hidden)
        if layer.post_attention_norm is not None:
            hidden = ops.rms_norm(hidden, layer.post_attention_norm, stack.eps)
        hidden = ops.add_rms_norm(hidden, residual, layer.mlp_norm, stack.eps)
        if layer.moe is not None:
            hidden = ops.moe(hidden, layer.moe)
        elif adapted:
            hidden = _adapted_mlp(ops, hidden, layer, adapted, index)
        else:
            assert layer.gate_up is not None
            assert layer.down is not None
            gated = ops.linear_silu_mul if layer.gate == SILU else ops.linear_gelu_mul
            hidden = ops.linear(gated(hidden, layer.gate_up), layer.down)
        hidden = all_reduce(hidden)
        if layer.post_mlp_norm is not None:
            hidden = ops.rms_norm(hidden, layer.post_mlp_norm, stack.eps)
        next_norm = stack.final_norm if index == last else stack.layers[index + 1].input_norm
        hidden = ops.add_rms_norm(hidden, residual, next_norm, stack.eps)
    return hidden


def _adapted_mlp(ops: Ops, x: Tensor, layer: DecoderLayer, adapted: RowsWithAdapters, index: int) -> Tensor:
    """Compute the MLP of layer `index`. Adapters change gates and ups before these are multiplied."""
    assert layer.gate_up is not None
    assert layer.down is not None
    gate_up = ops.linear(x, plain(layer.gate_up))
    adapted.apply(index, "gate_up", x, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = (F.silu(gate) if layer.gate == SILU else F.gelu(gate, approximate="tanh")) * up
    out = ops.linear(inner, layer.down)
    adapted.apply(index, "down", inner, out)
    return out


def plain(packed: PackedLinear) -> PackedLinear:
    """Return the weights of `pack_gate_up` as those of `pack_linear`, for kernels that keep the rows in order."""
    return replace(packed, gate_up=False) if hasattr(packed, "gate_up") else packed  # type: ignore[type-var]


def identity(values: Tensor) -> Tensor:
    """Return the values: the all-reduce of layers that one process holds alone."""
    return values
