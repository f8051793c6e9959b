"""Attention over a latent cache against dense attention in float64, in every implementation that has it."""

import pytest
import torch

from quire import kernels
from quire.kernels import kv_values, latent
from tests.support.kernels.latent import LatentSequences
from tests.support.kernels.oracle import assert_close, slack

MIXED = [1, 150, 40, 129, 37], [1, 1, 40, 3, 20]


@pytest.fixture
def latent_ops(ops):
    if kernels.latent_ops(ops) is None:
        pytest.skip("this implementation keeps no latent cache")
    return ops


def check(given: LatentSequences) -> None:
    for s, rows in enumerate(given.attend()):
        assert_close(rows, given.exact(s), slack(given.ops.dtype, 2000))


@pytest.mark.parametrize(("heads", "width", "value_dim"), [(1, 32, 16), (3, 48, 48), (16, 80, 64), (60, 144, 128)])
def test_decode_rows_and_prefill_chunks_in_one_call(latent_ops, heads, width, value_dim):
    check(LatentSequences(latent_ops, *MIXED, heads, width, value_dim))


def test_the_sizes_of_deepseek(latent_ops):
    check(LatentSequences(latent_ops, [140, 20], [1, 3], 128, 576, 512, scale=0.04))


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("window", [0, 13, 130])
def test_block_sizes_and_windows(latent_ops, block_size, window):
    check(LatentSequences(latent_ops, [290, 131, 9, 128], [18, 1, 9, 33], 4, 48, 32, block_size, window))


def test_a_long_sequence_is_cut_along_the_keys(latent_ops):
    check(LatentSequences(latent_ops, [2100, 5], [3, 1], 4, 48, 32))


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("heads", [2, 60])
def test_narrow_caches_give_the_values_that_they_store(narrow_ops, block_size, heads):
    check(LatentSequences(narrow_ops, *MIXED, heads, 48, 32, block_size))


def test_rows_are_stored_as_keys_are(narrow_ops):
    given = LatentSequences(narrow_ops, [21], [1], 2)
    plain = given.latent.plain_latent_cache(given.cache)
    at = given.slots(0).long()
    found = plain[at // 16, 0, at % 16]
    stored = kv_values.encode(given.rows[0], narrow_ops.kv_dtype)
    assert torch.equal(found.view(torch.uint8), stored.view(torch.uint8))


def test_tokens_without_a_slot_are_not_kept(latent_ops):
    given = LatentSequences(latent_ops, [20], [1], 2)
    before = given.latent.plain_latent_cache(given.cache).view(torch.uint8)
    given.latent.cache_latent(given.rows[0], torch.full((20,), -1), given.cache)
    assert torch.equal(given.latent.plain_latent_cache(given.cache).view(torch.uint8), before)


def test_groups_of_products_are_products_of_each(latent_ops):
    kernels_of = kernels.latent_ops(latent_ops)
    weights = torch.randn(3, 40, 24).to(latent_ops.dtype)
    x = torch.randn(3, 5, 24).to(latent_ops.dtype)
    packed = kernels_of.pack_groups(weights)
    found = kernels_of.linear_groups(x, packed)
    exact = torch.einsum("gtk,gnk->gtn", x.double(), weights.double())
    for group in range(3):
        assert_close(found[group], exact[group], slack(latent_ops.dtype, 200))
    assert packed.nbytes >= weights.nbytes


def test_blocks_move_as_those_of_keys_and_values_do(latent_ops):
    given = LatentSequences(latent_ops, [40, 35], [1, 1], 2)
    other = given.latent.alloc_latent_cache(len(given.cache), 16, 80)
    stack = given.latent.stack_latent_caches([given.cache, other])
    expected = given.attend()
    host = latent_ops.alloc_host_blocks(stack, 6)
    assert host.shape[1:] == (2, 1, 1, 16, given.cache.shape[3])
    old = given.tables[0, :3].long()
    there = torch.arange(3)
    latent_ops.swap_out(stack, host, old, there)
    given.cache[old] = 0
    latent_ops.swap_in(stack, host, there, old.flip(0))
    given.tables[0, :3] = given.tables[0, :3].flip(0)
    for before, after in zip(expected, given.attend(), strict=True):
        assert torch.equal(before, after)
    used = set(given.tables.flatten().tolist())
    source, target = int(given.tables[1, 0]), next(block for block in range(len(given.cache)) if block not in used)
    latent_ops.copy_blocks(stack, torch.tensor([source]), torch.tensor([target]))
    given.tables[1, 0] = target
    assert torch.equal(expected[1], given.attend()[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_dim": 96}, "value_dim is 96"),
        ({"value_dim": 24}, "value_dim is 24"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"window": -1}, "sliding_window is -1"),
    ],
)
def test_wrong_arguments_are_refused(latent_ops, changes, message):
    given = LatentSequences(latent_ops, [20], [1], 2)
    for name, value in changes.items():
        setattr(given, name, value)
    with pytest.raises(ValueError, match=message):
        given.attend()


def test_places_that_do_not_exist_are_refused(latent_ops):
    given = LatentSequences(latent_ops, [20], [1], 2)
    with pytest.raises(IndexError, match="token 1: slot 999"):
        given.latent.cache_latent(given.rows[0][:2], torch.tensor([0, 999]), given.cache)
    given.lengths[0] = 2000
    given.q[0] = torch.zeros(2000, 2, 80, dtype=latent_ops.dtype)
    with pytest.raises(IndexError, match="sequence 0"):
        given.attend()


@pytest.mark.parametrize(("block_size", "width"), [(12, 32), (16, 24), (16, 656)])
def test_sizes_that_the_contract_lacks_are_refused(latent_ops, block_size, width):
    with pytest.raises(ValueError, match=r"block_size is|the width of a latent row is"):
        kernels.latent_ops(latent_ops).alloc_latent_cache(2, block_size, width)


def test_caches_of_a_stack_have_one_shape():
    caches = [torch.zeros(2, 1, 16, width) for width in (32, 48)]
    with pytest.raises(ValueError, match="the cache of layer 1"):
        latent.LatentCaches((), caches).check_caches(None, torch.float32)
    with pytest.raises(ValueError, match="at least one layer"):
        latent.LatentCaches((), []).check_caches(None, torch.float32)
