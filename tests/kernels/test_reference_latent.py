"""Absorbed attention over latent rows is the attention over the keys and values that are made of them."""

import torch

from quire import kernels
from quire.kernels.reference_latent import ReferenceLatentOps


def test_absorbed_attention_is_that_over_expanded_keys_and_values():
    heads, plain, positional, rank, value = 3, 24, 16, 32, 16
    ops = ReferenceLatentOps(kernels.ReferenceOps(dtype=torch.float64))
    length, count = 21, 5
    of_keys, of_values = torch.randn(heads, plain, rank).double(), torch.randn(heads, value, rank).double()
    rows = torch.randn(length, rank + positional).double()
    q = torch.randn(count, heads, plain + positional).double()

    latents, shared = rows.split([rank, positional], dim=1)
    keys = torch.cat([torch.einsum("kr,hnr->khn", latents, of_keys), shared[:, None].expand(-1, heads, -1)], dim=-1)
    seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, keys).masked_fill(~seen, float("-inf"))
    values = torch.einsum("kr,hvr->khv", latents, of_values)
    expected = torch.einsum("hqk,khv->qhv", scores.softmax(dim=-1), values)

    cache = ops.alloc_latent_cache(4, 8, rank + positional)
    tables = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    at = torch.arange(length)
    ops.cache_latent(rows, tables[0, at // 8] * 8 + at % 8, cache)
    absorbed = ops.linear_groups(q[:, :, :plain].transpose(0, 1).contiguous(), ops.pack_groups(of_keys.mT.contiguous()))
    queries = torch.cat([absorbed.transpose(0, 1), q[:, :, plain:]], dim=-1)
    lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    mixed = ops.latent_attention(queries, cache, tables, lengths, starts, 1.0, rank)
    found = ops.linear_groups(mixed.transpose(0, 1).contiguous(), ops.pack_groups(of_values)).transpose(0, 1)
    torch.testing.assert_close(found, expected)
