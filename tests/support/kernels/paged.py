"""Sequences with random keys and values in a paged cache, whose unused memory holds NaN."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels import Ops, kv_values
from tests.support.kernels import oracle

GARBAGE = 2**31 - 1  # a block id that must never be read


@dataclass
class Paged:
    """Sequences of lengths[s] tokens. The last queries[s] tokens of each belong to this step."""

    ops: Ops
    lengths: list[int]
    queries: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    sinks: Tensor | None = None  # [H]
    softcap: float = 0.0
    # Images: first token and end, whose queries see each other in both directions, by sequence.
    images: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        d, dtype = self.head_dim, self.ops.dtype
        self.scale = d**-0.5
        self.q = [torch.randn(n, self.heads, d).to(dtype) for n in self.lengths]
        self.sinks = None if self.sinks is None else self.sinks.to(self.q[0].device)
        self.kv = [torch.randn(2, n, self.kv_heads, d).to(dtype) for n in self.lengths]
        if self.ops.kv_dtype is torch.float8_e4m3fn:  # kernels of GPUs compute with fresh keys as they were given
            self.kv = [kv_values.decode(kv_values.encode(x, self.ops.kv_dtype), dtype) for x in self.kv]
        needed = [-(-n // self.block_size) for n in self.lengths]
        spare = 3
        ids = torch.randperm(sum(needed) + spare, dtype=torch.int32).split([*needed, spare])
        self.tables = torch.full((len(needed), max(needed) + 2), GARBAGE, dtype=torch.int32)
        for s, blocks in enumerate(ids[:-1]):
            self.tables[s, : len(blocks)] = blocks
        self.k_cache, self.v_cache = self.ops.alloc_kv_cache(sum(needed) + spare, self.kv_heads, self.block_size, d)
        for cache in (self.k_cache, self.v_cache):
            cache.view(torch.uint8).fill_(255)  # NaN, also as a scale
        for s in range(len(needed)):
            self.write(s)

    def stored(self, s: int) -> Tensor:
        """Return keys and values of sequence s as the cache stores them, [2, length, H_kv, D] float64."""
        return kv_values.decode(kv_values.encode(self.kv[s], self.ops.kv_dtype), torch.float64)

    def write(self, s: int) -> None:
        """Write keys and values with `rope_and_cache`, at an angle of zero, which leaves keys unchanged."""
        n = self.lengths[s]
        k, v = self.kv[s]
        at = torch.arange(n)
        if self.ops.name == "triton":  # blocks have the plain order, and the interpreter is slow
            block, offset = self.tables[s, at // self.block_size].long(), at % self.block_size
            for cache, x in zip((self.k_cache, self.v_cache), (k, v), strict=True):
                stored = kv_values.encode(x, self.ops.kv_dtype)
                cache.view(torch.uint8).view(*cache.shape, -1)[block, :, offset] = stored.view(torch.uint8).view(
                    *stored.shape, -1
                )
            return
        qkv = torch.cat([self.q[s], k, v], dim=1).flatten(1)
        slots = self.tables[s, at // self.block_size].long() * self.block_size + at % self.block_size
        still = torch.zeros(n, self.head_dim)
        still[:, : self.head_dim // 2] = 1
        heads = self.heads, self.kv_heads
        self.ops.rope_and_cache(qkv, at.int(), still, slots, self.k_cache, self.v_cache, *heads)

    def attend(self, order: list[int] | None = None, queries: list[int] | None = None, times: int = 0) -> list[Tensor]:
        """Call paged_attention for the sequences in `order` and return the rows of each.

        times: make that many calls with one plan, and return the result of the last; 0: one call without a plan.
        """
        order = list(range(len(self.lengths))) if order is None else order
        queries = self.queries if queries is None else queries
        counts = [queries[s] for s in order]
        q = torch.cat([self.q[s][self.lengths[s] - queries[s] : self.lengths[s]] for s in order])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor([self.lengths[s] for s in order], dtype=torch.int32)
        out = torch.full((len(q), self.heads * self.head_dim), float("nan")).to(self.ops.dtype)
        tables = self.tables[order].contiguous(), seq_lens, starts
        plan = self.ops.plan_attention(*tables) if times else None
        for _ in range(times - 1):  # calls of other layers, whose windows may differ
            other = 0 if self.window else 20
            self.ops.paged_attention(-q, self.k_cache, self.v_cache, *tables, self.scale / 2, other, plan=plan)
        caches, ends = (self.k_cache, self.v_cache), self.key_ends(order, queries)
        given = self.ops.paged_attention(
            q, *caches, *tables, self.scale, self.window, out, plan, self.sinks, self.softcap, ends
        )
        assert given.data_ptr() == out.data_ptr()
        return list(out.split(counts))

    def key_ends(self, order: list[int], queries: list[int]) -> Tensor | None:
        """Return the end of the keys that each query sees; None without images."""
        if not self.images:
            return None
        ends = []
        for s in order:
            own = torch.arange(1, self.lengths[s] + 1, dtype=torch.int32)
            for first, end in self.images.get(s, ()):
                own[first:end] = end
            ends.append(own[self.lengths[s] - queries[s] :])
        return torch.cat(ends)

    def exact(self, s: int) -> Tensor:
        """Return the rows of sequence s in float64."""
        k, v = self.stored(s)
        q, ends = self.q[s][self.lengths[s] - self.queries[s] :], self.key_ends([s], self.queries)
        return oracle.attention(q, k, v, self.scale, self.window, self.sinks, self.softcap, ends)
