"""Log-probabilities of sampled tokens, for requests that ask for them and for the ranking of best_of.

Log-probabilities are computed from the model's logits before penalties, bans, temperature and truncation change them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from quire.kernels import Ops
from quire.worker.engine.input_batch import NO_LOGPROBS
from quire.worker.engine.sequence import Sequence


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
