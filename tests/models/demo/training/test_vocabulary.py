"""The tokenizer: any text survives, and the special tokens come first."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.demo.training.vocabulary import BEGIN, SPECIAL, VOCABULARY_SIZE, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Once upon a time, there was a fox.", "The fox was happy."] * 10)


def test_special_tokens_come_first_and_bytes_follow(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(at) for at in range(len(SPECIAL))] == list(SPECIAL)
    assert len(SPECIAL) + 256 <= tokenizer.get_vocab_size() <= VOCABULARY_SIZE


@pytest.mark.parametrize("text", ["The fox.", "  two  spaces ", "Füchse 狐 🦊", "\x00\n\t"])
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert encoded.tokens[0] == BEGIN
    assert tokenizer.decode(encoded.ids) == text


def test_the_saved_files_are_read_by_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, context=64)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.bos_token, loaded.model_max_length) == (BEGIN, 64)
    messages = [{"role": "user", "content": "Hello."}]
    text = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|user|>Hello.<|end|><|assistant|>"
