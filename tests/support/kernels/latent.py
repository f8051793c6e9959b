"""Sequences with random rows in a latent cache, whose unused memory holds NaN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import kv_values
from quire.kernels.latent import LatentOps
from tests.support.kernels.paged import GARBAGE


@dataclass
class LatentSequences:
    """Sequences of lengths[s] tokens. The last queries[s] tokens of each belong to this step."""

    ops: kernels.Ops
    lengths: list[int]
    queries: list[int]
    heads: int
    width: int = 80
    value_dim: int = 64
    block_size: int = 16
    window: int = 0
    scale: float = 0.1

    def __post_init__(self) -> None:
        dtype, latent = self.ops.dtype, kernels.latent_ops(self.ops)
        assert latent is not None
        self.latent: LatentOps = latent
        self.q = [torch.randn(n, self.heads, self.width).to(dtype) for n in self.lengths]
        self.rows = [torch.randn(n, self.width).to(dtype) for n in self.lengths]
        needed = [-(-n // self.block_size) for n in self.lengths]
        spare = 2
        ids = torch.randperm(sum(needed) + spare, dtype=torch.int32).split([*needed, spare])
        self.tables = torch.full((len(needed), max(needed) + 2), GARBAGE, dtype=torch.int32)
        for s, blocks in enumerate(ids[:-1]):
            self.tables[s, : len(blocks)] = blocks
        self.cache = latent.alloc_latent_cache(sum(needed) + spare, self.block_size, self.width)
        self.cache.view(torch.uint8).fill_(255)  # NaN, also as a scale
        for s in range(len(needed)):
            latent.cache_latent(self.rows[s], self.slots(s), self.cache)

    def slots(self, s: int) -> Tensor:
        """The slot of each token of sequence s."""
        at = torch.arange(self.lengths[s])
        return self.tables[s, at // self.block_size] * self.block_size + at % self.block_size

    def attend(self) -> list[Tensor]:
        """The results of each sequence, [queries, H, value_dim]."""
        q = torch.cat([rows[n - count :] for rows, n, count in zip(self.q, self.lengths, self.queries, strict=True)])
        starts = torch.tensor([0, *self.queries]).cumsum(0).int()
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        mixed = self.latent.latent_attention(
            q, self.cache, self.tables, lengths, starts, self.scale, self.value_dim, self.window
        )
        return list(mixed.split(self.queries))

    def exact(self, s: int) -> Tensor:
        """The results of sequence s in float64, from the values that the cache stores."""
        n, count = self.lengths[s], self.queries[s]
        stored = kv_values.decode(kv_values.encode(self.rows[s], self.ops.kv_dtype), torch.float64)
        scores = torch.einsum("qhd,kd->qhk", self.q[s][n - count :].double(), stored) * self.scale
        position, key = torch.arange(n - count, n)[:, None], torch.arange(n)
        seen = (key <= position) & ((key > position - self.window) if self.window else torch.tensor(True))
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
        return torch.einsum("qhk,kd->qhd", weights, stored[:, : self.value_dim])
