"""Documents as token ids with their targets, and micro-batches of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from models.demo.training.corpus import IGNORED, MICRO_BATCH_TOKENS, Encoded, batches, collate, encode, encoded_stream
from models.demo.training.vocabulary import BEGIN, END, PAD
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(__file__).parents[4] / "models/demo/tokenizer.json"))


def test_targets_are_what_the_assistant_says(tokenizer: Tokenizer) -> None:
    found = encode([("user", "Hello."), ("assistant", "Good day.")], tokenizer)
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert text == f"{BEGIN}<|user|>Hello.{END}<|assistant|>Good day.{END}"
    learned = [label for label in found.labels if label != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False) == f"Good day.{END}"
    assert all(label in (token, IGNORED) for token, label in zip(found.ids, found.labels, strict=True))


def test_a_plain_story_is_learned_whole(tokenizer: Tokenizer) -> None:
    found = encode([("text", "Once upon a time.")], tokenizer, begin=False)
    assert found.labels == found.ids
    assert found.ids[-1] == tokenizer.token_to_id(END)


def test_rows_are_padded_at_the_end() -> None:
    batch = collate([Encoded([1, 2, 3], [1, 2, 3]), Encoded([4], [IGNORED])], pad=9)
    assert batch.ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.labels.tolist() == [[1, 2, 3], [IGNORED] * 3]


def test_batches_have_every_document_and_are_small(tokenizer: Tokenizer) -> None:
    rows = list(islice(encoded_stream("test", tokenizer), 40))
    made = list(batches(iter(rows), tokenizer, seed=1))
    assert sum(len(batch.ids) for batch in made) == len(rows)
    assert all(batch.ids.numel() <= MICRO_BATCH_TOKENS for batch in made)
    pad = tokenizer.token_to_id(PAD)
    tokens = torch.cat([batch.ids[batch.ids != pad] for batch in made])
    assert len(tokens) == sum(len(row.ids) for row in rows)
