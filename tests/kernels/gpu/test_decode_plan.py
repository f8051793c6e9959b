"""The work list of decoding."""

import pytest
import torch

from quire.kernels.gpu.decode_plan import MIN_CHUNK, plan_decode
from quire.kernels.gpu.tile_sizes import decode_tiles
from tests.support.kernels.implementations import TRITON_DTYPES, make_triton_ops


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ([1024], 1024 // 64),  # one tile for each program: 128 of them for 264 places
        ([1024] * 8, 8 * 1024 // MIN_CHUNK),
        ([1024] * 256, 256),  # enough rows for every program
        ([32 * 1024] + [1024] * 63, None),
    ],
    ids=["alone", "few", "many", "skewed"],
)
def test_keys_are_cut_so_that_every_program_has_work_and_no_more(monkeypatch, lengths, chunks):
    """On a card of 132 multiprocessors, two programs on each, with 8 heads of keys."""
    ops = make_triton_ops(TRITON_DTYPES[0], monkeypatch)
    rows, tiles = len(lengths), decode_tiles(128, 2, torch.float16)
    assert tiles.keys == 64
    seq_lens, starts = torch.tensor(lengths).int().to(ops.device), torch.arange(rows + 1).int().to(ops.device)
    plan = plan_decode(seq_lens, starts, rows, 40960, 0, True, tiles, 8, 132)
    items = int(plan.counts[0])
    found = plan.items[:items].tolist()
    if chunks is not None:
        assert items == chunks
    assert items <= len(plan.items)
    for row, length in enumerate(lengths):  # every key once
        spans = sorted((first, end) for token, _, first, end, *_ in found if token == row)
        assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == length
    slots = [item[4] for item in found if item[4] >= 0]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= plan.partials
    fair = -(-sum(lengths) // (132 * 2 * 4 // 8))  # four chunks for each program, of the heads of which there are 8
    assert max(end - first for _, _, first, end, *_ in found) <= max(MIN_CHUNK, fair) + tiles.keys
