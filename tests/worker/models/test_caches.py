"""Caches and states of a model, and the batches that use them."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.worker.engine.paged_model import KVCache
from quire.worker.models.native.mixed_cache import KVShape, LatentShape, alloc_layers, bytes_per_block
from quire.worker.models.transformers.state_pool import ALIGNMENT, StateKey, StateLayout, StatePool

SHAPES = [KVShape(2, 16), KVShape(1, 48), KVShape(2, 16), KVShape(1, 16)]


@pytest.fixture(params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> kernels.Ops:
    return kernels.select_ops("cpu", torch.float32, request.param)


def fill(cache: KVCache) -> list[torch.Tensor]:
    """Give each block of each layer its own numbers, and return copies of all layers."""
    tensors = [one for layer in cache.layers for one in layer]
    for number, one in enumerate(tensors):
        one.copy_(torch.arange(one.numel(), dtype=one.dtype).view(one.shape) + 100_000 * number)
    return [one.clone() for one in tensors]


def assert_blocks(cache: KVCache, before: list[torch.Tensor], order: list[int]) -> None:
    tensors = [one for layer in cache.layers for one in layer]
    for one, old in zip(tensors, before, strict=True):
        assert torch.equal(one, old[order])


def test_blocks_are_copied_in_all_layers(ops: kernels.Ops) -> None:
    cache = alloc_layers(ops, SHAPES, 4, 16)
    before = fill(cache)
    cache.copy_blocks([0, 1], [3, 2])
    assert_blocks(cache, before, [0, 1, 1, 0])


def test_swapped_blocks_of_two_shapes_come_back_into_other_blocks(ops: kernels.Ops) -> None:
    cache = alloc_layers(ops, SHAPES, 4, 16, num_host_blocks=2)
    before = fill(cache)
    cache.swap_out([1, 2], [1, 0])
    cache.copy_blocks([0], [1])
    cache.swap_in([0, 1], [3, 0])
    assert_blocks(cache, before, [1, 0, 2, 2])


def test_a_cache_without_host_blocks_swaps_nothing(ops: kernels.Ops) -> None:
    with pytest.raises(AssertionError, match="no host blocks"):
        alloc_layers(ops, SHAPES, 4, 16).swap_out([0], [0])


def test_latent_rows_move_with_the_keys_and_values_of_other_layers(ops: kernels.Ops) -> None:
    shapes = [KVShape(2, 16), LatentShape(48), LatentShape(48)]
    cache = alloc_layers(ops, shapes, 4, 16, num_host_blocks=2)
    for number, (keys, values) in enumerate(cache.layers):
        keys.fill_(number)
        values.copy_(keys)
        keys[1], values[1] = 10 + number, 10 + number
    assert [keys is values for keys, values in cache.layers] == [False, True, True]
    assert [tuple(keys.shape) for keys, _ in cache.layers] == [(4, 2, 16, 16), (4, 1, 16, 48), (4, 1, 16, 48)]
    cache.swap_out([1], [0])
    cache.swap_in([0], [3])
    cache.copy_blocks([3], [2])
    for number, layer in enumerate(cache.layers):
        for one in layer:
            assert one.flatten(1).unique(dim=1).flatten().tolist() == [number, *[10 + number] * 3]
    assert bytes_per_block(ops, shapes, 16) == 16 * 4 * (2 * 2 * 16 + 48 + 48)


CONV, SCAN = StateKey(0, "conv", 0), StateKey(3, "recurrent", 0)

LAYOUT = StateLayout({CONV: ((3, 5), torch.bfloat16), SCAN: ((2, 7), torch.float32)})


def filled() -> StatePool:
    """A pool of three slots; slot s has the value s in all its states."""
    pool = StatePool(LAYOUT, 3, "cpu")
    for states in pool.states.values():
        states.copy_(torch.arange(3).view(3, *[1] * (states.dim() - 1)))
    return pool


def test_states_have_their_shapes_and_begin_on_whole_vectors() -> None:
    pool = StatePool(LAYOUT, 3, "cpu")
    assert [(one.shape, one.dtype) for one in pool.states.values()] == [
        ((3, 3, 5), torch.bfloat16),
        ((3, 2, 7), torch.float32),
    ]
    assert LAYOUT.nbytes == 2 * ALIGNMENT, "30 and 56 bytes"
    assert all(one.storage_offset() * one.element_size() % ALIGNMENT == 0 for one in pool.states.values())
    assert not any(one.any() for one in pool.states.values())


def test_a_copy_has_all_states_of_a_slot_and_changes_no_other_slot() -> None:
    pool = filled()
    pool.copy(2, 0)
    for states in pool.states.values():
        assert [one.unique().tolist() for one in states] == [[2], [1], [2]]


def test_single_states_can_be_copied() -> None:
    pool = filled()
    pool.copy_states({SCAN}, 1, 0)
    assert pool.states[SCAN][0].unique().tolist() == [1]
    assert pool.states[CONV][0].unique().tolist() == [0]
