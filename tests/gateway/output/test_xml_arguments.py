from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.gateway.output.xml_arguments import XmlArguments
from quire.shared.text.grammar import special_tokens
from quire.shared.text.grammar_error import GrammarError
from tests.support.gateway.output_answers import Answers, byte_tokenizer

DEFINITIONS = {"$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}


def may_end(properties: dict[str, Any], *arguments: tuple[str, str], strict: bool = True, **others: Any) -> bool:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **DEFINITIONS, **others}
    tokenizer = byte_tokenizer()
    tools = [Tool("run", parameters=schema, strict=strict)]
    grammar = FORMATS["qwen3_coder"].grammar(tools, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return Answers(tokenizer, grammar).may_end(f"<tool_call>\n<function=run>\n{values}</function>\n</tool_call>")


def test_required_and_optional_arguments() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "string"}}
    for arguments, allowed in [
        ([("a", "x")], True),
        ([("a", "x"), ("b", "1")], True),
        ([("a", "x"), ("c", "y")], True),
        ([("a", "x"), ("b", "1"), ("c", "y")], True),
        ([("b", "1")], False),
        ([], False),
        ([("a", "x"), ("a", "x")], False),
        ([("a", "x"), ("d", "x")], False),
    ]:
        assert may_end(properties, *arguments, required=["a"]) == allowed, arguments


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a\nb", '"', "</param>", "3"], []),
        ({"type": "integer"}, ["1", "-20"], ["x", "1.5", "", '"1"']),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"enum": ["red", "light blue"]}, ["red", "light blue"], ["blue", '"red"']),
        ({"enum": [1, 2]}, ["1"], ["3"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['["x"]', "1"]),
        ({"$ref": "#/$defs/Point"}, ['{"x": 1}'], ['{"x": "y"}', "{}"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ["x"]),
    ],
)
def test_values_follow_their_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert may_end({"a": schema}, ("a", text)), text
    for text in bad:
        assert not may_end({"a": schema}, ("a", text)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a>": {"type": "string"}}},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}]},
    ],
)
def test_a_strict_tool_that_xml_cannot_follow_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        XmlArguments().of(Tool("run", parameters=schema, strict=True))
    assert XmlArguments().of(Tool("run", parameters=schema))


def test_a_tool_without_named_arguments_takes_any() -> None:
    tokenizer = byte_tokenizer()
    grammar = FORMATS["qwen3_coder"].grammar([Tool("run")], ToolChoice(), special_tokens(tokenizer))
    text = "<tool_call>\n<function=run>\n<parameter=any>\nx\n</parameter>\n</function>\n</tool_call>"
    assert Answers(tokenizer, grammar).may_end(text)
    assert not may_end({}, ("any", "x"))
    assert may_end({})
