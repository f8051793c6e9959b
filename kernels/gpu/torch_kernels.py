"""Kernels in plain torch, in place of kernels of Triton that give wrong results on this device.

Each function has the name, the arguments and the result of the kernel that it replaces; `kernel_table` says which of
them can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.fp8_matmul import TritonFp8Linear
from quire.kernels.gpu.grouped_matmul import TritonGroupedLinear
from quire.kernels.gpu.moe import PLAIN, ExpertMatrix, TritonMoE
from quire.kernels.grouped_weight import unpacked_words
from quire.kernels.moe import route
from quire.kernels.ops import PackedLinear
from quire.kernels.reference import ReferenceOps, indexable
from quire.kernels.reference import penalise as penalise
from quire.kernels.reference_linear import ReferenceLinear, ReferenceMoE, reference_moe

COLUMNS_AT_ONCE = 8192  # of a product whose weights are expanded first


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(token_ids, table)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up, out=out)


def gelu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keep_k: bool = False,
    v_norm: Tensor | None = None,
) -> Tensor:
    reference = ReferenceOps(qkv.device, qkv.dtype, k_cache.dtype)
    caches, heads = (k_cache, v_cache), (num_heads, num_kv_heads)
    q = reference.rope_and_cache(qkv, positions, cos_sin, slot_mapping, *caches, *heads, q_norm, k_norm, eps, v_norm)
    if keep_k and num_kv_heads:
        k = qkv.view(len(qkv), -1, k_cache.shape[3])[:, num_heads : num_heads + num_kv_heads]
        as_queries = torch.cat([k, k, k], dim=1).flatten(1)
        nowhere = torch.full_like(slot_mapping, -1)
        k.copy_(
            reference.rope_and_cache(
                as_queries, positions, cos_sin, nowhere, *caches, num_kv_heads, num_kv_heads, k_norm, None, eps
            )
        )
        if v_norm is not None:
            v = qkv.view(len(qkv), -1, k_cache.shape[3])[:, num_heads + num_kv_heads :]
            v.copy_(rms_norm(v, None, v_norm, eps))
    return q


def grouped_matmul(
    x: Tensor, packed: TritonGroupedLinear, out: Tensor | None, out_dtype: torch.dtype, invariant: bool = False
) -> Tensor:
    assert not invariant, "the batch-invariant mode replaces no kernel"
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    weights = (
        unpacked_words(words, packed.kind, packed.in_features).dequantized(x.dtype)
        for words in torch.split(packed.words, COLUMNS_AT_ONCE)
    )
    return _product(x, weights, packed.bias, out, out_dtype)


def fp8_matmul(x: Tensor, packed: TritonFp8Linear, out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply with activations that are not rounded, as if the user had asked for FP8 weights alone."""
    parts = (torch.split(whole, COLUMNS_AT_ONCE) for whole in (packed.weight, packed.scales.T))
    weights = ((codes.float() * scales).to(x.dtype) for codes, scales in zip(*parts, strict=True))
    return _product(x, weights, packed.bias, out, out_dtype)


def _product(
    x: Tensor, weights: Iterable[Tensor], bias: Tensor | None, out: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return x [T, K] times weights of several parts [., K] side by side, as [T, N] of out_dtype."""
    wide = x.to(out_dtype)
    product = torch.cat([F.linear(wide, rows.to(out_dtype)) for rows in weights], dim=-1)
    if bias is not None:
        product += bias
    return product if out is None else out.copy_(product)


def moe(x: Tensor, packed: TritonMoE, logits: Tensor, out: Tensor, invariant: bool = False) -> Tensor:
    assert not invariant, "the batch-invariant mode replaces no kernel"

    def part(matrix: ExpertMatrix, number: int) -> ReferenceLinear:
        weight = matrix.weight[number]
        if matrix.kind != PLAIN:
            weight = unpacked_words(weight, matrix.kind, matrix.in_features).dequantized(x.dtype)
        return ReferenceLinear(weight, None if matrix.bias is None else matrix.bias[number])

    def product(rows: Tensor, linear: PackedLinear) -> Tensor:
        assert isinstance(linear, ReferenceLinear)
        return F.linear(rows, linear.weight, linear.bias)

    experts = ReferenceMoE(
        packed.routing,
        packed.router,
        [(part(packed.gate_up, number), part(packed.down, number)) for number in range(packed.routing.num_experts)],
    )
    ids, weights = route(logits, packed.routing, packed.scales)
    return out.copy_(reference_moe(x, ids, weights, experts, product))


def argmax(logits: Tensor) -> Tensor:
    return ReferenceOps(logits.device).argmax(logits)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    return ReferenceOps(logits.device).sample(logits, temperature, top_k, top_p, min_p, uniform)


def best_ids(logits: Tensor, count: int) -> Tensor:
    return ReferenceOps(logits.device).top_logprobs(logits, count)[1]


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    reference = ReferenceOps(logits.device)
    return torch.stack([reference.logprobs_of(logits, column.contiguous()) for column in ids.unbind(1)], dim=1)


class TorchBlockMover:
    """Copies blocks of all caches, as `block_moves.BlockMover` does."""

    def __init__(self, caches: list[Tensor]) -> None:
        self._caches = [indexable(cache) for cache in caches]

    def copy(self, src: Tensor, dst: Tensor) -> None:
        for cache in self._caches:
            cache[dst] = cache[src]

    def swap_out(self, host: Tensor, src: Tensor, dst: Tensor) -> None:
        for blocks, cache in zip(indexable(host).flatten(1, 2).unbind(1), self._caches, strict=True):
            blocks[dst] = cache[src].to(host.device)

    def swap_in(self, host: Tensor, src: Tensor, dst: Tensor) -> None:
        for blocks, cache in zip(indexable(host).flatten(1, 2).unbind(1), self._caches, strict=True):
            cache[dst] = blocks[src].to(cache.device)
