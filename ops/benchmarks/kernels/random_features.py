"""Makes a model with random layers and a trained head, so that its perplexity says how exactly its layers are computed.

The layers of a trained model tolerate rounding: their weights have learned to. Random layers have not. Only the head
is trained here (a linear model of the last hidden states), for the same documents as the demo model's.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.native.config import EMBEDDING, HEAD
from quire.worker.models.native.decoder import Decoder

Document = tuple[list[int], list[int]]  # token ids and labels; a negative label is not predicted
BLOCK_SIZE, BLOCKS = 16, 64
SCALE = 1.6  # of the random weights, against those that keep the size of activations: nonlinear, but not chaotic
EPOCHS, BATCH, RATE = 12, 512, 0.003


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


def make_random_features(source: Path, folder: Path, documents: Iterable[Document], seed: int = 0) -> Path:
    """Write a checkpoint with the shape of `source` and random layers, and train its head on `documents`.

    The features are computed by the C++ kernels in float32; the weights are stored in bfloat16. Returns the folder.
    Raises KernelsUnavailable.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("training", "*.safetensors"))
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            spread = 1.0 if name == EMBEDDING else SCALE * tensor.shape[1] ** -0.5
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * spread).bfloat16()
        else:
            tensors[name] = torch.ones_like(tensor)
    tensors[HEAD] = torch.zeros_like(tensors[EMBEDDING])
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    features, targets = _features(folder, documents)
    tensors[HEAD] = _train_head(features, targets, config["vocab_size"], generator).bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _features(folder: Path, documents: Iterable[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states [T, H] of the tokens whose successor has a label, and the labels [T]."""
    model = Decoder.load(folder, kernels.CpuOps(torch.float32), torch.float32, "cpu")
    cache = model.alloc_kv_cache(BLOCKS, BLOCK_SIZE)

    def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids, labels in documents:
            batch = document_batch(ids)
            rows = batch.logits_rows
            batch = dataclasses.replace(batch, logits_rows=rows[:0], pooled_rows=rows)
            hidden = model.forward_pooled(batch, cache)[1][:-1]
            following = torch.tensor(labels[1:])
            yield hidden[following >= 0].clone(), following[following >= 0]

    with torch.inference_mode():
        hidden, targets = zip(*parts(), strict=True)
        return torch.cat(hidden), torch.cat(targets)


def _train_head(
    features: torch.Tensor, targets: torch.Tensor, vocab_size: int, generator: torch.Generator
) -> torch.Tensor:
    """Return a head [V, H] for features [T, H]: Adam on the cross entropy, with a rate that falls to zero."""
    head = torch.zeros(vocab_size, features.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([head], lr=RATE)
    features, targets = features.clone(), targets.clone()  # not inference tensors
    steps = EPOCHS * (len(features) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(features), generator=generator)
        for rows in order[: len(order) // BATCH * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(features[rows] @ head.T, targets[rows]).backward()
            optimizer.step()
            schedule.step()
    return head.detach()
