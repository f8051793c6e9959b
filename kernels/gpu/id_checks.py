"""Checks of ids, slots, positions and blocks on the device. Each check waits for the device: for tests and debugging.

Each function raises IndexError for the first value that is out of range.
"""

import torch
from torch import Tensor

from quire.kernels import checks


def _first(bad: Tensor) -> int | None:
    """Return the first index where `bad` is true; None if it is false everywhere."""
    at = bad.nonzero()
    return int(at[0]) if len(at) else None


def token_ids(ids: Tensor, table: Tensor) -> None:
    """Check ids [T] against table [V, H]."""
    if (row := _first((ids < 0) | (ids >= len(table)))) is not None:
        raise IndexError(f"token_ids[{row}] is {int(ids[row])}, outside 0..{len(table) - 1}")


def slots(positions: Tensor, max_position: int, slot_mapping: Tensor, slot_count: int) -> None:
    """Check positions [T] and slot_mapping [T]."""
    bad = (positions < 0) | (positions >= max_position) | (slot_mapping < -1) | (slot_mapping >= slot_count)
    if (token := _first(bad)) is not None:
        raise IndexError(checks.no_such_slot(token, positions, max_position, slot_mapping, slot_count))


def blocks(
    block_tables: Tensor, seq_lens: Tensor, query_start: Tensor, tokens: int, block_size: int, count: int, window: int
) -> None:
    """Check lengths and block tables as in `Ops.paged_attention`, for a cache of `count` blocks."""
    queries = query_start.diff()
    needed = (seq_lens + block_size - 1) // block_size
    bad = (queries < 0) | (seq_lens < queries) | (needed > block_tables.shape[1])
    bad |= (query_start[0] != 0) | (query_start[-1] != tokens)
    lowest = (seq_lens - queries - window + 1).clamp(min=0) // block_size if window else torch.zeros_like(needed)
    column = torch.arange(block_tables.shape[1], device=block_tables.device)
    used = (column >= lowest[:, None]) & (column < needed[:, None]) & (queries > 0)[:, None]
    bad |= (used & ((block_tables < 0) | (block_tables >= count))).any(dim=1)
    if (sequence := _first(bad)) is not None:
        raise IndexError(checks.no_such_blocks(sequence, count))


def vocabulary_ids(ids: Tensor, vocabulary: int) -> None:
    """Check ids [R] of a vocabulary."""
    if (row := _first((ids < 0) | (ids >= vocabulary))) is not None:
        raise IndexError(checks.no_such_id(row, ids, vocabulary))


def rows(ids: Tensor, tokens: int) -> None:
    """Check the indices [R] of wanted tokens."""
    if (row := _first((ids < 0) | (ids >= tokens))) is not None:
        raise IndexError(f"rows[{row}] is {int(ids[row])}, not one of {tokens} tokens")
