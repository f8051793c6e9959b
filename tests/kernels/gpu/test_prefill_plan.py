"""The work lists of prefill."""

import random

import pytest
import torch

from quire.kernels.gpu import prefill_plan
from quire.kernels.gpu.prefill_plan import CACHED, FRESH, plan_prefill
from tests.support.selection import one_in

LENGTHS, QUERIES = [40, 9, 100, 7, 3], [1, 9, 33, 7, 0]
BLOCK_Q = 8


def listed(ops, longest: int, split: bool, window: int = 0) -> list[list[tuple[int, int, int]]]:
    """(sequence, first query, keys) of each tile, in the order of the lists."""
    starts = torch.tensor([0, *QUERIES]).cumsum(0).int()
    lengths = torch.tensor(LENGTHS).int()
    plan = plan_prefill(lengths, starts, sum(QUERIES), 128, window, longest, BLOCK_Q, split)
    lists = []
    for items, work, order, count in zip(plan.items, plan.work, plan.order, plan.counts[:-1], strict=True):
        chosen = order[:count].tolist()
        assert sorted(chosen) == [i for i, keys in enumerate(work.tolist()) if keys >= 0]
        assert [int(work[i]) for i in order] == sorted(work.tolist(), reverse=True)
        lists.append([(*items[i, :2].tolist(), int(work[i])) for i in chosen])
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


def random_step(draw: random.Random) -> tuple[list[int], list[int]]:
    """Lengths and numbers of queries: chunks behind long and short contexts, decodes, new prompts, empty sequences."""
    lengths, queries = [], []
    for kind in draw.choices(["long", "short", "decode", "new", "empty"], [3, 2, 2, 2, 1], k=draw.randint(1, 12)):
        count = {"decode": 1, "empty": 0}.get(kind, draw.randint(2, 40))
        context = {"long": draw.randint(500, 4000), "short": draw.randint(0, 100), "decode": 900}.get(kind, 0)
        queries.append(count)
        lengths.append(context + count)
    return lengths, queries


@pytest.mark.parametrize("seed", one_in(5, range(25)))
def test_every_key_of_a_tile_is_in_one_chunk(ops, monkeypatch, seed):
    """And every query of a tile with several chunks is a row of the sum, with slots of its own."""
    draw = random.Random(seed)
    monkeypatch.setattr(prefill_plan, "MIN_SPLIT_KEYS", least := draw.choice([64, 256]))
    lengths, queries = random_step(draw)
    window, places, unit, split = (draw.choice(of) for of in ([0, 0, 700], [2, 5, 16, 132], [16, 64], [False, True]))
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tokens = sum(queries) + draw.choice([0, 7])  # a captured graph may have more tokens than a step
    plan = plan_prefill(torch.tensor(lengths).int(), starts, tokens, 4096, window, 1, BLOCK_Q, split, places, unit)

    tiles = {}  # first and last key of each tile of prompts with cached keys, or of all prompts
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        for first in range(0, count, BLOCK_Q) if count > 1 and not (split and length == count) else ():
            last = length - count + min(first + BLOCK_Q, count)
            tiles[s, first] = max(length - count + first - window + 1, 0) if window else 0, last
    items = [
        item for item, keys in zip(plan.items[CACHED].tolist(), plan.work[CACHED].tolist(), strict=True) if keys >= 0
    ]
    chunks = {tile: sorted(item[2:6] for item in items if (*item[:2],) == tile) for tile in tiles}
    assert sum(map(len, chunks.values())) == len(items) == plan.counts[CACHED]
    assert sorted(plan.order[CACHED, : len(items)].tolist()) == [*range(len(items))]
    expected_rows = {}
    used = []
    for (s, first), (low, end) in tiles.items():
        found = chunks[s, first]
        assert [begin for begin, *_ in found] == [low, *(one[1] for one in found[:-1])]
        assert found[-1][1] == end
        assert all((begin - low) % unit == 0 and begin < stop for begin, stop, *_ in found)
        assert {one[3] for one in found} == {len(found)}
        if len(found) == 1:
            assert found[0][2] == -1
            continue
        assert end - low >= len(found) * least
        slot = found[0][2]
        assert [one[2] for one in found] == [*range(slot, slot + len(found))]
        for query in range(min(BLOCK_Q, queries[s] - first)):
            place = slot + query * len(found)
            expected_rows[int(starts[s]) + first + query] = place, len(found)
            used += range(place, place + len(found))
    assert len(used) == len(set(used))
    assert max(used, default=-1) < plan.partials
    rows = {token: (slot, count) for *_, slot, count, token in plan.rows[:, :8].tolist() if count}
    assert rows == expected_rows
    assert plan.counts[-1] == len(rows)
    if split:
        whole = [
            item for item, keys in zip(plan.items[FRESH].tolist(), plan.work[FRESH].tolist(), strict=True) if keys >= 0
        ]
        assert all(item[4:6] == [-1, 1] for item in whole)
        assert len(whole) == plan.counts[FRESH]


@pytest.mark.parametrize("places", [0, 16])
def test_errors_of_the_caller_are_no_work(ops, places):
    """Fewer keys than queries, and more queries than the block table has room for."""
    starts = torch.tensor([0, 9, 49, 58]).int()
    plan = plan_prefill(torch.tensor([8, 40, 20]).int(), starts, 58, 32, 0, 1, BLOCK_Q, False, places, 16)
    assert plan.counts[0] == 2
    assert {s for s, *_ in plan.items[0, :2].tolist()} == {2}


def chunk_keys(lengths: list[int], queries: list[int], places: int) -> list[int]:
    """The keys of each item, the largest first, for tiles of 32 queries."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    plan = plan_prefill(torch.tensor(lengths).int(), starts, sum(queries), 40960, 0, 1, 32, False, places, 128)
    return sorted((keys for keys in plan.work[CACHED].tolist() if keys >= 0), reverse=True)


def test_few_queries_behind_a_long_context_fill_the_device_once(ops):
    """64 tokens behind 32k on a card of 132 multiprocessors, with 8 heads of keys: 16 places for 2 tiles."""
    keys = chunk_keys([32768], [64], 132 // 8)
    assert len(keys) == 16
    assert keys[0] == 4096


def test_tiles_that_fill_the_device_are_not_cut(ops):
    assert chunk_keys([8192], [2048], 16) == [8192 - 32 * tile for tile in range(64)]
    assert chunk_keys([8192] * 10, [32] * 10, 16) == [8192] * 10  # in halves they would take two rounds of places


def test_chunks_have_enough_keys(ops):
    assert chunk_keys([1000, 600], [32, 32], 132) == [1000, 600]
    assert chunk_keys([1024, 600], [32, 32], 132) == [600, 512, 512]


@pytest.mark.parametrize("count", [40, 600])  # 600 are more than the kernel reads at a time
def test_a_long_tile_among_many_short_ones_is_cut_to_a_fair_share(ops, count):
    keys = chunk_keys([*[200] * count, 32768], [32] * (count + 1), 16)
    fair = -(-(32768 + count * 200) // 16)
    assert len(keys) == count + -(-32768 // fair)
    assert 200 < keys[0] <= fair + 128
    assert sum(keys) == 32768 + count * 200


def test_partial_results_do_not_depend_on_lengths(ops):
    """So the largest step, which a worker measures when it starts, has as many as any other step."""
    starts = torch.tensor([0, 40]).int()
    sizes = set()
    for length, capacity in ((40, 48), (4000, 4096)):
        plan = plan_prefill(torch.tensor([length]).int(), starts, 40, capacity, 0, 1, BLOCK_Q, False, 16, 64)
        sizes.add((plan.partials, plan.rows.shape, plan.items.shape))
    assert len(sizes) == 1
