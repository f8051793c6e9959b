"""Checks at start that keys and values fit into an FP8 cache, whose largest number is 448."""

from __future__ import annotations

import logging

import torch

from quire.kernels.kv_values import FP8_LARGEST
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import PagedModel

log = logging.getLogger(__name__)

TOKENS = 128  # of the text that is computed: large keys come from biases and norms more than from the text


def warn_of_saturation(model: PagedModel, block_size: int) -> None:
    """Compute a short text, and log a warning if keys or values of it do not fit into an FP8 cache.

    With several ranks, those of rank 0 are looked at. Models with recurrent states are not checked.
    """
    ops = model.ops
    if ops.kv_dtype is not torch.float8_e4m3fn or model.state_bytes:
        return
    count = min(TOKENS, model.max_model_len)
    at = torch.arange(count, dtype=torch.int32)
    blocks = -(-count // block_size)
    cache = model.alloc_kv_cache(blocks, block_size)
    batch = ForwardBatch(
        token_ids=((31 * at.long() * at.long() + 7) % model.vocab_size).int(),
        positions=at,
        slot_mapping=at,
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        seq_lens=torch.tensor([count], dtype=torch.int32),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        logits_rows=torch.tensor([count - 1]),
    )
    with torch.inference_mode():
        model.forward(batch.to(ops.device), cache)
        full = sum(
            max(float(part.float().abs().max()) for part in ops.plain_kv_cache(*pair)) >= FP8_LARGEST
            for pair in cache.layers
        )
    if full:
        log.warning(
            "--kv-cache-dtype fp8: keys or values of %d of %d layers exceed %g, the largest number of the cache, and "
            "are cut there: answers may be worse; take --kv-cache-dtype auto, or a checkpoint with k_scale and v_scale",
            full,
            len(cache.layers),
            FP8_LARGEST,
        )
