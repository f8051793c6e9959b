"""The work lists of prefill, made once per step on the device and used by all layers.

An item is a tile of queries of one sequence. Sequences with keys in the cache and sequences that begin with this step
have separate lists, because different kernels compute them. Planning does not wait for the device.

A step may have too few tiles to fill the device, for example 64 new tokens after 32,768 cached tokens. Then the keys of
a tile with cached keys are cut into chunks, and an item is one chunk (split keys, as in `decode_plan`). The sizes of
buffers and grids follow from shapes, so that a captured graph adapts to the lengths of each replay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.decode_plan import FIELDS
from quire.kernels.gpu.search import owner

CACHED, FRESH = 0, 1
# The least keys of a chunk, about 10 us of work: with fewer, partial results cost more than parallelism saves.
MIN_SPLIT_KEYS = 512


@dataclass(frozen=True)
class PrefillPlan:
    """Work lists: entry CACHED of each tensor, and entry FRESH if fresh sequences have a kernel of their own.

    Queries of tiles with several chunks are rows of `decode.reduce_kernel`. The slots of the chunks of one query are
    neighbours: `slot` of an item is that of the first query of its tile, and that of the next query is `chunks` later.
    """

    items: Tensor  # [kinds, bound, 8] int32: sequence, first query, first key, end of keys, slot or -1, chunks
    work: Tensor  # [kinds, bound] int32: keys of the item; -1: the item does not exist
    order: Tensor  # [kinds, bound] int64: items by descending number of keys, for a short tail
    counts: Tensor  # [kinds + 1] int32: items of each list, and rows
    bounds: tuple[int, ...]  # upper bound of the number of items of each list
    rows: Tensor | None = None  # [R, 8] int32: first slot (5), chunks (6), token (7), as of a DecodePlan; None: no cuts
    partials: int = 0  # slots for results of tiles with several chunks


@triton.jit(do_not_specialize=["sequences", "longest", "capacity"])
def plan_sequences_kernel(
    seq_lens, query_start, starts, counts, sequences, longest, capacity,
    BLOCK_Q: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill starts [kinds, sequences + 1] int32: the tiles before each sequence, and the total, also in counts [kinds].

    grid (kinds,). A sequence with fewer keys than queries, or more queries than `capacity`, is an error of the caller:
    it is skipped.
    """
    kind = tl.program_id(0)
    before = 0
    for first in range(0, sequences, BLOCK):
        s = first + tl.arange(0, BLOCK)
        inside = s < sequences
        queries = tl.load(query_start + s + 1, mask=inside, other=0) - tl.load(query_start + s, mask=inside, other=0)
        length = tl.load(seq_lens + s, mask=inside, other=0)
        mine = (queries > longest) & (queries <= tl.minimum(length, capacity))
        if SPLIT:
            mine &= (queries == length) == (kind == 1)
        tiles = tl.where(mine, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)
        tl.store(starts + kind * (sequences + 1) + s, before + tl.cumsum(tiles, axis=0) - tiles, mask=inside)
        before += tl.sum(tiles, axis=0)
    tl.store(starts + kind * (sequences + 1) + sequences, before)
    tl.store(counts + kind, before)


@triton.jit(do_not_specialize=["sequences", "steps", "window", "capacity", "bound"])
def plan_tiles_kernel(
    seq_lens, query_start, starts, items, work, sequences, steps, window, capacity, bound,
    BLOCK_Q: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill `items` and `work` of a PrefillPlan with whole tiles. grid (cdiv(bound, BLOCK), kinds)."""
    kind = tl.program_id(1)
    starts += kind * (sequences + 1)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < bound
    exists = item < tl.load(starts + sequences)
    s = owner(starts, item, sequences, steps, 1)
    first = (item - tl.load(starts + s)) * BLOCK_Q
    queries = tl.load(query_start + s + 1) - tl.load(query_start + s)
    context = tl.minimum(tl.load(seq_lens + s), capacity) - queries
    end = context + tl.minimum(first + BLOCK_Q, queries)
    lowest = tl.where(window > 0, tl.maximum(context + first - window + 1, 0), 0)
    at = items + (kind * bound + item) * FIELDS
    tl.store(at, s, mask=inside & exists)
    tl.store(at + 1, first, mask=inside & exists)
    tl.store(at + 2, lowest, mask=inside & exists)
    tl.store(at + 3, end, mask=inside & exists)
    tl.store(at + 4, -1, mask=inside & exists)
    tl.store(at + 5, 1, mask=inside & exists)
    tl.store(work + kind * bound + item, tl.where(exists, end - lowest, -1), mask=inside)


@triton.jit
def _chunks_of(keys, size, MIN_KEYS: tl.constexpr):
    """Return the number of chunks of about `size` keys in tiles with these numbers of keys; 0: no tile."""
    most = tl.maximum(keys // MIN_KEYS, 1)
    return tl.where(keys > 0, tl.minimum((keys + size - 1) // size, most), 0)


@triton.jit(do_not_specialize=["kinds", "sequences", "steps", "bound", "places"])
def plan_chunks_kernel(
    query_start, starts, items, work, table, counts, kinds, sequences, steps, bound, places,
    BLOCK_Q: tl.constexpr, UNIT: tl.constexpr, MIN_KEYS: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut the keys of tiles into chunks. items, work: whole tiles, of `plan_tiles_kernel`. grid (kinds,).

    Fills table [kinds, bound + 1, FIELDS] int32: items, slots and rows before each tile, its chunks and their size. The
    entry after the last tile has the sums. counts [kinds + 1] are the numbers of items and of rows. Only tiles of list
    CACHED are cut, and only if that shortens the longest item: with at most `places` tiles, chunks are as small as
    `places` items in all allow; with more tiles, those that are longer than a fair share of all keys are cut into such
    shares.
    """
    kind = tl.program_id(0)
    items += kind * bound * FIELDS
    work += kind * bound
    table += kind * (bound + 1) * FIELDS
    tiles = tl.load(starts + kind * (sequences + 1) + sequences)
    lane = tl.arange(0, BLOCK)
    keys_in_all = tl.zeros([BLOCK], tl.int64)
    for start in range(0, tiles, BLOCK):
        keys = tl.load(work + start + lane, mask=start + lane < tiles, other=0)
        keys_in_all += tl.maximum(keys, 0).to(tl.int64)
    fair = tl.maximum((tl.sum(keys_in_all, axis=0) + places - 1) // places, 1).to(tl.int32)
    # Binary search for the smallest size of chunks of which there are at most `places`.
    keys = tl.load(work + lane, mask=lane < tiles, other=0)
    low, high = fair - 1, tl.maximum(tl.max(keys, axis=0), fair)
    for _ in range(steps):
        middle = tl.maximum((low + high) // 2, 1)
        few = tl.sum(_chunks_of(keys, middle, MIN_KEYS), axis=0) <= places
        narrow = high - low > 1
        high = tl.where(narrow & few, middle, high)
        low = tl.where(narrow & (few == 0), middle, low)
    size = tl.where(tiles <= tl.minimum(places, BLOCK), high, fair)
    items_before = 0
    slots_before = 0
    rows_before = 0
    for start in range(0, tiles, BLOCK):
        tile = start + lane
        inside = tile < tiles
        keys = tl.load(work + tile, mask=inside, other=0)
        chunks = _chunks_of(keys, size, MIN_KEYS)
        chunks = tl.where(kind == 1, tl.minimum(chunks, 1), chunks)
        even = (keys + chunks - 1) // tl.maximum(chunks, 1)
        even = tl.maximum((even + UNIT - 1) // UNIT, 1) * UNIT
        chunks = tl.where(chunks > 1, (keys + even - 1) // even, chunks)
        s = tl.load(items + tile * FIELDS, mask=inside, other=0)
        first = tl.load(items + tile * FIELDS + 1, mask=inside, other=0)
        queries = tl.load(query_start + s + 1) - tl.load(query_start + s)
        rows = tl.where(chunks > 1, tl.minimum(queries - first, BLOCK_Q), 0)
        slots = tl.where(chunks > 1, chunks * BLOCK_Q, 0)
        at = table + tile * FIELDS
        tl.store(at, items_before + tl.cumsum(chunks, axis=0) - chunks, mask=inside)
        tl.store(at + 1, slots_before + tl.cumsum(slots, axis=0) - slots, mask=inside)
        tl.store(at + 2, rows_before + tl.cumsum(rows, axis=0) - rows, mask=inside)
        tl.store(at + 3, chunks, mask=inside)
        tl.store(at + 4, even, mask=inside)
        items_before += tl.sum(chunks, axis=0)
        slots_before += tl.sum(slots, axis=0)
        rows_before += tl.sum(rows, axis=0)
    at = table + tiles * FIELDS
    tl.store(at, items_before)
    tl.store(at + 1, slots_before)
    tl.store(at + 2, rows_before)
    tl.store(counts + kind, items_before)
    if kind == 0:
        tl.store(counts + kinds, rows_before)


@triton.jit(do_not_specialize=["sequences", "steps", "tile_bound", "bound", "row_bound"])
def plan_chunk_items_kernel(
    query_start, starts, tiles, table, items, work, rows, sequences, steps, tile_bound, bound, row_bound,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill `items`, `work` and `rows` of a PrefillPlan with the chunks of whole tiles. grid (cdiv(most, BLOCK), kinds).

    tiles [kinds, tile_bound, FIELDS]: whole tiles; table: of `plan_chunks_kernel`. most: the larger of both bounds.
    """
    kind = tl.program_id(1)
    tiles += kind * tile_bound * FIELDS
    table += kind * (tile_bound + 1) * FIELDS
    count = tl.load(starts + kind * (sequences + 1) + sequences)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < bound
    exists = inside & (item < tl.load(table + count * FIELDS))
    tile = owner(table, item, count + 1, steps, FIELDS)
    chunk = item - tl.load(table + tile * FIELDS)
    slot = tl.load(table + tile * FIELDS + 1)
    chunks = tl.load(table + tile * FIELDS + 3, mask=exists, other=0)
    size = tl.load(table + tile * FIELDS + 4, mask=exists, other=0)
    of_tile = tiles + tile * FIELDS
    first_key = tl.load(of_tile + 2, mask=exists, other=0) + chunk * size
    end = tl.minimum(first_key + size, tl.load(of_tile + 3, mask=exists, other=0))
    at = items + (kind * bound + item) * FIELDS
    tl.store(at, tl.load(of_tile, mask=exists, other=0), mask=exists)
    tl.store(at + 1, tl.load(of_tile + 1, mask=exists, other=0), mask=exists)
    tl.store(at + 2, first_key, mask=exists)
    tl.store(at + 3, end, mask=exists)
    tl.store(at + 4, tl.where(chunks > 1, slot + chunk, -1), mask=exists)
    tl.store(at + 5, chunks, mask=exists)
    tl.store(work + kind * bound + item, tl.where(exists, end - first_key, -1), mask=inside)
    if kind == 0:
        row = item
        exists = row < tl.load(table + count * FIELDS + 2)
        tile = owner(table + 2, row, count + 1, steps, FIELDS)
        query = row - tl.load(table + tile * FIELDS + 2)
        slot = tl.load(table + tile * FIELDS + 1)
        chunks = tl.load(table + tile * FIELDS + 3, mask=exists, other=0)
        s = tl.load(tiles + tile * FIELDS, mask=exists, other=0)
        first = tl.load(tiles + tile * FIELDS + 1, mask=exists, other=0)
        at = rows + row * FIELDS
        tl.store(at + 5, slot + query * chunks, mask=row < row_bound)
        tl.store(at + 6, chunks, mask=row < row_bound)
        tl.store(at + 7, tl.load(query_start + s) + first + query, mask=row < row_bound)


def plan_prefill(
    seq_lens: Tensor,
    query_start: Tensor,
    tokens: int,
    capacity: int,
    window: int,
    longest: int,
    block_q: int,
    split: bool,
    places: int = 0,
    unit: int = 1,
) -> PrefillPlan:
    """Plan the prefill of one step, for layers with this window.

    seq_lens [S], query_start [S + 1] int32. tokens: of the step. capacity: keys that a row of the block table has room
    for. longest: only sequences with more queries than this are computed. block_q: queries per tile. split: make two
    lists, CACHED and FRESH.
    places: tiles that the device computes at a time; with fewer than 2, no keys are cut into chunks. unit: chunks begin
    multiples of this after the first key of their tile, a multiple of the size of a block and of the tiles of keys.
    """
    sequences, device = seq_lens.shape[0], seq_lens.device
    kinds = 2 if split else 1
    # Every tile but the last of a sequence is full, and a sequence of prefill has more than `longest` queries.
    bound = tokens // block_q + min(sequences, tokens // (longest + 1))
    starts = torch.empty((kinds, sequences + 1), dtype=torch.int32, device=device)
    tiles = torch.empty((kinds, bound, FIELDS), dtype=torch.int32, device=device)
    work = torch.empty((kinds, bound), dtype=torch.int32, device=device)
    counts = torch.empty(kinds + 1, dtype=torch.int32, device=device)
    plan_sequences_kernel[(kinds,)](
        seq_lens, query_start, starts, counts, sequences, longest, capacity, BLOCK_Q=block_q, SPLIT=split, BLOCK=512
    )
    plan_tiles_kernel[(triton.cdiv(bound, 256), kinds)](
        seq_lens, query_start, starts, tiles, work, sequences, sequences.bit_length(), window, capacity, bound,
        BLOCK_Q=block_q, FIELDS=FIELDS, BLOCK=256,
    )  # fmt: skip
    if places < 2:
        return PrefillPlan(tiles, work, work.argsort(dim=-1, descending=True), counts, (bound,) * kinds)
    # Fewer than `places` tiles are cut, into at most 2 * places chunks: with a fair share of all keys for each place, a
    # tile that is longer has at most twice as many chunks as shares. The number of slots does not depend on
    # lengths, so the largest step, which a worker measures at its start, includes the memory for partial results.
    item_bound, row_bound = bound + 2 * places, min(tokens, places * block_q)
    table = torch.empty((kinds, bound + 1, FIELDS), dtype=torch.int32, device=device)
    items = torch.empty((kinds, item_bound, FIELDS), dtype=torch.int32, device=device)
    item_work = torch.empty((kinds, item_bound), dtype=torch.int32, device=device)
    rows = torch.empty((row_bound, FIELDS), dtype=torch.int32, device=device)
    plan_chunks_kernel[(kinds,)](
        query_start, starts, tiles, work, table, counts, kinds, sequences, capacity.bit_length(), bound, places,
        BLOCK_Q=block_q, UNIT=unit, MIN_KEYS=MIN_SPLIT_KEYS, FIELDS=FIELDS, BLOCK=512,
    )  # fmt: skip
    plan_chunk_items_kernel[(triton.cdiv(max(item_bound, row_bound), 256), kinds)](
        query_start, starts, tiles, table, items, item_work, rows, sequences, (bound + 1).bit_length(), bound,
        item_bound, row_bound, FIELDS=FIELDS, BLOCK=256,
    )  # fmt: skip
    order = item_work.argsort(dim=-1, descending=True)
    return PrefillPlan(items, item_work, order, counts, (item_bound, bound)[:kinds], rows, 2 * places * block_q)
