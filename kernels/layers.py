"""The layers of a decoder as a sequence of operations: the definition of `Ops.decoder_layers`."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.ops import DecoderLayer, Ops
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
) -> Tensor:
    """Compute `Ops.decoder_layers` with single operations of `ops`. Arguments, result and errors as there."""
    checks.tensor("rows", rows, torch.int64, (rows.shape[0],))

    def attend(qkv: Tensor, layer: DecoderLayer, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q = ops.rope_and_cache(
            qkv,
            positions,
            stack.cos_sin,
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
            q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, stack.scale, layer.sliding_window
        )

    return run_layers_with(ops, residual, stack, rows, attend)


def run_layers_with(ops: Ops, residual: Tensor, stack: Stack, rows: Tensor, attend: Attend) -> Tensor:
    """Compute all layers, with the rotation, the cache write and the attention of each layer left to `attend`.

    residual [T, hidden] is overwritten; rows [R] int64: the tokens whose output is wanted. Returns [R, hidden].
    """
    all_reduce = stack.ranks.all_reduce if stack.ranks else identity
    hidden = ops.rms_norm(residual, stack.layers[0].input_norm, stack.eps)
    last = len(stack.layers) - 1
    for index, (layer, (k_cache, v_cache)) in enumerate(zip(stack.layers, stack.kv_cache, strict=True)):
        hidden = attend(ops.linear(hidden, layer.qkv), layer, k_cache, v_cache)
        if index == last:  # after the last attention no token needs another one: only the wanted rows go on
            hidden, residual = hidden[rows], residual[rows]
        hidden = all_reduce(ops.linear(hidden, layer.o))
        hidden = ops.add_rms_norm(hidden, residual, layer.mlp_norm, stack.eps)
        hidden = all_reduce(ops.linear(ops.linear_silu_mul(hidden, layer.gate_up), layer.down))
        next_norm = stack.final_norm if index == last else stack.layers[index + 1].input_norm
        hidden = ops.add_rms_norm(hidden, residual, next_norm, stack.eps)
    return hidden


def identity(values: Tensor) -> Tensor:
    """Return the values: the all-reduce of layers that one process holds alone."""
    return values
