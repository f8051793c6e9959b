"""What every implementation demands of its arguments: a wrong call gets an exception that names the argument.

These run on each call, some hundred times per model step, so the good case is a few comparisons.
"""

import torch
from torch import Tensor

_INTEGERS = (torch.int32, torch.int64)


def tensor(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if value.dtype is dtype and value.shape == shape and value.is_contiguous():
        return
    if value.dtype is not dtype:
        raise TypeError(f"{name} is {value.dtype}, not {dtype}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, not {shape}")
    raise ValueError(f"{name} is not contiguous")


def integers(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {value.dtype}, not torch.int32 or torch.int64")
    tensor(name, value, value.dtype, shape)


def address(value: Tensor | None) -> int | None:
    """Where a tensor's values lie, for a C function."""
    if value is None:
        return None
    if not value.is_cpu:
        raise ValueError(f"a tensor lies on {value.device}, not on the CPU")
    return value.data_ptr()


def linear_weights(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, halves: bool = False) -> None:
    if weight.dim() != 2 or 0 in weight.shape or (halves and weight.shape[0] % 2):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, not [{'2I' if halves else 'N'}, K]")
    tensor("weight", weight, dtype, weight.shape)
    if bias is not None:
        tensor("bias", bias, dtype, (weight.shape[0],))


def rows(x: Tensor, width: int, dtype: torch.dtype) -> None:
    tensor("x", x, dtype, (x.shape[0], width))


def token_ids(ids: Tensor, table: Tensor, dtype: torch.dtype) -> None:
    integers("token_ids", ids, (ids.shape[0],))
    tensor("table", table, dtype, (table.shape[0], table.shape[-1]))


def norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    tensor("x", x, dtype, x.shape)
    tensor("weight", weight, dtype, (x.shape[-1],))


def same_rows(x: Tensor, residual: Tensor, dtype: torch.dtype) -> None:
    tensor("x", x, dtype, x.shape)
    tensor("residual", residual, dtype, x.shape)


def cache_shape(block_size: int, head_dim: int, dtype: torch.dtype | None, own: torch.dtype) -> None:
    if dtype not in (None, own):
        raise TypeError(f"the cache is asked for as {dtype}, but these operations compute in {own}")
    if block_size not in (8, 16, 32, 64, 128):
        raise ValueError(f"block_size is {block_size}: it must be 8, 16, 32, 64 or 128")
    if head_dim % 16 or not 16 <= head_dim <= 512:
        raise ValueError(f"head_dim is {head_dim}: it must be a multiple of 16, at most 512")


def caches(k: Tensor, v: Tensor, kv_heads: int | None, dtype: torch.dtype) -> torch.Size:
    """Returns (blocks, H_kv, block_size, D)."""
    shape = k.shape
    if len(shape) != 4 or kv_heads not in (None, shape[1]):
        raise ValueError(f"k_cache has shape {tuple(shape)}, not [blocks, {kv_heads or 'H_kv'}, block_size, D]")
    tensor("k_cache", k, dtype, shape)
    tensor("v_cache", v, dtype, shape)
    cache_shape(shape[2], shape[3], None, dtype)
    return shape


def rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
    d: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    dtype: torch.dtype,
) -> None:
    count = qkv.shape[0]
    tensor("qkv", qkv, dtype, (count, (heads + 2 * kv_heads) * d))
    tensor("positions", positions, torch.int32, (count,))
    tensor("cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], d))
    integers("slot_mapping", slots, (count,))
    if q_norm is not None:
        tensor("q_norm", q_norm, dtype, (d,))
    if k_norm is not None:
        tensor("k_norm", k_norm, dtype, (d,))


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
) -> None:
    shape = q.shape
    if len(shape) != 3 or shape[1] % kv_heads or shape[2] != d:
        raise ValueError(f"q has shape {tuple(shape)}, not [T, a multiple of {kv_heads}, {d}]")
    tensor("q", q, dtype, shape)
    sequences(block_tables, seq_lens, query_start_loc)
    if not scale > 0:
        raise ValueError(f"scale is {scale}: it must be positive")
    if window < 0:
        raise ValueError(f"sliding_window is {window}: it must be 0 (none) or positive")


def sequences(block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> None:
    count = seq_lens.shape[0]
    tensor("seq_lens", seq_lens, torch.int32, (count,))
    tensor("query_start_loc", query_start_loc, torch.int32, (count + 1,))
    tensor("block_tables", block_tables, torch.int32, (count, block_tables.shape[-1]))


def no_such_slot(token: int, positions: Tensor, max_position: int, slots: Tensor, slot_count: int) -> str:
    return (
        f"token {token}: position {int(positions[token])} of {max_position} or "
        f"slot {int(slots[token])} of {slot_count} does not exist"
    )


def no_such_blocks(sequence: int, block_count: int) -> str:
    return f"sequence {sequence}: its lengths or its block table do not fit the cache of {block_count} blocks"


def block_moves(src: Tensor, dst: Tensor, src_count: int, dst_count: int) -> tuple[list[int], list[int]]:
    """Returns src and dst as lists."""
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
    sources, destinations = block_moves(src, dst, count, count)
    if not set(destinations).isdisjoint(sources):
        raise ValueError("dst names a block that src names too")


def host_blocks(host: Tensor, block_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor("host", host, dtype, (host.shape[0], *block_shape))
    if not host.is_cpu:
        raise ValueError(f"host lies on {host.device}, not in host memory")


def logits(value: Tensor) -> None:
    if value.dim() != 2 or value.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(value.shape)}, not [R, V]")
    tensor("logits", value, torch.float32, value.shape)


def sampling(value: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> None:
    logits(value)
    count = (len(value),)
    tensor("temperature", temperature, torch.float32, count)
    tensor("top_k", top_k, torch.int32, count)
    tensor("top_p", top_p, torch.float32, count)
    tensor("min_p", min_p, torch.float32, count)
    tensor("uniform", uniform, torch.float64, count)


def top_logprobs(value: Tensor, count: int) -> None:
    logits(value)
    if not 1 <= count <= value.shape[1]:
        raise ValueError(f"count is {count}: it must be 1..{value.shape[1]}")


def logprobs_of(value: Tensor, ids: Tensor) -> None:
    logits(value)
    integers("ids", ids, (value.shape[0],))


def no_such_id(row: int, ids: Tensor, vocabulary: int) -> str:
    return f"ids[{row}] is {int(ids[row])}, outside 0..{vocabulary - 1}"
