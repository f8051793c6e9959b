"""The text of a prompt, and where in it each token begins."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.stream.prompt_text import PromptText
from quire.shared.messages import PromptReport
from quire.shared.messages.codec import pack_token_ids
from quire.shared.prompt_logprobs import PromptTokenLogprobs
from quire.shared.text.detokenizer import drops_first_space
from tests.support.tokenizers import byte_fallback, byte_level

TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
TEXTS = {name: TokenTexts(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def prompt_text(name: str, token_ids: list[int], skips: bool = True, records: bytes | None = None) -> PromptText:
    tokenizer = TOKENIZERS[name]
    silent = special_ids(tokenizer) if skips else ()
    report = PromptReport(0, pack_token_ids(token_ids), records)
    return PromptText(report, tokenizer, TEXTS[name], silent, drops_first_space(tokenizer), is_echoed=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["Hello you", " Hello you", "a 😀 b", "", "line\n\nline", "é"])
def test_a_text_is_echoed_as_it_was_sent(name: str, text: str) -> None:
    token_ids = TOKENIZERS[name].encode(text).ids
    if not token_ids:
        return
    prompt = prompt_text(name, token_ids)
    assert prompt.text == text
    assert len(prompt.offsets) == len(token_ids) + 1
    assert (prompt.offsets[0], prompt.offsets[-1]) == (0, len(text))


@given(st.sampled_from(list(TOKENIZERS)), st.text("ab é😀.\n", min_size=1, max_size=20))
def test_a_token_begins_where_the_text_of_those_before_it_ends(name: str, text: str) -> None:
    token_ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    prompt = prompt_text(name, token_ids)
    assert prompt.offsets == sorted(prompt.offsets)
    for at, offset in enumerate(prompt.offsets):
        before = TOKENIZERS[name].decode(token_ids[:at])
        if "\ufffd" not in before and prompt.text.startswith(before):
            assert offset == len(before)


def test_special_tokens_have_a_text_only_if_it_is_asked_for() -> None:
    tokenizer = TOKENIZERS["byte level"]
    [special, *_] = sorted(special_ids(tokenizer))
    name = tokenizer.id_to_token(special)
    token_ids = [*tokenizer.encode("ab", add_special_tokens=False).ids, special, *tokenizer.encode("c").ids]
    assert prompt_text("byte level", token_ids).text == "abc"
    shown = prompt_text("byte level", token_ids, skips=False)
    assert shown.text == f"ab{name}c"
    assert shown.offsets[-3:] == [2, 2 + len(name), 3 + len(name)]


def test_the_first_token_has_no_score() -> None:
    records = struct.pack("<fIfI", -0.5, 1, -1.5, 7)
    prompt = prompt_text("byte level", [5, 6, 7], records=records)
    assert prompt.is_scored
    assert list(prompt.scores()) == [None, PromptTokenLogprobs(-0.5, 1, ()), PromptTokenLogprobs(-1.5, 7, ())]
    assert not prompt_text("byte level", [5]).is_scored
