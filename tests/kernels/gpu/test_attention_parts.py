"""Work lists of attention, and the kernels that compute them, one by one."""

import math
import os
import random
import re
import subprocess
import sys

import pytest
import torch

from quire.kernels.gpu import attention, prefill_plan, torch_attention
from quire.kernels.gpu.decode import decode
from quire.kernels.gpu.decode_plan import MIN_CHUNK, plan_decode
from quire.kernels.gpu.prefill import prefill
from quire.kernels.gpu.prefill_plan import CACHED, FRESH, plan_prefill
from quire.kernels.gpu.tile_sizes import AttentionTiles, decode_tiles
from quire.ops.paths import PROJECT_ROOT as ROOT
from tests.support.kernels.implementations import TRITON_DTYPES, make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import Paged
from tests.support.selection import one_in

# --- the work list of decoding ----------------------------------------------------------------------------------------


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


# --- the work lists of prefill ----------------------------------------------------------------------------------------

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


# --- the decode kernel with rows of one chunk and of several, in one order or in any ----------------------------------

TILES = AttentionTiles(16, 32, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("piece", [0, 64], ids=["any", "in order"])
@pytest.mark.parametrize("window", [0, 50])
def test_rows_are_those_of_dense_attention(ops, piece, window):
    paged = Paged(ops, [300, 5, 64], [1, 1, 1], 4, 2, 32, window=window)
    q = torch.stack([rows[-1] for rows in paged.q])
    lengths, starts = torch.tensor(paged.lengths).int(), torch.arange(4).int()
    capacity = paged.tables.shape[1] * paged.block_size
    plan = plan_decode(lengths, starts, 3, capacity, window, True, TILES, 2, 100, piece)
    has_several_chunks = bool((plan.items[: int(plan.counts[0]), 4] >= 0).any())
    assert has_several_chunks == (window == 0 or piece == 0)  # a window of 50 keys is one piece of 64
    out = torch.full_like(q, float("nan"))
    scale = paged.scale * math.log2(math.e)
    decode(q, paged.k_cache, paged.v_cache, paged.tables, plan, out, TILES, scale, 100)
    for s in range(3):
        assert_close(out[s].flatten()[None], paged.exact(s), 1)


# --- the prefill kernel: cached and fresh keys give the same rows, in one piece, in several, and in chunks ------------

PREFILL_TILES = AttentionTiles(16, 16, 4, 2)


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
        prefill(q, k, v, *steps, plan, kind, out, PREFILL_TILES, scale, window, 2, aligned=aligned, piece=piece)
        for s, rows in enumerate(out.flatten(1).split(paged.lengths)):
            assert_close(rows, paged.exact(s), 1)


# --- attention in torch, in place of a kernel, on sequences of every kind ---------------------------------------------

MIXED_LENGTHS, MIXED_QUERIES = [37, 150, 61, 3], [37, 1, 20, 3]


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [("decode", "prefill"), ("decode",), ("prefill",)], ids="-".join)
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_rows_are_those_of_exact_attention_with_some_kernels_in_torch(monkeypatch, dtype, replaced):
    ops = make_triton_ops(dtype, monkeypatch)
    for kernel in replaced:
        ops.replace_kernel(kernel)
        monkeypatch.setattr(attention, kernel, None)  # a call would fail
    monkeypatch.setattr(torch_attention, "MOST_SCORES", 4 * 61 * 7)  # seven queries at a time of the third sequence
    paged = Paged(ops, MIXED_LENGTHS, MIXED_QUERIES, 4, 2, 64, 16, 50, torch.linspace(-4, 8, 4), 2.5)
    for s, found in enumerate(paged.attend()):
        assert_close(found, paged.exact(s), slack(dtype, 2000))
    decoding = Paged(ops, MIXED_LENGTHS, [1] * 4, 4, 2, 64)
    for s, found in enumerate(decoding.attend()):
        assert_close(found, decoding.exact(s), slack(dtype, 2000))


def test_rows_of_padding_are_zeros(monkeypatch):
    """A batch may be padded with sequences that have a query and no keys."""
    if not TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.check_ids = False
    ops.replace_kernel("decode")
    q, tables = torch.randn(2, 2, 16), torch.zeros(2, 1, dtype=torch.int32)
    caches = ops.alloc_kv_cache(1, 2, 16, 16)
    caches[1].fill_(3)
    lengths, starts = torch.tensor([0, 1]).int(), torch.tensor([0, 1, 2]).int()
    out = torch.full((2, 32), float("nan"))
    ops.paged_attention(q, *caches, tables, lengths, starts, 0.25, 0, out)
    assert out[0].tolist() == [0] * 32
    assert out[1].tolist() == [3] * 32


# --- the pattern of `fold` alone computes attention without a mask ----------------------------------------------------


@pytest.mark.parametrize("d", [64, 80])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_it_is_attention_to_all_keys(monkeypatch, dtype, d):
    make_triton_ops(dtype, monkeypatch)  # for the interpreter
    from quire.kernels.gpu.fold_check import attend_whole_tiles
    from quire.kernels.gpu.tile_sizes import prefill_tiles

    tiles = prefill_tiles(d, 1, dtype)
    q, k, v = (torch.randn(n, d).to(dtype) for n in (tiles.rows, 3 * tiles.keys, 3 * tiles.keys))
    exact = (q.double() @ k.double().T * d**-0.5).softmax(dim=-1) @ v.double()
    assert_close(attend_whole_tiles(q, k, v, tiles, d**-0.5), exact, slack(dtype, 2000))


COMPILE = """
import torch, triton
from tests.support.kernels.compile_for_cuda import Target

triton.runtime.driver.set_active(Target(90))
from quire.kernels.gpu.fold_check import fold_kernel
from quire.kernels.gpu.tile_sizes import prefill_tiles

x, tiles = torch.zeros(1024, dtype=torch.bfloat16), prefill_tiles(128, 4, torch.bfloat16)
sizes = dict(D=128, PADDED_D=128, ROWS=tiles.rows, KEYS=tiles.keys, PRECISION="tf32")
options = dict(num_warps=tiles.warps, num_stages=tiles.stages, grid=(1,))
print(fold_kernel.warmup(x, x, x, x, 640, 0.1, **sizes, **options).asm["ptx"])
"""


@pytest.mark.soak
def test_on_hopper_its_second_product_has_the_left_matrix_in_registers():
    """Otherwise the self-test would not cover what old assemblers compile wrongly."""
    pytest.importorskip("triton")
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The accumulators come first, then the left matrix: registers in braces, or a descriptor of shared memory.
    products = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\{|%)", done.stdout)
    assert set(products) == {"{", "%"}
