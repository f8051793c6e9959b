"""Pooling: the embedding of a prompt, made of the hidden states of its tokens after the model's final norm.

"last" takes the hidden state of the last token. "mean" takes the mean of all: the sum is kept with the sequence from
chunk to chunk. On a CPU the hidden states are added one by one in the order of the tokens, so that the bits of an
embedding depend neither on the chunks of its prompt nor on the rest of the batch.

"score" takes logits of the position after the prompt in place of hidden states, so every model can give it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels import Ops
from quire.worker.engine.scoring import ScoredPositions
from quire.worker.engine.sequence import HiddenSum, SequenceGroup
from quire.worker.engine.step import PrefillChunk


class Embedding(NamedTuple):
    """The embedding of a group's prompt: float32 [H], little-endian. With the pooling "score": logits [N]."""

    group: SequenceGroup
    data: bytes


class TokenLogits(ScoredPositions):
    """The logits of some tokens after a prompt. `records` has them: float32, little-endian.

    Only the last position is scored, so all tokens before it may come from the prefix cache.
    """

    def __init__(self, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        """num_tokens: of the prompt."""
        super().__init__(num_tokens - 1, num_tokens)
        self._token_ids = list(token_ids)

    def take(self, ops: Ops, logits: torch.Tensor) -> None:
        """Keep the logits of the last position. logits: float32 [1, V]."""
        self.records += logits[-1, self._token_ids].cpu().numpy().tobytes()
        self.num_scored += len(logits)


def pool(chunks: Iterable[PrefillChunk], hidden: torch.Tensor) -> list[Embedding]:
    """Return the embeddings of the prompts that a step has completed. Call it before the chunks are recorded.

    hidden: those of the last `num_pooled` tokens of each chunk, in the order of the chunks [P, H].
    """
    groups: list[SequenceGroup] = []
    vectors: list[torch.Tensor] = []
    at = 0
    for chunk in chunks:
        sequence, count = chunk.sequence, chunk.num_pooled
        if not count:
            continue
        rows = hidden[at : at + count]
        at += count
        if sequence.group.pooling == "last":
            vector = rows[0]
        else:
            # A sequence that was preempted and is recomputed begins anew.
            total = add_rows(sequence.pooled if sequence.num_computed else None, rows)
            sequence.pooled = total
            if sequence.num_computed + count < len(sequence.token_ids):
                continue
            vector = torch.as_tensor(total / len(sequence.token_ids))
        groups.append(sequence.group)
        vectors.append(vector.float())
    if not groups:
        return []
    rows_on_host = torch.stack(vectors).cpu().numpy()  # one copy from the device
    return [Embedding(group, row.tobytes()) for group, row in zip(groups, rows_on_host, strict=True)]


def add_rows(total: HiddenSum | None, rows: torch.Tensor) -> np.ndarray | torch.Tensor:
    """Return `total` plus all rows [P, H], in float64. A total of None is zero.

    On a CPU the totals are numpy arrays, else tensors of the device.
    """
    if rows.device.type != "cpu":
        added = rows.sum(dim=0, dtype=torch.float64)
        if total is None:
            return added
        assert isinstance(total, torch.Tensor)
        return total + added
    values = rows.double().numpy()
    sums = np.zeros(values.shape[1]) if total is None else total
    assert isinstance(sums, np.ndarray)
    for row in values:
        sums += row
    return sums
