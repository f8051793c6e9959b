"""Argument checks that all implementations share. A wrong argument raises an exception that names it.

Errors: TypeError for a dtype, ValueError for a shape, layout, device or parameter, IndexError for an id. The checks run
on each call, some hundred times per model step, so a correct argument costs a few comparisons only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.moe import Routing
from quire.kernels.quantization import QuantizedWeight
from quire.kernels.weights import CodedWeight, LinearWeight

if TYPE_CHECKING:
    from quire.kernels.ops import PackedLinear

_INTEGERS = (torch.int32, torch.int64)
# A row of an int8 cache, the key or value of a token, ends with its scale in float32: `Ops.alloc_kv_cache`.
SCALE_BYTES = 4


def tensor(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check that `value` is contiguous and has this dtype and shape. `name` is for the message."""
    if value.dtype is dtype and value.shape == shape and value.is_contiguous():
        return
    if value.dtype is not dtype:
        raise TypeError(f"{name} is {value.dtype}, not {dtype}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, not {shape}")
    raise ValueError(f"{name} is not contiguous")


def one_of(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """Check that `value` is contiguous and has one of these dtypes, and this shape."""
    if value.dtype not in dtypes:
        raise TypeError(f"{name} is {value.dtype}, not {' or '.join(map(str, dtypes))}")
    tensor(name, value, value.dtype, shape)


def integers(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Check a contiguous int32 or int64 tensor of this shape."""
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {value.dtype}, not torch.int32 or torch.int64")
    tensor(name, value, value.dtype, shape)


def address(value: Tensor | None) -> int | None:
    """Return the address of a tensor's values, for a C function; None for None. Raises ValueError off the CPU."""
    if value is None:
        return None
    if not value.is_cpu:
        raise ValueError(f"a tensor is on {value.device}, not on the CPU")
    return value.data_ptr()


def linear_weights(
    weight: LinearWeight,
    dtypes: tuple[torch.dtype, ...],
    bits: tuple[int, ...],
    kinds: tuple[str, ...],
    halves: bool = False,
) -> None:
    """Check weight [N, K]. halves: N is even, I gate rows and then I up rows.

    dtypes, bits, kinds: `weight_dtypes`, `quantized_bits` and `code_kinds` of the implementation.
    """
    shape = weight.shape
    if len(shape) != 2 or 0 in shape or (halves and shape[0] % 2):
        raise ValueError(f"weight has shape {tuple(shape)}, not [{'2I' if halves else 'N'}, K]")
    if isinstance(weight, CodedWeight):
        if weight.kind not in kinds:
            raise TypeError(f"weight is {weight.kind}, which these kernels do not support")
    elif not isinstance(weight, QuantizedWeight):
        one_of("weight", weight, dtypes, shape)
    elif weight.bits not in bits:
        raise TypeError(f"weight has {weight.bits} bits, which these kernels do not support")


def linear_bias(bias: Tensor | None, dtypes: tuple[torch.dtype, ...], shape: Sequence[int]) -> None:
    """Check bias [N] of weights of the shape [N, K]."""
    if bias is not None:
        one_of("bias", bias, dtypes, (shape[0],))


def router(packed: PackedLinear, routing: Routing) -> None:
    """Check that a router has a logit for each expert."""
    if packed.out_features != routing.num_experts:
        raise ValueError(f"the router has {packed.out_features} logits, not {routing.num_experts}")


def rows(x: Tensor, width: int, dtype: torch.dtype) -> None:
    """Check x [T, width]."""
    tensor("x", x, dtype, (x.shape[0], width))


def token_ids(ids: Tensor, table: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check ids [T] of any value, and table [V, H]. dtypes: `weight_dtypes` of the implementation."""
    integers("token_ids", ids, (ids.shape[0],))
    one_of("table", table, dtypes, (table.shape[0], table.shape[-1]))


def norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Check x [..., H] and weight [H]."""
    tensor("x", x, dtype, x.shape)
    tensor("weight", weight, dtype, (x.shape[-1],))


def same_rows(x: Tensor, residual: Tensor, dtype: torch.dtype) -> None:
    """Check that x and residual have the same shape and dtype."""
    tensor("x", x, dtype, x.shape)
    tensor("residual", residual, dtype, x.shape)


def cache_shape(block_size: int, head_dim: int) -> None:
    """Check that the contract allows caches of this block size and head dimension."""
    if block_size not in (8, 16, 32, 64, 128):
        raise ValueError(f"block_size is {block_size}: it must be 8, 16, 32, 64 or 128")
    if head_dim % 16 or not 16 <= head_dim <= 512:
        raise ValueError(f"head_dim is {head_dim}: it must be a multiple of 16, at most 512")


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the last dimension of a cache of this dtype."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def caches(k: Tensor, v: Tensor, kv_heads: int | None, dtype: torch.dtype) -> torch.Size:
    """Check k and v, and return [blocks, H_kv, block_size, D]. kv_heads: H_kv, None for any number."""
    shape = k.shape
    if len(shape) != 4 or kv_heads not in (None, shape[1]):
        raise ValueError(f"k_cache has shape {tuple(shape)}, not [blocks, {kv_heads or 'H_kv'}, block_size, D]")
    tensor("k_cache", k, dtype, shape)
    tensor("v_cache", v, dtype, shape)
    if dtype is torch.int8:
        shape = torch.Size((*shape[:3], shape[3] - SCALE_BYTES))
    cache_shape(shape[2], shape[3])
    return shape


def rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
    d: int,
    norms: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Check the arguments of `Ops.rope_and_cache`, other than its caches.

    d: the head dimension. norms: of queries, keys and values.
    """
    count = qkv.shape[0]
    tensor("qkv", qkv, dtype, (count, (heads + 2 * kv_heads) * d))
    tensor("positions", positions, torch.int32, (count,))
    tensor("cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], d))
    integers("slot_mapping", slots, (count,))
    for name, norm in zip(("q_norm", "k_norm", "v_norm"), norms, strict=True):
        if norm is not None:
            tensor(name, norm, dtype, (d,))


def attention(
    q: Tensor,
    kv_heads: int,
    d: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    dtype: torch.dtype,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    ends: Tensor | None = None,
) -> None:
    """Check the arguments of `Ops.paged_attention`, other than its caches. kv_heads, d: of the caches."""
    shape = q.shape
    if len(shape) != 3 or shape[1] % kv_heads or shape[2] != d:
        raise ValueError(f"q has shape {tuple(shape)}, not [T, a multiple of {kv_heads}, {d}]")
    tensor("q", q, dtype, shape)
    sequences(block_tables, seq_lens, query_start_loc)
    if not scale > 0:
        raise ValueError(f"scale is {scale}: it must be positive")
    if window < 0:
        raise ValueError(f"sliding_window is {window}: it must be 0 (none) or positive")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}: it must be 0 (none) or positive")
    if sinks is not None:
        tensor("sinks", sinks, torch.float32, (shape[1],))
    key_ends(ends, shape[0])


def step(
    residual: Tensor, hidden: int, dtype: torch.dtype, positions: Tensor, slot_mapping: Tensor, rows: Tensor
) -> None:
    """Check the arguments of `Ops.decoder_layers` that have a value per token, and `rows`. residual [T, hidden]."""
    tokens = residual.shape[0]
    tensor("residual", residual, dtype, (tokens, hidden))
    tensor("positions", positions, torch.int32, (tokens,))
    integers("slot_mapping", slot_mapping, (tokens,))
    tensor("rows", rows, torch.int64, (rows.shape[0],))


def sequences(block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> None:
    """Check block_tables [S, max_blocks], seq_lens [S] and query_start_loc [S + 1], all int32."""
    count = seq_lens.shape[0]
    tensor("seq_lens", seq_lens, torch.int32, (count,))
    tensor("query_start_loc", query_start_loc, torch.int32, (count + 1,))
    tensor("block_tables", block_tables, torch.int32, (count, block_tables.shape[-1]))


def key_ends(ends: Tensor | None, tokens: int) -> None:
    """Check the argument key_ends [T] int32 of attention."""
    if ends is not None:
        tensor("key_ends", ends, torch.int32, (tokens,))


def no_such_slot(token: int, positions: Tensor, max_position: int, slots: Tensor, slot_count: int) -> str:
    """Return the message for a token whose position or slot is out of range."""
    return (
        f"token {token}: position {int(positions[token])} of {max_position} or "
        f"slot {int(slots[token])} of {slot_count} does not exist"
    )


def no_such_blocks(sequence: int, block_count: int) -> str:
    """Return the message for a sequence whose lengths or blocks are out of range."""
    return f"sequence {sequence}: its lengths or its block table do not fit the cache of {block_count} blocks"


def block_moves(src: Tensor, dst: Tensor, src_count: int, dst_count: int) -> tuple[list[int], list[int]]:
    """Check block ids [n] int64 and return them as lists. src_count, dst_count: blocks that exist on each side."""
    tensor("src", src, torch.int64, (src.shape[0],))
    tensor("dst", dst, torch.int64, (src.shape[0],))
    sources, destinations = src.tolist(), dst.tolist()
    for name, ids, count in (("src", sources, src_count), ("dst", destinations, dst_count)):
        if ids and not 0 <= min(ids) <= max(ids) < count:
            raise IndexError(f"{name} names a block outside 0..{count - 1}")
    if len(set(destinations)) < len(destinations):
        raise ValueError("dst names a block twice")
    return sources, destinations


def block_copies(src: Tensor, dst: Tensor, count: int) -> None:
    """Check block ids of a copy within caches of `count` blocks."""
    sources, destinations = block_moves(src, dst, count, count)
    if not set(destinations).isdisjoint(sources):
        raise ValueError("dst names a block that src names too")


def host_blocks(host: Tensor, block_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check host memory for swapped blocks: [num_blocks, *block_shape] on the CPU."""
    tensor("host", host, dtype, (host.shape[0], *block_shape))
    if not host.is_cpu:
        raise ValueError(f"host is on {host.device}, not in host memory")


def logits(value: Tensor) -> None:
    """Check logits [R, V] float32."""
    if value.dim() != 2 or value.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(value.shape)}, not [R, V]")
    tensor("logits", value, torch.float32, value.shape)


def sampling(value: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> None:
    """Check logits [R, V] and the parameters [R] of `Ops.sample`."""
    logits(value)
    count = (len(value),)
    tensor("temperature", temperature, torch.float32, count)
    tensor("top_k", top_k, torch.int32, count)
    tensor("top_p", top_p, torch.float32, count)
    tensor("min_p", min_p, torch.float32, count)
    tensor("uniform", uniform, torch.float64, count)


def top_logprobs(value: Tensor, count: int) -> None:
    """Check logits [R, V], and count in 1..V."""
    logits(value)
    if not 1 <= count <= value.shape[1]:
        raise ValueError(f"count is {count}: it must be 1..{value.shape[1]}")


def logprobs_of(value: Tensor, ids: Tensor) -> None:
    """Check logits [R, V], and ids [R] of any value."""
    logits(value)
    integers("ids", ids, (value.shape[0],))


def no_such_id(row: int, ids: Tensor, vocabulary: int) -> str:
    """Return the message for an id out of range."""
    return f"ids[{row}] is {int(ids[row])}, outside 0..{vocabulary - 1}"
