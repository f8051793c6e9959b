"""The pieces of a streamed text are the text: for any tokens, byte-level or with byte fallback."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.shared.text.detokenizer import IncrementalDetokenizer, context_of, drops_first_space
from tests.support.tokenizers import byte_fallback, byte_level

TOKENIZERS = [pytest.param(byte_level(), id="byte-level"), pytest.param(byte_fallback(), id="byte-fallback")]


def stream(tokenizer: Tokenizer, ids: list[int], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, context)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=st.text(max_size=30))
def test_any_text_streams_without_replacement_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text and text.encode("utf-8", "ignore").decode() == text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_at_all_add_up_to_their_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    text, whole = "".join(stream(tokenizer, ids)), tokenizer.decode(ids)
    if tokenizer is byte_level() or "\ufffd" not in whole:
        assert text == whole


@given(data=st.data())
def test_bytes_that_are_no_text_do_not_spoil_what_follows(data: st.DataObject) -> None:
    tokenizer = byte_fallback()
    ids = data.draw(st.lists(st.integers(3, 258), max_size=12))
    follows = tokenizer.encode("x on the way", add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids + follows)).endswith("x on the way")


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(data=st.data())
def test_tokens_may_come_in_any_portions(tokenizer: Tokenizer, data: st.DataObject) -> None:
    portions = data.draw(st.lists(st.lists(st.integers(3, 300), max_size=5), max_size=8))
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push(portion) for portion in portions) + detokenizer.flush()
    assert text == "".join(stream(tokenizer, [token_id for portion in portions for token_id in portion]))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    [
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "e\u0301",
        "\u65e5\u672c\u8a9e",
        "\r\n\u2028 x",
        "\U0001f1e9\U0001f1ea",
    ],
)
def test_characters_of_many_tokens_come_out_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert all(piece == "" or piece.encode() for piece in pieces)


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀").ids
    pieces = stream(tokenizer, ids[:-1])
    assert pieces[0] == "a"
    assert set(pieces[1:-1]) == {""}
    assert set(pieces[-1]) == {"\ufffd"}


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("one").ids, tokenizer.token_to_id("</s>"), *tokenizer.encode(" two").ids]
    assert "".join(stream(tokenizer, ids)) == "one two"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(data=st.data())
def test_behind_a_context_tokens_have_the_text_that_they_have_inside_a_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    context = context_of(tokenizer)
    before, whole = tokenizer.decode(list(context)), tokenizer.decode([*context, *ids])
    if tokenizer is byte_level() or "\ufffd" not in whole:
        assert before + "".join(stream(tokenizer, ids, context)) == whole


def test_only_where_the_first_word_has_a_space_of_its_own_a_text_loses_it() -> None:
    word = byte_fallback().encode("way", add_special_tokens=False).ids
    assert "".join(stream(byte_fallback(), word)) == "way"
    assert "".join(stream(byte_fallback(), word, context_of(byte_fallback()))) == " way"
    assert drops_first_space(byte_fallback())
    assert not drops_first_space(byte_level())
