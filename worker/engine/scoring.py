"""Log-probabilities of sampled tokens, for requests that ask for them and for the ranking of best_of; and of prompts.

Log-probabilities are computed from the model's logits before penalties, bans, temperature and truncation change them.
For sampled tokens they are launched, and read later together with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels import Ops
from quire.worker.engine.input_batch import NO_LOGPROBS
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.transfers import StreamMark, send


class TokenScores:
    """Log-probabilities of the tokens of a step, on their way to the host.

    words: int32 [S, 1 + 2k] on the device, a record (`shared/protocol/logprobs.py`) of each scored row.
    at: [S] integers, indices of these rows in the step. tops: [S] integers, see `ScoredRows`.
    """

    def __init__(self, words: torch.Tensor, at: np.ndarray, tops: np.ndarray) -> None:
        self._at, self._tops = at, tops
        self._words, self._copied = words, StreamMark(words.device)
        if words.device.type == "cuda":
            # Torch's allocator of pinned memory reuses this buffer only after the copy.
            self._words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._words.copy_(words, non_blocking=True)
        self._copied.set()

    def record(self, sequences: SequenceOf[Sequence], kept: np.ndarray | None = None) -> None:
        """Wait for the device, and record the log-probability of each sequence's new token with the sequence.

        sequences: those of the step, or those at the indices `kept` only; the log-probabilities of others are dropped.
        """
        self._copied.wait()
        words = self._words.numpy().astype("<i4", copy=False)
        logprobs = words[:, 0].view(np.float32).tolist()
        if kept is None:
            owners: list[Sequence | None] = [sequences[index] for index in self._at.tolist()]
        else:
            sequence_at = dict(zip(kept.tolist(), sequences, strict=True))
            owners = [sequence_at.get(index) for index in self._at.tolist()]
        most = words.shape[1] // 2
        for sequence, logprob, record, top in zip(owners, logprobs, words, self._tops.tolist(), strict=True):
            if sequence is None:
                continue
            sequence.logprob += logprob
            if top != NO_LOGPROBS:
                sequence.logprobs += record[: 1 + 2 * min(top, most)].tobytes()


class ScoredRows(NamedTuple):
    """The rows of a step whose tokens get log-probabilities, with the model's own logits."""

    at: np.ndarray  # int64 [S], indices of the rows in the step
    at_on_device: torch.Tensor  # the same
    logits: torch.Tensor  # float32 [S, V]
    # [S] integers: the number of most probable tokens whose log-probabilities the request asks for too, or NO_LOGPROBS
    # if only the ranking of best_of needs the token's own.
    tops: np.ndarray

    def launch(self, ops: Ops, tokens: torch.Tensor) -> TokenScores:
        """Launch the log-probabilities of the step's tokens: [R] integers on the device, R the rows of the step."""
        words = ops.logprobs_of(self.logits, tokens.index_select(0, self.at_on_device)).view(torch.int32)[:, None]
        if (count := min(int(self.tops.max()), self.logits.shape[1])) > 0:
            values, token_ids = ops.top_logprobs(self.logits, count)
            pairs = torch.stack([token_ids, values.view(torch.int32)], dim=2).flatten(1)
            words = torch.cat([words, pairs], dim=1)
        return TokenScores(words, self.at, self.tops)


def prompt_records(ops: Ops, logits: torch.Tensor, token_ids: list[int], top: int) -> np.ndarray:
    """Return the words of the records (`quire.shared.protocol.logprobs`) of tokens of prompts.

    logits: float32 [P, V], those that score the P tokens. Returns uint32 [P, 2 + 2 * top], at most V most probable
    tokens.
    """
    tokens = send(torch.tensor(token_ids, dtype=torch.int64), ops.device)
    top = min(top, logits.shape[1])
    words = np.empty((len(logits), 2 + 2 * top), dtype="<u4")
    with torch.inference_mode():
        words[:, 0] = ops.logprobs_of(logits, tokens).cpu().numpy().view(np.uint32)
        words[:, 1] = 1 + (logits > logits.gather(1, tokens[:, None])).sum(dim=1).cpu().numpy()
        if top:
            values, most_probable = ops.top_logprobs(logits, top)
            words[:, 2::2] = most_probable.cpu().numpy()
            words[:, 3::2] = values.cpu().numpy().view(np.uint32)
    return words


class ScoredPositions:
    """The positions of a prompt whose logits are wanted: from `first` up to `end`. `num_scored` is the next one."""

    def __init__(self, first: int, end: int) -> None:
        self.num_scored = first
        self.end = end
        # Of the positions scored so far (`quire.shared.protocol.logprobs`).
        self.records = bytearray()

    @property
    def is_complete(self) -> bool:
        return self.num_scored >= self.end

    def max_tokens(self, start: int, positions: int) -> int:
        """Return how many tokens from `start` on a chunk may have if it scores at most this many positions.

        start: a token up to which all wanted positions have been scored.
        """
        end = self.num_scored + positions
        return max(0, end - start) if end < self.end else self.end + 1

    def num_positions(self, end: int) -> int:
        """Return how many positions a chunk that ends before token `end` scores."""
        return max(0, min(end, self.end) - self.num_scored)
