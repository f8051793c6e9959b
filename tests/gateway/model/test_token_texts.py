"""The text and the bytes of single tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.model.token_texts import TokenTexts
from tests.support.tokenizers import byte_fallback, byte_level

TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_the_bytes_of_tokens_are_those_of_their_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = b"".join(bytes(json.loads(texts[token_id].bytes)) for token_id in ids)
    # A literal "▁" in the text becomes a space too. The first token begins with a space that is not in the text.
    expected = text if name == "byte level" else " " + text.replace("▁", " ")
    assert found == (expected.encode() if ids else b"")


def test_tokens_that_the_tokenizer_lacks_and_special_ones_have_a_text() -> None:
    texts = TokenTexts(byte_level())
    assert texts[10**6] == ('""', '""', "[]")
    special = byte_level().token_to_id("<|im_end|>")
    assert json.loads(texts[special].text) == json.loads(texts[special].name) == "<|im_end|>"
