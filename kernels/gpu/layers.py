"""`decoder_layers` of the Triton kernels: attention is planned once, and the keys of new prompts stay at hand."""

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.gpu.attention import AttentionPlan
from quire.kernels.gpu.blocks import BlockTable
from quire.kernels.gpu.limits import check_cache_shape, check_group
from quire.kernels.layers import Caches, Stack, identity


class TritonCaches:
    """Checked caches, and their addresses."""

    def __init__(self, stack: Caches | Stack, kv_dtype: torch.dtype) -> None:
        caches = [cache for pair in stack.kv_cache for cache in pair]
        if any(cache.dtype is not kv_dtype for cache in caches):
            raise TypeError(f"a cache is {next(c.dtype for c in caches if c.dtype is not kv_dtype)}, not {kv_dtype}")
        shape = stack.check_caches(None, kv_dtype)
        check_cache_shape(shape[2], shape[3])
        self.num_blocks, self.block_shape = stack.num_blocks, stack.block_shape
        self._kept = stack
        self.blocks = BlockTable(caches)


class TritonStack(TritonCaches):
    """A checked stack, and the addresses of its caches."""

    def __init__(self, stack: Stack, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        super().__init__(stack, kv_dtype)
        likeness = stack
        if kv_dtype is not dtype:  # the checks know one dtype: show them the shapes alone
            shapes = [tuple(torch.empty_like(c, dtype=dtype, device="meta") for c in pair) for pair in stack.kv_cache]
            rest = stack.cos_sin, stack.num_heads, stack.num_kv_heads, stack.eps, stack.scale
            likeness = Stack(stack.layers, stack.final_norm, shapes, *rest)
        self.hidden, shape = likeness.check(dtype)
        check_group(stack.num_heads, stack.num_kv_heads, shape[3], dtype)
        for name in ("qkv", "o", "gate_up", "down"):
            for layer in stack.layers:
                packed = getattr(layer, name)
                if packed.gate_up != (name == "gate_up") or packed.weight.dtype is not dtype:
                    raise ValueError(f"{name} was packed for another use or another dtype")
        self.stack = stack


def run(
    ops,  # TritonOps, which imports this
    residual: Tensor,
    packed: TritonStack,
    positions: Tensor,
    slot_mapping: Tensor,
    step: AttentionPlan,
    rows: Tensor,
) -> Tensor:
    """The operations of kernels.layers.run, in its order."""
    stack = packed.stack
    all_reduce = stack.ranks.all_reduce if stack.ranks else identity
    heads, kv_heads, eps = stack.num_heads, stack.num_kv_heads, stack.eps
    d = stack.kv_cache[0][0].shape[3]
    tokens = residual.shape[0]
    step.split = tokens > len(step.seq_lens) and not step.device.invariant
    hidden = ops.rms_norm(residual, stack.layers[0].input_norm, eps)
    last = len(stack.layers) - 1
    for index, (layer, caches) in enumerate(zip(stack.layers, stack.kv_cache, strict=True)):
        qkv = ops.linear(hidden, layer.qkv)
        norms = layer.q_norm, layer.k_norm, eps
        where = positions, stack.cos_sin, slot_mapping
        q = ops.rope_and_cache_kernel(qkv, *where, *caches, heads, kv_heads, *norms, keep_k=step.split)
        fresh = tuple(qkv.view(tokens, -1, d)[:, heads:].split(kv_heads, dim=1)) if step.split else None
        mixed = torch.empty_like(q)
        step.attend(q, *caches, stack.scale, layer.sliding_window, mixed, fresh)
        hidden = mixed.view(tokens, heads * d)
        if index == last:  # no token attends to what follows: only the wanted rows go on
            hidden, residual = hidden[rows], residual[rows]
        hidden = all_reduce(ops.linear(hidden, layer.o))
        hidden = ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
        hidden = all_reduce(ops.linear(ops.linear_silu_mul(hidden, layer.gate_up), layer.down))
        next_norm = stack.final_norm if index == last else stack.layers[index + 1].input_norm
        hidden = ops.add_rms_norm(hidden, residual, next_norm, eps)
    return hidden


def check_step(
    packed: TritonStack, dtype: torch.dtype, residual: Tensor, positions: Tensor, slot_mapping: Tensor, rows: Tensor
) -> None:
    checks.tensor("residual", residual, dtype, (residual.shape[0], packed.hidden))
    checks.tensor("positions", positions, torch.int32, (residual.shape[0],))
    checks.integers("slot_mapping", slot_mapping, (residual.shape[0],))
    checks.tensor("rows", rows, torch.int64, (rows.shape[0],))
