"""The prefill kernel: cached and fresh keys give the same rows, in one piece, in several, and in chunks."""

import math

import pytest
import torch

from quire.kernels.gpu import prefill_plan
from quire.kernels.gpu.prefill import prefill
from quire.kernels.gpu.prefill_plan import CACHED, FRESH, plan_prefill
from quire.kernels.gpu.tile_sizes import AttentionTiles
from tests.support.kernels.oracle import assert_close
from tests.support.kernels.paged import Paged

TILES = AttentionTiles(16, 16, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "piece"), [(0, 0), (0, 32), (20, 0)])
def test_rows_are_those_of_dense_attention_from_pages_and_from_fresh_keys(ops, monkeypatch, window, piece):
    monkeypatch.setattr(prefill_plan, "MIN_SPLIT_KEYS", 8)
    paged = Paged(ops, [70, 9], [70, 9], 2, 1, 32, window=window)
    q, kv = torch.cat(paged.q), torch.cat(paged.kv, dim=1)
    lengths, starts = torch.tensor(paged.lengths).int(), torch.tensor([0, 70, 79]).int()
    capacity = paged.tables.shape[1] * paged.block_size
    scale = paged.scale * math.log2(math.e)
    for kind, places, (k, v) in (
        (CACHED, 0, (paged.k_cache, paged.v_cache)),
        (CACHED, 0 if piece else 40, (paged.k_cache, paged.v_cache)),
        (FRESH, 0 if piece else 40, kv),
    ):
        plan = plan_prefill(lengths, starts, 79, capacity, window, 1, 8, kind == FRESH, places, 16)
        if kind == CACHED:
            assert bool((plan.items[kind, plan.work[kind] > 0, 5] > 1).any()) == (places > 0)
        out = torch.full_like(q, float("nan"))
        steps = paged.tables, lengths, starts
        aligned = places == 0 or kind == FRESH
        prefill(q, k, v, *steps, plan, kind, out, TILES, scale, window, 2, aligned=aligned, piece=piece)
        for s, rows in enumerate(out.flatten(1).split(paged.lengths)):
            assert_close(rows, paged.exact(s), 1)
