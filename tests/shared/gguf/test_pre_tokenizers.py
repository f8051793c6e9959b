from __future__ import annotations

import pytest

from quire.shared.gguf.pre_tokenizers import PRE_TOKENIZERS

TEXT = "Don't 12345  HelloWorld!!\n\n ü="
WORDS = {
    "gpt-2": ["Don", "'t", "Ġ12345", "Ġ", "ĠHelloWorld", "!!", "ĊĊ", "ĠÃ¼", "="],
    "llama-bpe": ["Don", "'t", "Ġ", "123", "45", "Ġ", "ĠHelloWorld", "!!ĊĊ", "ĠÃ¼", "="],
    "qwen2": ["Don", "'t", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠHelloWorld", "!!ĊĊ", "ĠÃ¼", "="],
    "smollm": ["Don", "'t", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠHelloWorld", "!!", "ĊĊ", "ĠÃ¼", "="],
    "tekken": ["Don", "'t", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠHello", "World", "!!ĊĊ", "ĠÃ¼", "="],
}


@pytest.mark.parametrize("name", WORDS)
def test_a_text_is_split_into_words(name: str) -> None:
    found = PRE_TOKENIZERS[name].make().pre_tokenize_str(TEXT)
    assert [word for word, _ in found] == WORDS[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_character_is_lost(name: str) -> None:
    found = PRE_TOKENIZERS[name].make().pre_tokenize_str(TEXT)
    assert "".join(word for word, _ in found) == TEXT.replace(" ", "Ġ").replace("\n", "Ċ").replace("ü", "Ã¼")


def test_only_qwen_normalises() -> None:
    normalizer = PRE_TOKENIZERS["qwen2"].make_normalizer()
    assert normalizer is not None
    assert normalizer.normalize_str("u\u0308") == "ü"
    assert PRE_TOKENIZERS["gpt-2"].make_normalizer() is None
