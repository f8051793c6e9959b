"""The pattern of `fold` alone computes attention without a mask."""

import pytest
import torch

from tests.support.kernels.implementations import TRITON_DTYPES
from tests.support.kernels.oracle import assert_close, slack


@pytest.mark.parametrize("d", [64, 80])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_it_is_attention_to_all_keys(dtype, d):
    from quire.kernels.gpu.fold_check import attend_whole_tiles
    from quire.kernels.gpu.tile_sizes import prefill_tiles

    tiles = prefill_tiles(d, 1, dtype)
    q, k, v = (torch.randn(n, d).to(dtype) for n in (tiles.rows, 3 * tiles.keys, 3 * tiles.keys))
    exact = (q.double() @ k.double().T * d**-0.5).softmax(dim=-1) @ v.double()
    assert_close(attend_whole_tiles(q, k, v, tiles, d**-0.5), exact, slack(dtype, 2000))
