"""Prompts of an exact number of tokens."""

from __future__ import annotations

import random

from tokenizers import Tokenizer

from quire.ops.loadgen.prompts import WORDS, IdPrompts, WordPrompts
from quire.ops.paths import PROJECT_ROOT


def test_token_ids_are_exact_and_share_the_prefix() -> None:
    prompts = IdPrompts(1000, 50, seed=1)
    first, second = (prompts.make(60, random.Random(seed)) for seed in (1, 2))
    assert len(first) == len(second) == 60
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    assert all(0 <= token < 1000 for token in first)
    assert len(prompts.make(20, random.Random(1))) == 20


def test_words_are_exact_with_a_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(PROJECT_ROOT / "models/demo/tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    prompts = WordPrompts(0, 0, "", fixed=4, per_word=count(" ".join(WORDS)) / len(WORDS), count=count)
    asked = [6, 7, 20, 21, 100, 500]
    made = [count(prompts.make(tokens, random.Random(tokens))) + 4 for tokens in asked]
    assert made == asked
