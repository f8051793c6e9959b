"""Digests of a worker's weights and results, as labels of its metrics.

Workers of one model whose digests differ may continue a text differently, even with equal settings.

    weights   differ between revisions of a checkpoint, and with --quantization
    results   computed tokens: differ, to the last bit, with processors, libraries and configurations. On a GPU, the
              results of the self-test (`quire.worker.device.self_test`): differ with its model, driver and libraries

Each digest has eight hexadecimal digits.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.offline import complete
from quire.worker.models.files.formats import open_stored

DIGEST_BYTES = 4
# Too short to fill a block of the smallest size together with the first step: it leaves nothing in the prefix cache.
MOST_TOKENS = 6
STEPS = 2
TOP_LOGPROBS = 20


def of_weights(folder: Path, quantization: str = "none") -> str:
    """Digest of the name, the shape and one row of each tensor, independent of the files and of the stored types.

    quantization: of the setting, because quantised weights are other weights. Raises CheckpointError.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if quantization != "none":
        digest.update(quantization.encode())
    for name, shape, row in open_stored(folder).samples():
        digest.update(f"{name} {shape}".encode())
        _add(digest, row)
    return digest.hexdigest()


def of_results(engine: Engine) -> str:
    """Digest of the log-probabilities of a few tokens, and of the tables that the model computed while loading.

    Empty on a GPU, and for models whose experts torch multiplies: equal workers may differ there, because sums depend
    on the batch.
    """
    model = engine.runner.model
    length = min(MOST_TOKENS, engine.limits.max_model_len - STEPS)
    if not model.is_row_invariant or length < 1:
        return ""
    prompt = tuple((31 * at * at + 7) % model.vocab_size for at in range(length))
    params = SamplingParams(STEPS, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=TOP_LOGPROBS)
    ((completion,),) = complete(engine, [prompt], params)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(repr((completion.token_ids, completion.logprobs)).encode())  # repr shows every bit of a float
    for table in model.tables():
        _add(digest, table)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, values: torch.Tensor) -> None:
    digest.update(values.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
