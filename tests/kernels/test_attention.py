"""Paged attention against dense attention in float64."""

import itertools

import pytest
import torch

from tests.support.kernels.implementations import few_without_gpu
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import GARBAGE, Paged


def check(paged: Paged) -> None:
    # In 16 bits the weights are rounded too, and a sum of such terms is off by a part of the largest.
    for s, rows in enumerate(paged.attend()):
        assert_close(rows, paged.exact(s), slack(paged.ops.dtype, 2000))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"),
    [(1, 1, 32), (2, 1, 48), (3, 1, 64), (9, 3, 64), (8, 2, 80), (5, 1, 96), (12, 2, 128), (7, 1, 160), (8, 1, 256)],
)
def test_decode_rows_and_prefill_chunks_in_one_call(ops, heads, kv_heads, d):
    check(Paged(ops, [1, 150, 40, 129, 37], [1, 1, 40, 3, 20], heads, kv_heads, d))


@pytest.mark.parametrize("window", [0, 13])
def test_a_plan_does_for_all_layers_of_a_step(ops, window):
    paged = Paged(ops, [1, 150, 40, 129], [1, 1, 40, 3], 4, 2, 64, window=window)
    expected = paged.attend()
    for found, rows in zip(paged.attend(times=3), expected, strict=True):
        assert torch.equal(found, rows)


@pytest.mark.parametrize(
    ("block_size", "window"), few_without_gpu(itertools.product([8, 16, 32, 64, 128], [0, 1, 13, 130]))
)
def test_block_sizes_and_windows(ops, block_size, window):
    check(Paged(ops, [290, 131, 9, 128], [18, 1, 9, 33], 6, 2, 64, block_size, window))


@pytest.mark.parametrize("window", few_without_gpu([0, 40, 7]))
def test_tokens_of_an_image_see_all_of_it(ops, window):
    """Images within a tile, over the ends of tiles and of chunks of keys, at the start and the end of a context."""
    images = {0: [(0, 3), (120, 135)], 2: [(100, 290)], 3: [(70, 79), (80, 131)]}
    check(Paged(ops, [150, 40, 300, 131], [150, 1, 200, 61], 6, 2, 64, window=window, images=images))


def test_lengths_around_every_boundary(ops):
    lengths = [n for edge in (8, 16, 32, 128, 256) for n in (edge - 1, edge, edge + 1)]
    check(Paged(ops, lengths, [1 if n % 2 else min(n, 5) for n in lengths], 2, 1, 32))


def test_a_long_sequence_is_cut_along_the_keys(ops):
    check(Paged(ops, [2100], [1], 3, 1, 32))
    check(Paged(ops, [2100, 5], [3, 1], 4, 2, 32, window=1500))


def test_more_heads_in_a_group_than_rows_in_a_tile(ops):
    check(Paged(ops, [140, 3], [2, 3], 60, 1, 32))


def test_sequences_without_queries_are_skipped(ops):
    paged = Paged(ops, [20, 30, 25], [2, 0, 1], 2, 1, 32)
    rows = paged.attend()
    assert rows[1].shape[0] == 0
    for s in (0, 2):
        assert not rows[s].isnan().any()


def test_blocks_before_every_window_may_be_gone(ops):
    for block_size in (8, 16):
        paged = Paged(ops, [300, 200], [4, 1], 4, 2, 32, block_size=block_size, window=30)
        expected = paged.attend()
        for s, (length, queries) in enumerate(zip(paged.lengths, paged.queries, strict=True)):
            gone = (length - queries - paged.window + 1) // block_size
            dropped = paged.tables[s, :gone].long()
            paged.k_cache[dropped] = float("nan")
            paged.v_cache[dropped] = float("nan")
            paged.tables[s, :gone] = GARBAGE
        for before, after in zip(expected, paged.attend(), strict=True):
            assert torch.equal(before, after)


def test_scores_far_apart_do_not_overflow(ops):
    paged = Paged(ops, [200], [3], 2, 1, 32)
    paged.scale = 60.0
    assert_close(paged.attend()[0], paged.exact(0), max(100, slack(ops.dtype, 60000)))


def test_impossible_lengths_and_tables_are_refused(ops):
    paged = Paged(ops, [40, 20], [1, 1], 2, 1, 32)
    paged.tables[1, 1] = GARBAGE
    with pytest.raises(IndexError):
        paged.attend()
    paged = Paged(ops, [40, 20], [1, 1], 2, 1, 32)
    paged.tables = paged.tables[:, :2].contiguous()
    with pytest.raises(IndexError):
        paged.attend()


def test_ends_of_keys_outside_of_a_sequence_are_refused(cpu_ops):
    paged = Paged(cpu_ops, [40, 20], [4, 5], 2, 1, 32)
    q, starts = torch.cat([paged.q[0][-4:], paged.q[1][-5:]]), torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths, caches = torch.tensor([40, 20], dtype=torch.int32), (paged.k_cache, paged.v_cache)

    def attend(ends: torch.Tensor) -> None:
        cpu_ops.paged_attention(q, *caches, paged.tables, lengths, starts, 0.2, key_ends=ends)

    attend(torch.tensor([40] * 4 + [20] * 5).int())
    for end in (21, 17):  # beyond the sequence, and before the key of the query itself
        with pytest.raises(IndexError, match="sequence 1"):
            attend(torch.tensor([40] * 4 + [20, 20, end, 20, 20]).int())
    for ends, error in ((torch.ones(8, dtype=torch.int32), ValueError), (torch.ones(9), TypeError)):
        with pytest.raises(error, match="key_ends"):
            attend(ends)


def test_wrong_arguments_are_refused(ops):
    paged = Paged(ops, [40], [1], 2, 1, 32)
    q, table = paged.q[0][-1:], paged.tables
    one, starts = torch.tensor([40], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    caches = paged.k_cache, paged.v_cache
    ops.paged_attention(q, *caches, table, one, starts, 0.2)
    with pytest.raises(TypeError, match="block_tables"):
        ops.paged_attention(q, *caches, table.long(), one, starts, 0.2)
    with pytest.raises(ValueError, match="query_start_loc"):
        ops.paged_attention(q, *caches, table, one, starts[:1], 0.2)
    with pytest.raises(ValueError, match="q has shape"):
        ops.paged_attention(q[:, :, :16].contiguous(), *caches, table, one, starts, 0.2)
    with pytest.raises(ValueError, match="sliding_window"):
        ops.paged_attention(q, *caches, table, one, starts, 0.2, -1)
    with pytest.raises(ValueError, match="scale"):
        ops.paged_attention(q, *caches, table, one, starts, -0.2)
    with pytest.raises(TypeError, match="q is"):
        ops.paged_attention(q.double(), *caches, table, one, starts, 0.2)


# Logits of sinks below, among and above the scores, and one that takes nearly all of the mass.
SINKS = torch.tensor([-8.0, -0.5, 1.0, 4.0, 12.0, 0.0])


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize(("sinks", "softcap"), [(SINKS, 0.0), (None, 2.5), (SINKS, 2.5)])
def test_sinks_and_soft_caps(ops, sinks, softcap, window):
    check(Paged(ops, [1, 150, 290, 9], [1, 1, 18, 9], 6, 2, 64, window=window, sinks=sinks, softcap=softcap))


def test_a_long_sequence_that_is_cut_has_its_sink_once(ops):
    check(Paged(ops, [2100], [1], 2, 1, 32, sinks=torch.tensor([1.0, 6.0]), softcap=2.5))


def test_extreme_sinks_and_scores_do_not_overflow(ops):
    paged = Paged(ops, [200], [3], 2, 1, 32, sinks=torch.tensor([-3000.0, 3000.0]))
    found = paged.attend()[0]
    assert_close(found, paged.exact(0), slack(ops.dtype, 2000))
    assert not found[:, 32:].any()  # the sink has all of the mass
    paged = Paged(ops, [200], [3], 2, 1, 32, softcap=50.0)
    paged.scale = 60.0  # far beyond the cap
    assert_close(paged.attend()[0], paged.exact(0), max(100, slack(ops.dtype, 2000)))
    paged.scale, paged.softcap = 1e-3, 50.0  # far below the cap, where the cap changes nothing
    capped, paged.softcap = paged.attend()[0], 0.0
    assert_close(capped, paged.exact(0), slack(ops.dtype, 2000))


def test_wrong_sinks_and_soft_caps_are_refused(ops):
    paged = Paged(ops, [40], [1], 2, 1, 32)
    for sinks, error in [(torch.zeros(3), ValueError), (torch.zeros(2).double(), TypeError)]:
        paged.sinks = sinks
        with pytest.raises(error, match="sinks"):
            paged.attend()
    paged.sinks = None
    for softcap in (-1.0, float("nan"), float("inf")):
        paged.softcap = softcap
        with pytest.raises(ValueError, match="softcap"):
            paged.attend()
