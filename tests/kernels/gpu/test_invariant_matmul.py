"""The matmul of the batch-invariant mode."""

import pytest
import torch

from quire.kernels.gpu import invariant_matmul, tile_sizes
from tests.support.kernels.implementations import ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.support.kernels.interpreter import make_dot_row_invariant
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.stacks import (
    random,
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_a_product_has_the_same_bits_for_a_row_alone_and_among_others_in_batch_invariant_mode(monkeypatch, dtype):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=True)
    assert ops.row_invariant
    n, k = (12800, 2000) if ON_CUDA else (70, 200)  # on a device as many as for the largest tiles
    weight, bias, x = (random(*s, dtype=dtype) for s in [(n, k), (n,), (130, k)])
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for method, pack, expected in (
        ("linear", ops.pack_linear(weight, bias), exact),
        ("linear_logits", ops.pack_linear(weight, bias), exact),
    ):
        product = getattr(ops, method)
        together = product(x, pack)
        assert_close(together, expected, 20 * slack(dtype, 300))
        for first, end in ((0, 1), (129, 130), (30, 67)):
            assert torch.equal(product(x[first:end], pack), together[first:end])
    # Those of more columns, too. Products in float32 have tiles of one size.
    sizes = ((64, 64, 64, 4, 6), (128, 128, 64, 8, 4)) if dtype.itemsize == 2 else ()
    for size in (tile_sizes.MatmulTiles(*one) for one in sizes):
        monkeypatch.setattr(invariant_matmul, "matmul_tiles", lambda *_, size=size: size)
        assert torch.equal(ops.linear_logits(x, pack), together)
