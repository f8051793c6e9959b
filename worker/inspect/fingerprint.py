"""What a worker computes with and to which result, as labels: workers of one model whose labels differ may go on with a
text in different ways, also where their settings are the same.

    weights   the checkpoint: another revision under the same name
    results   a few tokens computed by this process: processors, libraries and configurations, to the last bit

Each is a digest of eight hexadecimal digits.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.offline import complete
from quire.worker.models.loader import Weights

DIGEST_BYTES = 4
# With the first step no whole block of the smallest size, so that nothing of it stays in the prefix cache.
MOST_TOKENS = 6
STEPS = 2
TOP_LOGPROBS = 20


def of_weights(folder: Path) -> str:
    """Of the name, shape and one row of each tensor, whatever files they are in and as whatever type they are stored.

    Raises CheckpointError.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, shape, row in Weights(folder).samples():
        digest.update(f"{name} {shape}".encode())
        _add(digest, row)
    return digest.hexdigest()


def of_results(engine: Engine) -> str:
    """Of the log-probabilities of a few tokens, and of the tables that the model computed when it was loaded.

    Empty on a GPU, and where torch multiplies the experts of a model: equal workers may differ there.
    """
    model = engine.runner.model
    length = min(MOST_TOKENS, engine.limits.max_model_len - STEPS)
    if not model.is_row_invariant or length < 1:
        return ""
    prompt = tuple((31 * at * at + 7) % model.vocab_size for at in range(length))
    params = SamplingParams(STEPS, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=TOP_LOGPROBS)
    ((completion,),) = complete(engine, [prompt], params)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(repr((completion.token_ids, completion.logprobs)).encode())  # of floats, repr says every bit
    for table in model.tables():
        _add(digest, table)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, values: torch.Tensor) -> None:
    digest.update(values.detach().cpu().reshape(-1).view(torch.uint8).numpy())
