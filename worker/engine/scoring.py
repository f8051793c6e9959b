"""Log-probabilities of drawn tokens: for requests that ask for them, and for the ranking of best_of.

They are those of the model itself, before penalties, bans, temperature and truncation change its logits.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from quire.worker.engine.input_batch import NO_LOGPROBS
from quire.worker.engine.sequence import Sequence


def score(
    ops: Any, logits: torch.Tensor, tokens: torch.Tensor, sequences: SequenceOf[Sequence], tops: np.ndarray
) -> None:
    """Note with each sequence the log-probability of the token that it has drawn.

    logits: [S, V] float32; tokens: [S] integers. tops: [S], of how many of the most probable tokens a request wants the
    log-probabilities too, or NO_LOGPROBS where it wants none, and best_of does.
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
