"""Log-probabilities of sampled tokens, for requests that ask for them and for the ranking of best_of; and of prompts.

Log-probabilities are computed from the model's logits before penalties, bans, temperature and truncation change them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from quire.kernels import Ops
from quire.worker.engine.input_batch import NO_LOGPROBS
from quire.worker.engine.prompt_scores import PromptScores
from quire.worker.engine.sequence import Sequence
from quire.worker.models.batch import send


def score(
    ops: Ops, logits: torch.Tensor, tokens: torch.Tensor, sequences: SequenceOf[Sequence], tops: np.ndarray
) -> None:
    """Record the log-probability of each sequence's new token with the sequence.

    logits: [S, V] float32. tokens: [S] integers. tops: [S] integers, the number of most probable tokens whose
    log-probabilities the request asks for too, or NO_LOGPROBS if only the ranking of best_of needs the token's own.
    """
    logprobs = ops.logprobs_of(logits, tokens).cpu().numpy()
    count = min(int(tops.max()), logits.shape[1])
    words = np.empty((len(sequences), 1 + 2 * max(count, 0)), dtype="<u4")
    words[:, 0] = logprobs.view(np.uint32)
    if count > 0:
        values, token_ids = ops.top_logprobs(logits, count)
        words[:, 1::2] = token_ids.cpu().numpy()
        words[:, 2::2] = values.cpu().numpy().view(np.uint32)
    for sequence, logprob, record, top in zip(sequences, logprobs.tolist(), words, tops.tolist(), strict=True):
        sequence.logprob += logprob
        if top != NO_LOGPROBS:
            sequence.logprobs += record[: 1 + 2 * min(top, count)].tobytes()


def score_prompts(ops: Ops, logits: torch.Tensor, parts: Iterable[tuple[PromptScores, int]]) -> None:
    """Add the records of the positions that a step has computed.

    logits: float32 [P, V], those of each part one after the other. parts: scores of a prompt, and the number of
    positions that the step adds to them.
    """
    parts = list(parts)
    targets = [token for scores, count in parts for token in scores.prompt[scores.num_scored + 1 :][:count]]
    tokens = send(torch.tensor(targets, dtype=torch.int64), ops.device)
    words = _records(ops, logits, tokens, max(scores.top for scores, _ in parts))
    at = 0
    for scores, count in parts:
        width = 2 + 2 * min(scores.top, logits.shape[1])
        scores.add(words[at : at + count, :width].tobytes(), count)
        at += count


def _records(ops: Ops, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> np.ndarray:
    """Return the words of the records, [P, 2 + 2 * top] uint32, for one token per row of the logits."""
    top = min(top, logits.shape[1])
    words = np.empty((len(logits), 2 + 2 * top), dtype="<u4")
    with torch.inference_mode():
        words[:, 0] = ops.logprobs_of(logits, tokens).cpu().numpy().view(np.uint32)
        words[:, 1] = 1 + (logits > logits.gather(1, tokens[:, None])).sum(dim=1).cpu().numpy()
        if top:
            values, token_ids = ops.top_logprobs(logits, top)
            words[:, 2::2] = token_ids.cpu().numpy()
            words[:, 3::2] = values.cpu().numpy().view(np.uint32)
    return words
