"""Sequences with random keys and values in a paged cache whose unused memory is poisoned."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import Ops
from tests.kernels import oracle

FP8 = torch.float8_e4m3fn
GARBAGE = 2**31 - 1  # a block id that must never be read


@dataclass
class Paged:
    """The last queries[s] of lengths[s] tokens of each sequence are this step's."""

    ops: Ops
    lengths: list[int]
    queries: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    kv_scales: tuple[float, float] = (1.0, 1.0)  # what a cache of fp8 is multiplied with

    def __post_init__(self) -> None:
        d, dtype = self.head_dim, self.ops.dtype
        self.scale = d**-0.5
        self.q = [torch.randn(n, self.heads, d).to(dtype) for n in self.lengths]
        self.kv = [torch.randn(2, n, self.kv_heads, d).to(dtype) for n in self.lengths]
        if self.is_fp8:  # round here, so that the cache holds just this
            scales = torch.tensor(self.kv_scales)[:, None, None, None]
            self.kv = [((x / scales).to(FP8).to(torch.float32) * scales).to(dtype) for x in self.kv]
        needed = [-(-n // self.block_size) for n in self.lengths]
        spare = 3
        ids = torch.randperm(sum(needed) + spare, dtype=torch.int32).split([*needed, spare])
        self.tables = torch.full((len(needed), max(needed) + 2), GARBAGE, dtype=torch.int32)
        for s, blocks in enumerate(ids[:-1]):
            self.tables[s, : len(blocks)] = blocks
        self.k_cache, self.v_cache = self.ops.alloc_kv_cache(sum(needed) + spare, self.kv_heads, self.block_size, d)
        self.k_cache.fill_(float("nan"))
        self.v_cache.fill_(float("nan"))
        for s in range(len(needed)):
            self.write(s)

    @property
    def is_fp8(self) -> bool:
        return self.ops.kv_dtype == FP8

    def write(self, s: int) -> None:
        """Puts keys and values into the cache by the operation itself; an angle of zero leaves keys as they are."""
        n = self.lengths[s]
        k, v = self.kv[s]
        at = torch.arange(n)
        if self.ops.name == "triton":  # the order in a block is the plain one, and the interpreter slow
            block, offset = self.tables[s, at // self.block_size].long(), at % self.block_size
            for cache, x, scale in zip((self.k_cache, self.v_cache), (k, v), self.kv_scales, strict=True):
                if self.is_fp8:  # torch has no such assignment for it
                    cache.view(torch.uint8)[block, :, offset] = (x / scale).to(FP8).view(torch.uint8)
                else:
                    cache[block, :, offset] = x
            return
        qkv = torch.cat([self.q[s], k, v], dim=1).flatten(1)
        slots = self.tables[s, at // self.block_size].long() * self.block_size + at % self.block_size
        still = torch.zeros(n, self.head_dim)
        still[:, : self.head_dim // 2] = 1
        heads = self.heads, self.kv_heads
        self.ops.rope_and_cache(qkv, at.int(), still, slots, self.k_cache, self.v_cache, *heads)

    def attend(self, order: list[int] | None = None, queries: list[int] | None = None, times: int = 0) -> list[Tensor]:
        """One call over the sequences in `order`; returns the rows of each. times: calls with one plan, the last one's
        result is returned."""
        order = list(range(len(self.lengths))) if order is None else order
        queries = self.queries if queries is None else queries
        counts = [queries[s] for s in order]
        q = torch.cat([self.q[s][self.lengths[s] - queries[s] : self.lengths[s]] for s in order])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor([self.lengths[s] for s in order], dtype=torch.int32)
        out = torch.full((len(q), self.heads * self.head_dim), float("nan")).to(self.ops.dtype)
        tables = self.tables[order].contiguous(), seq_lens, starts
        plan = self.ops.plan_attention(*tables) if times else None
        for _ in range(times - 1):  # of other layers: their windows may differ
            other = 0 if self.window else 20
            self.ops.paged_attention(-q, self.k_cache, self.v_cache, *tables, self.scale / 2, other, plan=plan)
        caches = self.k_cache, self.v_cache
        given = self.ops.paged_attention(q, *caches, *tables, self.scale, self.window, out, plan)
        assert given.data_ptr() == out.data_ptr()
        return list(out.split(counts))

    def exact(self, s: int) -> Tensor:
        k, v = self.kv[s]
        return oracle.attention(self.q[s][self.lengths[s] - self.queries[s] :], k, v, self.scale, self.window)
