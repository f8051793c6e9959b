"""The work list of decoding, made once per step on the device and used by all layers.

Planning does not wait for the device: the sizes of buffers and grids follow from shapes, and their contents from the
lengths on the device. So a captured graph adapts to the lengths of each replay.

A row is one query with its context: every token of a step that only decodes, and in any other step each sequence with
one query. The keys of a row are cut into chunks; an item is one chunk (split keys: FlashDecoding, PyTorch blog
2023-10). The size of a chunk follows from the sum of all lengths, so that the items fill the device. In the
batch-invariant mode the size is a constant, and sums are taken in the order of the keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.search import owner
from quire.kernels.gpu.tile_sizes import AttentionTiles

# Keys of a chunk, unless programs would be idle: with fewer keys, partial results cost more than parallelism saves.
MIN_CHUNK = 256
ITEMS_PER_PROGRAM = 4  # of the persistent grid: several, to even out chunks of unequal length
FIELDS = 8  # int32 of a row or an item: 32 bytes, one sector of memory


@dataclass(frozen=True)
class DecodePlan:
    """The work list of decoding; see the module."""

    items: Tensor  # [bound, 8] int32: token, sequence, first key, end of keys, slot for the result or -1
    rows: Tensor  # [R, 8] int32: sequence, first key, end, keys per chunk, first item, first slot, chunks, token
    counts: Tensor  # [2] int32: items, rows
    partials: int  # slots for results of rows with several chunks; 0: no row can have several
    in_order: bool  # chunks have a constant size, and are summed one after the other


@triton.jit
def _row_keys(seq_lens, query_start, row, count, sequences, steps, window, capacity, EACH_TOKEN: tl.constexpr):
    """Return sequence, token, first key and end of keys of each row, and whether the row exists."""
    inside = row < count
    if EACH_TOKEN:
        token = row
        last = tl.load(query_start + sequences)
        s = owner(query_start, tl.minimum(token, tl.maximum(last - 1, 0)), sequences, steps, 1)
        length = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - 1 - token)
        # Tokens beyond the last sequence pad a captured batch: they are rows without keys.
        length = tl.where(inside & (token < last), length, 0)
    else:
        s = tl.minimum(row, sequences - 1)
        token = tl.load(query_start + s)
        inside &= tl.load(query_start + s + 1) - token == 1
        length = tl.where(inside, tl.load(seq_lens + s), 0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    return s, token, first, length, inside


@triton.jit(do_not_specialize=["count", "sequences", "steps", "window", "capacity", "target", "piece"])
def plan_rows_kernel(
    seq_lens, query_start, rows, counts, count, sequences, steps, window, capacity, target, piece,
    EACH_TOKEN: tl.constexpr, KEYS: tl.constexpr, MIN_CHUNK: tl.constexpr, ITEMS_PER_PROGRAM: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill `rows` and `counts` of a DecodePlan. grid (1,): one pass for the sum of keys, one for the chunks.

    piece: keys of a chunk. 0: the number follows from the sum.
    """
    lane = tl.arange(0, BLOCK)
    keys_in_all = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        _, _, first, end, _ = _row_keys(
            seq_lens, query_start, start + lane, count, sequences, steps, window, capacity, EACH_TOKEN
        )
        keys_in_all += (end - first).to(tl.int64)
    in_all = tl.sum(keys_in_all, axis=0)
    one_each = tl.minimum((in_all * ITEMS_PER_PROGRAM + target - 1) // target, MIN_CHUNK)
    chunk = tl.maximum(tl.maximum(one_each, KEYS), (in_all + target - 1) // target)
    items = 0
    slots = 0
    for start in range(0, count, BLOCK):
        row = start + lane
        s, token, first, end, exists = _row_keys(
            seq_lens, query_start, row, count, sequences, steps, window, capacity, EACH_TOKEN
        )
        keys = (end - first).to(tl.int64)
        pieces = tl.maximum((keys + chunk - 1) // chunk, 1)
        size = tl.maximum(((keys + pieces - 1) // pieces + KEYS - 1) // KEYS * KEYS, KEYS)
        size = tl.where(piece > 0, piece, size)
        pieces = tl.maximum((keys + size - 1) // size, 1).to(tl.int32)
        pieces = tl.where(exists, pieces, 0)
        several = tl.where(pieces > 1, pieces, 0)
        at = rows + row * FIELDS
        inside = row < count
        tl.store(at, s, mask=inside)
        tl.store(at + 1, first, mask=inside)
        tl.store(at + 2, end, mask=inside)
        tl.store(at + 3, size.to(tl.int32), mask=inside)
        tl.store(at + 4, items + tl.cumsum(pieces, axis=0) - pieces, mask=inside)
        tl.store(at + 5, slots + tl.cumsum(several, axis=0) - several, mask=inside)
        tl.store(at + 6, pieces, mask=inside)
        tl.store(at + 7, token, mask=inside)
        items += tl.sum(pieces, axis=0)
        slots += tl.sum(several, axis=0)
    tl.store(counts, items)
    tl.store(counts + 1, count)


@triton.jit(do_not_specialize=["count", "steps", "bound"])
def plan_items_kernel(rows, counts, items, count, steps, bound, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Fill `items` of a DecodePlan, in the order of the rows. grid (cdiv(bound, BLOCK),)."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < tl.minimum(tl.load(counts), bound)
    row = owner(rows + 4, item, count, steps, FIELDS)
    of_row = rows + row * FIELDS
    piece = item - tl.load(of_row + 4)
    size = tl.load(of_row + 3)
    begin = tl.load(of_row + 1) + piece * size
    slot = tl.where(tl.load(of_row + 6) > 1, tl.load(of_row + 5) + piece, -1)
    at = items + item * FIELDS
    tl.store(at, tl.load(of_row + 7), mask=inside)
    tl.store(at + 1, tl.load(of_row), mask=inside)
    tl.store(at + 2, begin, mask=inside)
    tl.store(at + 3, tl.minimum(begin + size, tl.load(of_row + 2)), mask=inside)
    tl.store(at + 4, slot, mask=inside)


def plan_decode(
    seq_lens: Tensor,
    query_start: Tensor,
    tokens: int,
    capacity: int,
    window: int,
    each_token: bool,
    tiles: AttentionTiles,
    kv_heads: int,
    multiprocessors: int,
    piece: int = 0,
) -> DecodePlan:
    """Plan the decoding of one step, for layers with this window.

    seq_lens [S], query_start [S + 1] int32. tokens: of the step. capacity: keys that a row of the block table has room
    for. each_token: every token is a row; otherwise only sequences with one query are. piece: keys of every chunk but
    the last; 0: a number that fills the device.
    """
    sequences, device = seq_lens.shape[0], seq_lens.device
    most = -(-capacity // (piece or min(tiles.keys, MIN_CHUNK)))  # chunks of one row
    target = max(1, -(-multiprocessors * tiles.per_sm * ITEMS_PER_PROGRAM // kv_heads))
    # Rows with several chunks have at most twice as many chunks as the sum of their keys needs; see plan_rows_kernel.
    count = tokens if each_token else sequences
    decoding = min(tokens, count)
    partials = decoding * most if piece else min(2 * target, decoding * most)
    if most <= 1:
        partials = 0
    bound = partials + decoding
    rows = torch.empty((count, FIELDS), dtype=torch.int32, device=device)
    items = torch.empty((bound, FIELDS), dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    plan_rows_kernel[(1,)](
        seq_lens, query_start, rows, counts, count, sequences, sequences.bit_length(), window, capacity, target,
        piece,
        EACH_TOKEN=each_token, KEYS=tiles.keys, MIN_CHUNK=MIN_CHUNK, ITEMS_PER_PROGRAM=ITEMS_PER_PROGRAM,
        FIELDS=FIELDS, BLOCK=512,
    )  # fmt: skip
    plan_items_kernel[(triton.cdiv(bound, 256),)](
        rows, counts, items, count, count.bit_length(), bound, FIELDS=FIELDS, BLOCK=256
    )
    return DecodePlan(items, rows, counts, partials, piece > 0)
