"""The operations of a latent KV cache in plain torch: the definition of correct results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import kv_values, latent
from quire.kernels.checks import cache_width, no_such_blocks
from quire.kernels.latent import LatentCaches
from quire.kernels.reference import ReferenceOps, indexable


@dataclass(frozen=True, eq=False)
class ReferenceGroups:
    """Weights [G, N, K]."""

    weights: Tensor

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes


class ReferenceLatentOps:
    """The operations of `quire.kernels.latent` for the types and the device of a `ReferenceOps`."""

    def __init__(self, ops: ReferenceOps) -> None:
        self._ops, self.dtype, self.kv_dtype = ops, ops.dtype, ops.kv_dtype

    def pack_groups(self, weights: Tensor) -> ReferenceGroups:
        latent.check_groups(weights, self.dtype)
        return ReferenceGroups(weights)

    def linear_groups(self, x: Tensor, packed: latent.PackedGroups) -> Tensor:
        assert isinstance(packed, ReferenceGroups)
        groups, _, width = packed.weights.shape
        latent.check_group_rows(x, groups, width, self.dtype)
        return torch.bmm(x, packed.weights.transpose(1, 2))

    def alloc_latent_cache(self, num_blocks: int, block_size: int, width: int) -> Tensor:
        latent.check_sizes(block_size, width)
        shape = (num_blocks, 1, block_size, cache_width(width, self.kv_dtype))
        return torch.zeros(shape, dtype=self.kv_dtype, device=self._ops.device)

    def plain_latent_cache(self, cache: Tensor) -> Tensor:
        latent.cache_shape(cache, self.kv_dtype)
        return cache.clone()

    def stack_latent_caches(self, caches: Sequence[Tensor]) -> LatentCaches:
        stack = LatentCaches((), caches)
        stack.check_caches(None, self.kv_dtype)
        return stack

    def cache_latent(self, rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
        blocks, _, block_size, width = latent.cache_shape(cache, self.kv_dtype)
        latent.check_rows(rows, slot_mapping, width, self.dtype)
        slots = slot_mapping.long()
        if (bad := ((slots < -1) | (slots >= blocks * block_size)).nonzero()).numel():
            raise IndexError(latent.no_such_slot(int(bad[0]), slot_mapping, blocks * block_size))
        keep = slots >= 0
        block, offset = slots[keep] // block_size, slots[keep] % block_size
        indexable(cache)[block, 0, offset] = indexable(kv_values.encode(rows[keep], self.kv_dtype))

    def latent_attention(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        value_dim: int,
        sliding_window: int = 0,
    ) -> Tensor:
        blocks, _, block_size, width = latent.cache_shape(cache, self.kv_dtype)
        tables = block_tables, seq_lens, query_start_loc
        latent.check_attention(q, width, value_dim, *tables, scale, sliding_window, self.dtype)
        out = q.new_empty((*q.shape[:2], value_dim))
        starts, wide = query_start_loc.tolist(), self._ops.sum_dtype
        for s, length in enumerate(seq_lens.tolist()):
            queries = q[starts[s] : starts[s + 1]].to(wide)
            first, count = length - len(queries), -(-length // block_size)
            if first < 0 or count > block_tables.shape[1]:
                raise IndexError(no_such_blocks(s, blocks))
            if len(queries) == 0:
                continue
            lowest = max(0, first - sliding_window + 1) // block_size if sliding_window else 0
            stored = indexable(cache)[block_tables[s, lowest:count].long()].view(self.kv_dtype)
            rows = kv_values.decode(stored, wide).reshape(-1, width)[: length - lowest * block_size]
            position = torch.arange(first, length, device=q.device)[:, None]
            key = torch.arange(lowest * block_size, length, device=q.device)
            seen = key <= position
            if sliding_window:
                seen &= key > position - sliding_window
            # A row that no query sees may be unwritten memory, and its weight of zero times NaN would be NaN.
            rows = rows.masked_fill(~seen.any(dim=0)[:, None], 0)
            scores = (torch.einsum("qhd,kd->qhk", queries, rows) * scale).masked_fill(~seen[:, None], float("-inf"))
            mixed = torch.einsum("qhk,kd->qhd", scores.softmax(dim=-1), rows[:, :value_dim])
            out[starts[s] : starts[s + 1]] = mixed.to(out.dtype)
        return out
