"""The work lists of prefill."""

import pytest
import torch

from quire.kernels.gpu.prefill_plan import CACHED, FRESH, plan_prefill

LENGTHS, QUERIES = [40, 9, 100, 7, 3], [1, 9, 33, 7, 0]
BLOCK_Q = 8


def listed(ops, longest: int, split: bool, window: int = 0) -> list[list[tuple[int, int, int]]]:
    """(sequence, first query, keys) of each tile, in the order of the lists."""
    starts = torch.tensor([0, *QUERIES]).cumsum(0).int()
    lengths = torch.tensor(LENGTHS).int()
    plan = plan_prefill(lengths, starts, sum(QUERIES), 128, window, longest, BLOCK_Q, split)
    lists = []
    for tiles, work, order in zip(plan.tiles, plan.work, plan.order, strict=True):
        chosen = [i for i in order.tolist() if work[i] >= 0]
        assert [int(work[i]) for i in order] == sorted(work.tolist(), reverse=True)
        lists.append([(*tiles[i].tolist(), int(work[i])) for i in chosen])
    return lists


def expected(sequences: list[int], window: int = 0) -> set[tuple[int, int, int]]:
    found = set()
    for s in sequences:
        context = LENGTHS[s] - QUERIES[s]
        for first in range(0, QUERIES[s], BLOCK_Q):
            lowest = max(context + first - window + 1, 0) if window else 0
            found.add((s, first, context + min(first + BLOCK_Q, QUERIES[s]) - lowest))
    return found


@pytest.mark.parametrize("window", [0, 20])
def test_every_query_of_a_prompt_is_in_one_tile(ops, window):
    (tiles,) = listed(ops, 1, False, window)
    assert len(tiles) == len(set(tiles))
    assert set(tiles) == expected([1, 2, 3], window)
    (with_rows,) = listed(ops, 0, False, window)
    assert set(with_rows) == expected([0, 1, 2, 3], window)


def test_new_prompts_have_a_list_of_their_own(ops):
    lists = listed(ops, 1, True)
    assert set(lists[CACHED]) == expected([2])
    assert set(lists[FRESH]) == expected([1, 3])
