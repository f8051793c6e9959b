"""The perplexity of the demo model, by the C++ kernels."""

from __future__ import annotations

import math
from itertools import islice

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.native.decoder import Decoder

DEMO = PROJECT_ROOT / "models" / "demo"
Document = tuple[list[int], list[int]]  # token ids and labels; a negative label is not predicted
BLOCK_SIZE, BLOCKS = 16, 64


def perplexity(model: Decoder, documents: list[Document]) -> float:
    """Return the perplexity of the labels that are not negative. Each document is one prefill."""
    cache = model.alloc_kv_cache(BLOCKS, BLOCK_SIZE)
    total, count = 0.0, 0
    for ids, labels in documents:
        targets = torch.tensor(labels[1:])
        total += float(F.cross_entropy(model.forward(document_batch(ids), cache)[:-1], targets, reduction="sum"))
        count += int((targets >= 0).sum())
    return math.exp(total / count)


def document_batch(ids: list[int]) -> ForwardBatch:
    """Return one prefill of a document with logits of all tokens."""
    length = len(ids)
    return ForwardBatch(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(length, dtype=torch.int32),
        slot_mapping=torch.arange(length, dtype=torch.int32),
        block_tables=torch.arange(BLOCKS, dtype=torch.int32)[None],
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        logits_rows=torch.arange(length),
    )


def read_documents(tokenizer: Tokenizer, count: int) -> list[Document]:
    """Return held-out documents: their nouns and requests are not in the training data of the demo model."""
    from models.demo.training.corpus import encoded_stream  # a folder of the repository, not of the package

    return [(one.ids, one.labels) for one in islice(encoded_stream("perplexity", tokenizer, True), count)]
