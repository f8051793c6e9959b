"""The C++ operations of a latent cache: a row's result is the same bit for bit in any batch, chunk and thread count."""

import pytest
import torch

from quire import kernels
from tests.support.kernels.latent import LatentSequences


@pytest.mark.parametrize(("heads", "width", "value_dim"), [(4, 48, 32), (60, 80, 64)])
@pytest.mark.parametrize("window", [0, 50])
def test_attention_rows_in_any_chunking(cpu_ops, threads, heads, width, value_dim, window):
    lengths = [300, 131, 17]
    given = LatentSequences(cpu_ops, list(lengths), lengths, heads, width, value_dim, window=window)
    whole = given.attend()
    threads(3)
    for queries in ([1, 1, 1], [130, 7, 2]):
        given.queries = queries
        for rows, all_rows, count in zip(given.attend(), whole, queries, strict=True):
            assert torch.equal(rows, all_rows[-count:])


def test_products_of_groups_are_those_of_each_layer_alone(cpu_ops):
    latent, weights = kernels.latent_ops(cpu_ops), torch.randn(3, 40, 24).to(cpu_ops.dtype)
    x = torch.randn(3, 70, 24).to(cpu_ops.dtype)
    together = latent.linear_groups(x, latent.pack_groups(weights))
    for group in range(3):
        alone = cpu_ops.linear(x[group], cpu_ops.pack_linear(weights[group]))
        assert torch.equal(together[group], alone)
        one = latent.linear_groups(x[:, 5:6].contiguous(), latent.pack_groups(weights))
        assert torch.equal(one[group], alone[5:6])


def test_a_latent_cache_takes_the_memory_of_one_row_per_token(cpu_ops):
    cache = kernels.latent_ops(cpu_ops).alloc_latent_cache(3, 16, 576)
    assert cache.nbytes == 3 * 16 * 576 * cpu_ops.dtype.itemsize
    assert not cache.view(torch.uint8).any()
