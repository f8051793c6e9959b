"""Texts of upstreams that return no token ids: the tokens decode to the text, however it comes in pieces."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from quire.shared.text.detokenizer import IncrementalDetokenizer, context_of
from quire.worker.upstream.texts import TextTokenizer
from tests.support.tokenizers import byte_fallback, byte_level

TEXTS = (
    "Once upon a time, there was a fox.",
    " the  in\n\n\tan",
    "naïve café 😀👩‍💻 Köln 日本語",
    "x" * 40,
    "   ",
    '{"a": [1, 2.5, "b"]}\n',
)


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of an answer as a gateway shows it."""
    detokenizer = IncrementalDetokenizer(tokenizer, context_of(tokenizer))
    return detokenizer.push(ids) + detokenizer.flush()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_any_size_have_the_text(make, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer, draw = make(), random.Random(3)
    for longest in (1, 2, 5, 100):
        texts, ids, at = TextTokenizer(tokenizer, ()), [], 0
        while at < len(text):
            size = draw.randint(1, longest)
            ids += texts.push(text[at : at + size])
            at += size
        assert shown(tokenizer, ids) == text


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_an_answer_is_continued_behind_its_tokens(make) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    for first, second in (("the fo", "x is in"), ("naïve 😀👩‍", "💻 Köln"), ("日本語" * 4, "日本")):
        before = list(TextTokenizer(tokenizer, ()).push(first))
        after = TextTokenizer(tokenizer, before).push(second)
        assert shown(tokenizer, [*before, *after]) == first + second


def test_tokens_say_a_text_or_they_do_not() -> None:
    tokenizer = byte_level()
    emoji = tokenizer.encode("😀", add_special_tokens=False).ids
    assert len(emoji) > 1
    texts = TextTokenizer(tokenizer, ())
    assert texts.says(emoji, "😀")
    assert not texts.says(emoji[-1:], "😀")
