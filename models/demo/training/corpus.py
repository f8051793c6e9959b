"""Documents as token ids, and micro-batches of documents of similar length.

A row holds one document: positions start at 0, as when the model is served, and no document attends to another. The
training targets are the assistant's texts with their `<|end|>`, and plain stories as a whole. The user's texts are only
context.
"""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import NamedTuple

import torch
from models.demo.training.grammar import Document, documents
from models.demo.training.tool_dialogues import tool_documents
from models.demo.training.vocabulary import BEGIN, END, PAD
from tokenizers import Tokenizer

IGNORED = -100  # cross-entropy ignores this label
CONTEXT = 640  # in tokens; longer documents (a few in a thousand) are cut
MICRO_BATCH_TOKENS = 3072
SORTED_AT_ONCE = 512  # documents; a larger number wastes less padding and mixes lengths less


class Encoded(NamedTuple):
    """One document as token ids, with its training targets."""

    ids: list[int]
    labels: list[int]  # labels[i] is ids[i] or IGNORED; the loss shifts them by one


def encode(document: Document, tokenizer: Tokenizer, begin: bool = True) -> Encoded:
    """Encode one document in the format of the chat template. `begin`: start with `<|begin|>`."""
    first, last = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    ids, labels = ([first], [IGNORED]) if begin else ([], [])
    for role, text in document:
        if role != "text":
            ids.append(tokenizer.token_to_id(f"<|{role}|>"))
            labels.append(IGNORED)
        said = [*tokenizer.encode(text.strip(), add_special_tokens=False).ids, last]
        ids += said
        labels += said if role in ("assistant", "text") else [IGNORED] * len(said)
    return Encoded(ids[:CONTEXT], labels[:CONTEXT])


def encoded_stream(
    seed: int | str, tokenizer: Tokenizer, held_out: bool = False, tool_share: float = 0.0
) -> Iterator[Encoded]:
    """Yield an endless stream of encoded documents.

    One plain story in three has no `<|begin|>`, for servers that do not add it. tool_share: of dialogues with tools, in
    documents.
    """
    rng, with_tools = Random(f"tools-{seed}"), tool_documents(seed, held_out)
    for at, document in enumerate(documents(seed, held_out)):
        while rng.random() < tool_share:
            yield encode(next(with_tools), tokenizer)
        yield encode(document, tokenizer, begin=document[0][0] != "text" or at % 3 > 0)


class TrainingBatch(NamedTuple):
    """A micro-batch of padded rows."""

    ids: torch.Tensor  # [B, T] int64, padded at the end, where causal attention ignores it
    labels: torch.Tensor  # [B, T] int64, IGNORED at positions without a target


def collate(rows: list[Encoded], pad: int) -> TrainingBatch:
    """Pad the rows to the longest row and stack them."""
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), IGNORED)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = torch.tensor(row.ids)
        labels[at, : len(row.labels)] = torch.tensor(row.labels)
    return TrainingBatch(ids, labels)


def batches(stream: Iterator[Encoded], tokenizer: Tokenizer, seed: int | str) -> Iterator[TrainingBatch]:
    """Yield micro-batches of about MICRO_BATCH_TOKENS tokens, with rows of similar length; the batches are shuffled."""
    pad, rng = tokenizer.token_to_id(PAD), Random(f"batches-{seed}")
    while rows := sorted(islice(stream, SORTED_AT_ONCE), key=lambda row: len(row.ids)):
        groups: list[list[Encoded]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row.ids) > MICRO_BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (collate(group, pad) for group in groups)
