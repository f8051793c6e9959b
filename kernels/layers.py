"""The layers of a decoder as a sequence of operations: the definition of `Ops.decoder_layers`."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import checks
from quire.kernels.interrupt import Interrupt
from quire.kernels.lora import AdaptedRows, AdapterBatch, OwnNorms, RowsWithAdapters
from quire.kernels.moe import SILU
from quire.kernels.ops import AddedRows, DecoderLayer, Ops, PackedLinear, PerLayerInput
from quire.kernels.stack import Stack

# The attention of layer i: (i, qkv [T, (H + 2 H_kv) * D], rows with norms of their own) -> [T, H * D].
Attend = Callable[[int, Tensor, OwnNorms | None], Tensor]


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
    layer_inputs: Tensor | None = None,
    added: AddedRows | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """Compute `Ops.decoder_layers` with single operations of `ops`. Arguments, result and errors as there."""
    checks.tensor("rows", rows, torch.int64, (rows.shape[0],))

    stack.check_inputs(layer_inputs, len(residual), ops.dtype)

    def attend(index: int, qkv: Tensor, own: OwnNorms | None) -> Tensor:
        layer, (k_cache, v_cache) = stack.layers[index], stack.kv_cache[index]

        def rope(qkv: Tensor, at: Tensor, slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
            return ops.rope_and_cache(
                qkv,
                at,
                stack.tables_of(index),
                slots,
                k_cache,
                v_cache,
                stack.num_heads,
                0 if layer.shares_kv else k_cache.shape[1],
                q_norm,
                k_norm,
                stack.eps,
                layer.v_norm,
            )

        q = rope_rows(rope, index, qkv, positions, slot_mapping, layer, own)
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
            key_ends=key_ends if layer.uses_key_ends else None,
        )

    return run_layers_with(ops, residual, stack, rows, attend, adapters, interrupt, AdaptedRows, layer_inputs, added)


# Rotates the heads of some rows and stores keys and values: (qkv, positions, slots, q_norm, k_norm) -> q.
Rope = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def rope_rows(
    rope: Rope, index: int, qkv: Tensor, positions: Tensor, slots: Tensor, layer: DecoderLayer, own: OwnNorms | None
) -> Tensor:
    """Call `rope` for all rows, and again for those whose adapters have norms of heads of their own."""
    again = list(own.of(index, "q_norm", "k_norm")) if own else []
    given = [qkv[rows] for rows, _ in again]  # `rope` may change keys in place
    q = rope(qkv, positions, slots, layer.q_norm, layer.k_norm)
    for (rows, (q_norm, k_norm)), part in zip(again, given, strict=True):
        q_norm, k_norm = layer.q_norm if q_norm is None else q_norm, layer.k_norm if k_norm is None else k_norm
        q[rows] = rope(part, positions[rows], slots[rows], q_norm, k_norm)
        qkv[rows] = part
    return q


def run_layers_with(
    ops: Ops,
    residual: Tensor,
    stack: Stack,
    rows: Tensor,
    attend: Attend,
    adapters: AdapterBatch | None = None,
    interrupt: Interrupt | None = None,
    adapted_rows: type[RowsWithAdapters] = AdaptedRows,
    layer_inputs: Tensor | None = None,
    added: AddedRows | None = None,
) -> Tensor:
    """Compute all layers, with the rotation, the cache write and the attention of each layer left to `attend`.

    residual [T, hidden] is overwritten; rows [R] int64: the tokens whose output is wanted. adapted_rows: computes the
    products of adapters. Returns [R, hidden].
    """
    all_reduce = stack.ranks.all_reduce if stack.ranks else identity
    last = len(stack.layers) - 1
    adapted = adapted_rows(adapters.adapters, adapters.tokens, residual.device) if adapters else None
    own = OwnNorms(adapters.adapters, adapters.tokens, residual.device) if adapters else None

    def norm(at: int, name: str, x: Tensor, weight: Tensor, to: Tensor | None = None) -> Tensor:
        """Compute a norm of layer `at` of x, or of `to` after x is added to it."""
        out = ops.rms_norm(x, weight, stack.eps) if to is None else ops.add_rms_norm(x, to, weight, stack.eps)
        for rows, (of_adapter,) in own.of(at, name) if own else ():
            assert of_adapter is not None
            out[rows] = ops.rms_norm((x if to is None else to)[rows], of_adapter, stack.eps)
        return out

    hidden = norm(0, "input_norm", residual, stack.layers[0].input_norm)
    for index, layer in enumerate(stack.layers):
        if interrupt is not None:
            interrupt.check()
        qkv = ops.linear(hidden, layer.qkv)
        if adapted:
            adapted.apply(index, "qkv", hidden, qkv)
        hidden = attend(index, qkv, own)
        if index == last:  # after the last attention no token needs another one: only the wanted rows go on
            hidden, residual = hidden[rows], residual[rows]
            layer_inputs = None if layer_inputs is None else layer_inputs[rows]
            adapted = adapted_rows(adapters.adapters, adapters.wanted, residual.device) if adapters else None
            own = OwnNorms(adapters.adapters, adapters.wanted, residual.device) if adapters else None
        attended, hidden = hidden, ops.linear(hidden, layer.o)
        if adapted:
            adapted.apply(index, "o", attended, hidden)
        hidden = all_reduce(hidden)
        if layer.post_attention_norm is not None:
            hidden = norm(index, "post_attention_norm", hidden, layer.post_attention_norm)
        hidden = norm(index, "mlp_norm", hidden, layer.mlp_norm, residual)
        if layer.moe is not None and layer.expert_norms is None:
            hidden = all_reduce(ops.moe(hidden, layer.moe))
        elif adapted:
            hidden = _adapted_mlp(ops, hidden, layer, adapted, index)
        else:
            assert layer.gate_up is not None
            assert layer.down is not None
            gated = ops.linear_silu_mul if layer.gate == SILU else ops.linear_gelu_mul
            hidden = all_reduce(ops.linear(gated(hidden, layer.gate_up), layer.down))
        if layer.expert_norms is not None:
            hidden = _with_experts(ops, hidden, residual, layer, stack.eps, all_reduce)
        if layer.post_mlp_norm is not None:
            hidden = norm(index, "post_mlp_norm", hidden, layer.post_mlp_norm)
        if layer.per_layer_input is not None:
            assert layer_inputs is not None
            residual += hidden
            hidden = _own_input(ops, residual, layer_inputs[:, index], layer.per_layer_input, stack.eps)
        next_norm = stack.final_norm if index == last else stack.layers[index + 1].input_norm
        is_added = added is not None and index < len(added.values)
        if layer.output_scale == 1.0 and not is_added:
            hidden = norm(index + 1, "input_norm", hidden, next_norm, residual)
        else:
            residual += hidden
            residual *= layer.output_scale
            if added is not None and is_added:
                residual.index_add_(0, added.rows, added.values[index])
            hidden = norm(index + 1, "input_norm", residual, next_norm)
    return hidden


def _with_experts(
    ops: Ops, mlp: Tensor, residual: Tensor, layer: DecoderLayer, eps: float, all_reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the output of the MLP plus that of the experts, which start from the residual, each after its norm."""
    norms = layer.expert_norms
    assert norms is not None
    assert layer.moe is not None
    router_input = ops.rms_norm(residual, norms.router, eps)
    experts = all_reduce(ops.moe(ops.rms_norm(residual, norms.experts, eps), layer.moe, None, router_input))
    return ops.rms_norm(mlp, norms.mlp_output, eps) + ops.rms_norm(experts, norms.experts_output, eps)


def _own_input(ops: Ops, residual: Tensor, inputs: Tensor, end: PerLayerInput, eps: float) -> Tensor:
    """Return what `PerLayerInput` adds to the residual [R, hidden]. inputs [R, P]."""
    gated = F.gelu(ops.linear(residual, end.gate), approximate="tanh") * inputs
    return ops.rms_norm(ops.linear(gated, end.projection), end.norm, eps)


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
