"""The table of tile sizes: every entry is one that the kernels can use."""

import itertools

import pytest
import torch

from quire.kernels.gpu.tile_sizes import (
    MIN_ROWS,
    AttentionTiles,
    decode_tiles,
    dot_precision,
    invariant_tiles,
    matmul_tiles,
    power_of_2,
    prefill_tiles,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [*itertools.product((16, 64, 80, 128, 256), (1, 4, 20, 64), DTYPES)]
SHAPES += [*itertools.product((272, 512), (1, 4, 16), (torch.bfloat16, torch.float16))]


def test_powers_of_2():
    assert [power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def check(tiles: AttentionTiles) -> None:
    assert tiles.rows >= MIN_ROWS
    assert power_of_2(tiles.rows) == tiles.rows
    assert power_of_2(tiles.keys) == tiles.keys >= 16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_have_sizes_that_matrix_instructions_take(shape):
    check(decode_tiles(*shape))
    for window, large_shared in itertools.product((0, 100), (False, True)):
        check(prefill_tiles(*shape, window, large_shared))
        for tiles in invariant_tiles(*shape, window, large_shared):
            check(tiles)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_of_prefill_has_room_for_a_group(shape):
    for large_shared in (False, True):
        assert prefill_tiles(*shape, 0, large_shared).rows >= shape[1]


def test_less_shared_memory_means_smaller_tiles():
    large, small = (prefill_tiles(256, 4, torch.bfloat16, 0, large_shared) for large_shared in (True, False))
    assert small.rows * small.keys * small.stages < large.rows * large.keys * large.stages


def test_block_ids_are_fetched_as_long_before_the_keys_as_the_keys_before_their_use():
    assert AttentionTiles(16, 64, 4, 3).paged_stages == 5


def test_float32_uses_the_tensor_cores_three_times():
    assert [dot_precision(dtype) for dtype in (torch.float32, torch.bfloat16)] == ["tf32x3", "tf32"]


def test_few_rows_have_small_matmul_tiles():
    few, many = (matmul_tiles(tokens, 4096, torch.bfloat16) for tokens in (8, 8192))
    assert few.rows * few.columns < many.rows * many.columns
