"""Blocks of the KV cache are copied and swapped in all layers at once."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.worker.models.decoder import Decoder
from quire.worker.models.paged import KVCache
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    return Decoder.load(path, kernels.ReferenceOps("cpu", torch.float32), torch.float32, "cpu")


def fill(cache: KVCache) -> list[torch.Tensor]:
    """Give each block of each layer its own numbers, and return copies of all layers."""
    parts = [part for layer in cache.layers for part in layer]
    for number, part in enumerate(parts):
        part.copy_(torch.arange(part.numel(), dtype=part.dtype).view(part.shape) + 10_000 * number)
    return [part.clone() for part in parts]


def test_blocks_are_copied_in_all_layers(model: Decoder) -> None:
    cache = model.alloc_kv_cache(4, 16)
    before = fill(cache)
    cache.copy_blocks([0, 1], [3, 2])
    for part, old in zip((part for layer in cache.layers for part in layer), before, strict=True):
        assert torch.equal(part, old[[0, 1, 1, 0]])


def test_swapped_blocks_come_back_into_other_blocks(model: Decoder) -> None:
    cache = model.alloc_kv_cache(4, 16, num_host_blocks=2)
    before = fill(cache)
    cache.swap_out([1, 2], [1, 0])
    cache.copy_blocks([0], [1])
    cache.swap_in([0, 1], [3, 0])
    for part, old in zip((part for layer in cache.layers for part in layer), before, strict=True):
        assert torch.equal(part, old[[1, 0, 2, 2]])


def test_a_cache_without_host_blocks_swaps_nothing(model: Decoder) -> None:
    cache = model.alloc_kv_cache(2, 16)
    with pytest.raises(AssertionError, match="no host blocks"):
        cache.swap_out([0], [0])


def test_a_block_takes_the_bytes_that_its_layers_hold(model: Decoder) -> None:
    cache = model.alloc_kv_cache(3, 16)
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 3 * model.kv_bytes_per_block(16)
