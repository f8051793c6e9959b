"""Attention in chunks is attention with a mask of chunks, for decode rows and prefill chunks of any place."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.worker.models.attention_chunks import tables_in_chunks

pytestmark = pytest.mark.usefixtures("one_thread")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_short_sequences_keep_their_tables() -> None:
    tables = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32), int32(32, 7), int32(0, 1, 8)
    assert tables_in_chunks(tables, 32, 16) is tables


def test_a_sequence_is_cut_where_chunks_begin() -> None:
    blocks = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]], dtype=torch.int32)
    # The last 25 of 38 tokens, the last of 33, and a sequence without tokens in this step.
    tables, lengths, starts = tables_in_chunks((blocks, int32(38, 33, 40), int32(0, 25, 26, 26)), 16, 8)
    assert lengths.tolist() == [16, 16, 6, 1]
    assert starts.tolist() == [0, 3, 19, 25, 26]
    assert [row[: -(-n // 8)] for row, n in zip(tables.tolist(), lengths.tolist(), strict=True)] == [
        [1, 2],
        [3, 4],
        [5],
        [10],
    ]


@pytest.mark.parametrize("prefer", ["cpu", "reference"])
def test_kernels_over_the_new_tables_give_dense_attention_in_chunks(prefer: str) -> None:
    ops, heads, d, chunk = kernels.select_ops("cpu", torch.float32, prefer), 2, 16, 32
    lengths, queries = [70, 33, 64, 12], [41, 1, 64, 2]
    torch.manual_seed(0)
    k_cache, v_cache = ops.alloc_kv_cache(24, 1, 8, d)
    blocks = torch.randperm(24, dtype=torch.int32)
    tables = torch.zeros((4, 10), dtype=torch.int32)
    rows, at = [], 0
    for s, length in enumerate(lengths):
        count = -(-length // 8)
        tables[s, :count], at = blocks[at : at + count], at + count
        rows.append(torch.randn(length, (heads + 2) * d))
        places = torch.arange(length)
        slots = tables[s, places // 8] * 8 + places % 8
        identity = torch.cat([torch.ones(1, d // 2), torch.zeros(1, d // 2)], dim=1)
        ops.rope_and_cache(rows[s], torch.zeros(length).int(), identity, slots, k_cache, v_cache, heads, 1)
    q = torch.cat([part[-n:, : heads * d] for part, n in zip(rows, queries, strict=True)]).view(-1, heads, d)
    starts = int32(0, *torch.tensor(queries).cumsum(0).tolist())
    step = tables_in_chunks((tables, int32(*lengths), starts), chunk, 8)
    found = ops.paged_attention(q.contiguous(), k_cache, v_cache, *step, 0.3).view(-1, heads, d).split(queries)
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        keys, values = rows[s][:, heads * d :].split(d, dim=1)
        position, key = torch.arange(length - count, length)[:, None], torch.arange(length)
        seen = (key <= position) & (key // chunk == position // chunk)
        scores = torch.einsum("qhd,kd->hqk", rows[s][-count:, : heads * d].view(count, heads, d), keys) * 0.3
        expected = torch.einsum("hqk,kd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
        torch.testing.assert_close(found[s], expected, atol=1e-5, rtol=1e-4)
