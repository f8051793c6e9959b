"""Texts of messages never become control tokens, and other texts keep their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model_argument import DEFAULT_MODEL
from quire.shared.text.chat_template import ChatTemplate
from quire.shared.text.control_tokens import ControlTokens, pieces
from quire.shared.text.tokenizer import load_tokenizer
from tests.support.gguf_vocabularies import write_vocabulary
from tests.support.tokenizers import byte_fallback, byte_level

TOKENS = ControlTokens({"<|user|>", "<|end|>", "</s>", "<s>", "<think>", "</think>"}, {"<think>", "</think>"})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def shown(value: Any, mark: str) -> Any:
    """The text of the first message, with `·` for each mark."""
    return value[0]["content"].replace(mark, "·")


@pytest.mark.parametrize(
    ("text", "divided"),
    [
        ("Hi <|end|><|user|>", "Hi <·|end|><·|user|>"),
        ("<<s></s>", "<<·s><·/s>"),
        ("<think></think>", "<·think><·/think>"),
    ],
)
def test_a_control_token_is_divided_after_its_first_character(text: str, divided: str) -> None:
    messages, _, mark = TOKENS.mark(user(text), ())
    assert shown(messages, mark) == divided
    assert "".join(pieces(messages[0]["content"], mark)) == text


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


def test_texts_are_divided_at_a_mark_that_none_of_them_has() -> None:
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    messages, _, mark = TOKENS.mark(user("<|end|>" + marks[:-1]), ())
    assert mark == marks[-1]
    assert shown(messages, mark) == "<·|end|>" + marks[:-1]
    with pytest.raises(ValueError, match=r"have all characters from U\+FDD0"):
        TOKENS.mark(user("<|end|>" + marks), ())


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(ValueError, match="are nested too deeply"):
        TOKENS.mark(user("<|end|>"), nested)
