from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.gateway.api import given_grammars
from quire.gateway.api.given_grammars import GivenGrammar
from quire.gateway.errors.api_errors import InvalidRequest
from quire.shared.sampling_params import MAX_GRAMMAR_LENGTH, MAX_SCHEMA_LENGTH
from quire.shared.text.grammar import ANY_OBJECT

Reader = Callable[[str, Any], GivenGrammar | tuple[()]]


@pytest.mark.parametrize(
    ("reader", "value", "text"),
    [
        (given_grammars.read_schema, {"const": 1}, '{"json_schema":{"const":1}}'),
        (given_grammars.read_schema_or_text, {"const": 1}, '{"json_schema":{"const":1}}'),
        (given_grammars.read_schema_or_text, '{"const": 1}', '{"json_schema":{"const":1}}'),
        (given_grammars.read_json_object, True, ANY_OBJECT),
        (given_grammars.read_regex, "[ä]", '{"regex":"[ä]"}'),
        (given_grammars.read_choice, ["a", "b"], '{"choice":["a","b"]}'),
        (given_grammars.read_grammar, 'root ::= "a"', '{"ebnf":"root ::= \\"a\\""}'),
        (given_grammars.read_grammar, 'start: "a"', '{"lark":"start: \\"a\\""}'),
        (given_grammars.read_structural_tag, {"format": {}}, '{"structural_tag":{"format":{}}}'),
        (given_grammars.read_structural_tag, '{"format": {}}', '{"structural_tag":{"format":{}}}'),
    ],
)
def test_a_value_becomes_the_text_of_a_grammar(reader: Reader, value: Any, text: str) -> None:
    assert reader("x", value) == ("x", text)


def test_false_is_no_grammar() -> None:
    assert given_grammars.read_json_object("x", False) == ()


DEEP = '{"items":' * 100_000 + "{}" + "}" * 100_000


@pytest.mark.parametrize(
    ("reader", "value", "says"),
    [
        (given_grammars.read_schema, "{}", "an object"),
        (given_grammars.read_schema_or_text, "[]", "an object"),
        (given_grammars.read_schema_or_text, "{", "an object, or the JSON text of one"),
        (given_grammars.read_schema_or_text, '{"const": NaN}', "an object, or the JSON text of one"),
        (given_grammars.read_schema_or_text, DEEP, "at most 65536"),
        (given_grammars.read_schema_or_text, DEEP[:18_000] + "{}" + "}" * 2000, "not nested so deeply"),
        (given_grammars.read_json_object, 1, "true or false"),
        (given_grammars.read_regex, "", "a string that is not empty"),
        (given_grammars.read_regex, "x" * (MAX_SCHEMA_LENGTH + 1), "at most 65536"),
        (given_grammars.read_choice, [], "an array of strings that are not empty"),
        (given_grammars.read_choice, ["a", ""], "an array of strings that are not empty"),
        (given_grammars.read_choice, ["x" * 100] * 700, "at most 65536"),
        (given_grammars.read_grammar, 5, "a string that is not empty"),
        (given_grammars.read_grammar, "start: %json {}", "contains %json"),
        (given_grammars.read_grammar, '%llguidance {"no_forcing": true}\nstart: "a"', "contains %llguidance"),
        (given_grammars.read_structural_tag, [], "an object"),
    ],
)
def test_a_value_that_is_no_grammar_is_refused_by_name(reader: Reader, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        reader("its.name", value)
    assert caught.value.param == "its.name"


def test_the_longest_grammar_of_a_client_is_one_that_a_worker_takes() -> None:
    """Each character becomes at most six in JSON."""
    given = given_grammars.read_regex("x", "\x01" * MAX_SCHEMA_LENGTH)
    assert len(given.text) <= MAX_GRAMMAR_LENGTH
