"""Candidates for the table of tiles run, and are those that the table may hold."""

from dataclasses import replace

import pytest
import torch

from quire.ops.benchmarks.kernels import gpu
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_what_serves_now_is_a_candidate():
    from quire.kernels.gpu.tile_sizes import decode_tiles, prefill_tiles
    from quire.ops.benchmarks.kernels import tile_sizes

    heads = gpu.Heads()
    for case in tile_sizes.cases():
        chosen = decode_tiles if case.queries == 1 else prefill_tiles
        assert chosen(heads.d, heads.heads // heads.kv_heads, torch.bfloat16) in tile_sizes.candidates(case)
    assert {case.name for case in tile_sizes.cases()} == set(tile_sizes.NAMES)


def test_the_tiles_of_a_launch_are_those_of_the_candidate(monkeypatch):
    from quire.kernels.gpu import attention
    from quire.kernels.gpu.tile_sizes import AttentionTiles
    from quire.ops.benchmarks.kernels import tile_sizes

    ops, seen = make_triton_ops(torch.float16, monkeypatch), []
    for name in ("decode", "prefill"):
        kernel = getattr(attention, name)

        def watched(*args, kernel=kernel, **kwargs):
            seen.append(next(one for one in args if isinstance(one, AttentionTiles)))
            return kernel(*args, **kwargs)

        monkeypatch.setattr(attention, name, watched)
    for case in tile_sizes.cases():
        queries = None if case.queries is None else min(case.queries, 7)
        small = replace(case, lengths=(40, 9), queries=queries, heads=gpu.Heads(4, 2, 32, 16))
        for tiles in tile_sizes.candidates(case)[1:3]:
            seen.clear()
            tile_sizes.launch(ops, small, tiles)()
            assert seen
            assert set(seen) == {tiles}
