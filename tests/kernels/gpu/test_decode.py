"""The decode kernel with rows of one chunk and of several, in one order or in any."""

import math

import pytest
import torch

from quire.kernels.gpu.decode import decode
from quire.kernels.gpu.decode_plan import plan_decode
from quire.kernels.gpu.tile_sizes import AttentionTiles
from tests.support.kernels.oracle import assert_close
from tests.support.kernels.paged import Paged

TILES = AttentionTiles(16, 32, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("piece", [0, 64], ids=["any", "in order"])
@pytest.mark.parametrize("window", [0, 50])
def test_rows_are_those_of_dense_attention(ops, piece, window):
    paged = Paged(ops, [300, 5, 64], [1, 1, 1], 4, 2, 32, window=window)
    q = torch.stack([rows[-1] for rows in paged.q])
    lengths, starts = torch.tensor(paged.lengths).int(), torch.arange(4).int()
    capacity = paged.tables.shape[1] * paged.block_size
    plan = plan_decode(lengths, starts, 3, capacity, window, True, TILES, 2, 100, piece)
    has_several_chunks = bool((plan.items[: int(plan.counts[0]), 4] >= 0).any())
    assert has_several_chunks == (window == 0 or piece == 0)  # a window of 50 keys is one piece of 64
    out = torch.full_like(q, float("nan"))
    scale = paged.scale * math.log2(math.e)
    decode(q, paged.k_cache, paged.v_cache, paged.tables, plan, out, TILES, scale, 100)
    for s in range(3):
        assert_close(out[s].flatten()[None], paged.exact(s), 1)
