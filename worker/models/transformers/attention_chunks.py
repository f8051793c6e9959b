"""Attention in chunks (Llama 4): a token sees the tokens of its chunk at or before it, and no others.

Chunks begin at multiples of their size, which blocks divide. So the tokens of a step in one chunk are a sequence that
has the blocks of this chunk alone, and the kernels need no other mask.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tables_in_chunks(tables: Tables, chunk: int, block_size: int) -> Tables:
    """Return block tables, lengths and starts of queries with a sequence for each chunk that has queries.

    tables: block_tables [S, max_blocks], seq_lens [S] and query_start_loc [S + 1], int32 on the host. chunk: in
    tokens, a multiple of `block_size`.
    """
    block_tables, seq_lens, starts = tables
    lengths, first_rows = seq_lens.tolist(), starts.tolist()
    if max(lengths, default=0) <= chunk:
        return tables
    blocks = min(chunk // block_size, block_tables.shape[1])
    padded = F.pad(block_tables, (0, blocks))
    pieces: list[torch.Tensor] = []
    new_lengths, new_starts = [], [0]
    for s, length in enumerate(lengths):
        first = length - (first_rows[s + 1] - first_rows[s])
        for begin in range(first // chunk * chunk, length if first < length else 0, chunk):
            end = min(length, begin + chunk)
            pieces.append(padded[s, begin // block_size : begin // block_size + blocks])
            new_lengths.append(end - begin)
            new_starts.append(new_starts[-1] + end - max(first, begin))
    lengths_of_pieces = torch.tensor(new_lengths, dtype=torch.int32)
    return torch.stack(pieces), lengths_of_pieces, torch.tensor(new_starts, dtype=torch.int32)
