from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.growing_text import MalformedCall
from quire.gateway.output.python_literals import PythonArguments, read_literal
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.text.grammar import special_tokens
from quire.shared.text.grammar_error import GrammarError
from tests.gateway.output.test_growing_text import read
from tests.support.gateway.output_answers import Answers, byte_tokenizer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab'\"\\\n"), inner, max_size=4),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_literal_becomes_the_json_of_its_value(value: Any) -> None:
    for end in (", ", ")"):
        text, rest = read(read_literal, *repr(value), end)
        assert (json.loads(text), rest) == (value, end)


@pytest.mark.parametrize("text", ["b'x'", "{1, 2}", "1j", "x", "f()", "", "'a\nb'", "(((", "]", "1e999", "[" * 10_000])
def test_what_has_no_json(text: str) -> None:
    for pieces in ([text + ")"], text + ")"):
        with pytest.raises(MalformedCall):
            read(read_literal, *pieces)


def may_end(properties: dict[str, Any], arguments: str, strict: bool = True, **others: Any) -> bool:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **others}
    tokenizer = byte_tokenizer()
    tools = [Tool("run", parameters=schema, strict=strict)]
    grammar = FORMATS["pythonic"].grammar(tools, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
    return Answers(tokenizer, grammar).may_end(f"[run({arguments})]")


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
def test_required_and_optional_arguments(required: list[str]) -> None:
    properties = {key: {"type": "integer"} for key in "abc"}
    for number in range(8):
        keys = [key for index, key in enumerate("abc") if number >> index & 1]
        text = ", ".join(f"{key}=1" for key in keys)
        assert may_end(properties, text, required=required) == (set(required) <= set(keys)), text
    assert not may_end(properties, "c=1, b=1, a=1")
    assert not may_end(properties, "a=1, b=1, c=1, d=1")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['"a, \\n"', "'b'"], ["x", "1"]),
        ({"type": "integer"}, ["1", "-20"], ["1.5", '"x"']),
        ({"type": "number"}, ["1.5", "2", "1e3"], ["True"]),
        ({"type": "boolean"}, ["True", "False"], ["true", "1"]),
        ({"type": ["integer", "null"]}, ["1", "None"], ['"x"']),
        ({"enum": ["red", 1, None]}, ['"red"', "1", "None"], ["2", "'red'"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['["x"]']),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}, ["1", '["x"]'], ["[1]"]),
    ],
)
def test_values_follow_their_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert may_end({"a": schema}, f"a={text}"), text
    for text in bad:
        assert not may_end({"a": schema}, f"a={text}"), text


def test_a_tool_that_is_not_strict_may_have_any_value_where_literals_cannot_follow() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert may_end({"a": schema, "b": {}}, "a={'x': [1, None]}, b=True", strict=False)
    for bad in ({"a": schema}, {"a": {"type": "string", "minLength": 1}}, {"a-b": {"type": "string"}}):
        with pytest.raises(GrammarError):
            PythonArguments().of(Tool("run", parameters={"type": "object", "properties": bad}, strict=True))
    with pytest.raises(GrammarError):
        PythonArguments().of(Tool("run", strict=True))
