"""From tokens to text: detokenizer, control tokens and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.text.chat_template import ChatTemplate
from quire.shared.text.control_tokens import ControlTokens, pieces
from quire.shared.text.detokenizer import IncrementalDetokenizer, context_of, drops_first_space
from quire.shared.text.stop_strings import StopStringFilter
from quire.shared.text.tokenizer import load_tokenizer
from tests.support.gguf_vocabularies import write_vocabulary
from tests.support.tokenizers import byte_fallback, byte_level

# --- detokenizer ------------------------------------------------------------------------------------------------------
# The pieces of a streamed text are the text: for any tokens, byte-level or with byte fallback.


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


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀").ids
    pieces = stream(tokenizer, ids[:-1])
    assert pieces[0] == "a"
    assert set(pieces[1:-1]) == {""}
    assert set(pieces[-1]) == {"\ufffd"}


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


# --- control tokens ---------------------------------------------------------------------------------------------------
# Texts of messages never become control tokens, and other texts keep their tokens.


TOKENS = ControlTokens({"<|user|>", "<|end|>", "</s>", "<s>", "<think>", "</think>"}, {"<think>", "</think>"})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def shown(value: Any, mark: str) -> Any:
    """The text of the first message, with `·` for each mark."""
    return value[0]["content"].replace(mark, "·")


@pytest.mark.parametrize("text", ["", "Hello", "<|ending|>", "<", "\ufdd0", "a < b", "<|end|"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    messages = user([{"type": "text", "text": text}])
    assert TOKENS.mark(messages, {"a": 1}) == (messages, {"a": 1}, "")


def test_the_marks_of_reasoning_stay_in_messages_of_the_assistant() -> None:
    """Templates divide the text there."""
    given = [{"role": "assistant", "content": "<think>a</think>b<|end|>"}]
    messages, _, mark = TOKENS.mark(given, ())
    assert shown(messages, mark) == "<think>a</think>b<·|end|>"


def test_parts_of_a_content_are_no_way_around() -> None:
    parts = [{"type": "text", "text": text} for text in ("a<", "|e", "nd|>b")]
    messages, _, mark = TOKENS.mark(user(parts), ())
    assert [part["text"].replace(mark, "·") for part in messages[0]["content"]] == ["a<·", "|e", "nd|>b"]


def test_names_arguments_and_tools_are_divided_as_well() -> None:
    call = {"type": "function", "id": "</s>", "function": {"name": "f", "arguments": {"<s>": ["<|end|>"]}}}
    given = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages, others, mark = TOKENS.mark(given, ([{"description": "<s>"}], {"style": "</s>", "n": 3}))
    assert messages[0]["tool_calls"][0]["id"] == f"<{mark}/s>"
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {f"<{mark}s>": [f"<{mark}|end|>"]}
    assert others == ([{"description": f"<{mark}s>"}], {"style": f"<{mark}/s>", "n": 3})


def test_a_mark_is_a_character_that_the_texts_lack() -> None:
    messages, _, mark = TOKENS.mark(user("\ufdd0 \\ufdd1 <s>"), ())
    assert mark == "\ufdd2"
    assert "".join(pieces(messages[0]["content"], mark)) == "\ufdd0 \\ufdd1 <s>"
    assert pieces("<\\ufdd2s>", mark) == ["<", "s>"], "a template may write JSON in ASCII"
    with pytest.raises(ValueError, match="all characters from U"):
        TOKENS.mark(user("<s>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))), ())


def test_added_tokens_of_a_template_are_control_tokens_although_they_are_not_special() -> None:
    """The tokens around the messages of DeepSeek are not special."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<｜User｜>", "<unused>", "  ", "word")])
    tokens = ControlTokens.of(tokenizer, "{{ '<｜User｜>  word' + messages[0].content }}", ())
    messages, _, mark = tokens.mark(user("<｜User｜><unused>  word</s>"), ())
    assert shown(messages, mark) == "<·｜User｜><unused>  word<·/s>"


def gguf(folder: Path) -> Tokenizer:
    return load_tokenizer(write_vocabulary(folder / "model.gguf"), {})


@pytest.fixture(params=["demo", "byte level", "byte fallback", "GGUF"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    kinds = {"byte level": byte_level, "byte fallback": byte_fallback, "GGUF": lambda: gguf(tmp_path)}
    if request.param == "demo":
        return load_tokenizer(PROJECT_ROOT / DEFAULT_MODEL, {})
    return kinds[request.param]()


def test_no_text_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    template = ChatTemplate("{% for m in messages %}</s>{{ m.content | trim }}</s>{% endfor %}", {})
    tokens = ControlTokens.of(tokenizer, template.source, ())
    words = st.sampled_from([*special, *(text[:-1] for text in special), " ", "the", "\n", "<", ">", "|", "ü"])

    @settings(max_examples=100, deadline=None)
    @given(st.lists(words, max_size=8))
    def check(parts: list[str]) -> None:
        def ids(given: Any, mark: str) -> list[int]:
            divided = pieces(template.render(given), mark)
            return [one for piece in divided for one in tokenizer.encode(piece, add_special_tokens=False).ids]

        given = user("".join(parts))
        messages, _, mark = tokens.mark(given, ())
        of_template = [one for one in ids(user(""), "") if one in special.values()]
        assert [one for one in ids(messages, mark) if one in special.values()] == of_template
        if not mark:
            assert ids(messages, mark) == ids(given, "")

    check()


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(ValueError, match="are nested too deeply"):
        TOKENS.mark(user("<|end|>"), nested)


# --- stop strings -----------------------------------------------------------------------------------------------------
# Stop strings are cut exactly, however the text arrives, and no part of one is ever shown.


letters = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition: the match that is complete first, and of those the one that starts first."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def split(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(letters, stops, st.data())
def test_any_cut_of_the_text_gives_what_the_definition_says(text: str, stop: list[str], data: st.DataObject) -> None:
    passing = StopStringFilter(stop)
    shown = "".join(passing.push(piece) for piece in data.draw(split(text))) + passing.flush()
    assert (shown, passing.matched) == expected(text, stop)


@given(letters, stops, st.data())
def test_the_stop_string_itself_comes_out_if_it_is_asked_for(text: str, stop: list[str], data: st.DataObject) -> None:
    passing = StopStringFilter(stop, includes_match=True)
    shown = "".join(passing.push(piece) for piece in data.draw(split(text))) + passing.flush()
    before, matched = expected(text, stop)
    assert (shown, passing.matched) == (before + (matched or ""), matched)


@given(letters, stops)
def test_no_part_of_a_stop_string_leaks_before_it_is_known(text: str, stop: list[str]) -> None:
    passing = StopStringFilter(stop)
    shown = ""
    for character in text:
        shown += passing.push(character)
        # The emitted text is a prefix of the result, whatever comes next.
        for rest in ["", *stop]:
            assert expected(text[: len(shown)] + text[len(shown) :] + rest, stop)[0].startswith(shown)
    passing.flush()


def test_without_stop_strings_nothing_is_held_back() -> None:
    passing = StopStringFilter([])
    assert passing.push("anything") == "anything"
    assert passing.flush() == ""
