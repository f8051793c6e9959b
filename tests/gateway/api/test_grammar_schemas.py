"""Schemas of the parameters that are grammars, against their readers.

`openapi/test_parameter_schemas.py` compares them for further values.
"""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.grammar_schemas import CHOICE, GRAMMAR, JSON, REGEX, RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from quire.gateway.api.schema_parts import Schema
from quire.gateway.api.structured_outputs import READERS, structured_outputs
from quire.gateway.errors.api_errors import ApiError

TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
OF_READERS = {"json": JSON, "regex": REGEX, "choice": CHOICE, "grammar": GRAMMAR}
VALUES: list[Any] = [{}, "{}", "[a-z]+", ["a", "b"], [""], [], "", "root ::= %json", "start: %json {}", 5, True, TAG]


@pytest.mark.parametrize("name", OF_READERS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_field(name: str, value: Any) -> None:
    try:
        READERS[name](name, value)
        good = True
    except ApiError:
        good = False
    assert Draft202012Validator(OF_READERS[name]).is_valid(value) == good


@pytest.mark.parametrize("name", READERS)
def test_exactly_one_field_is_given(name: str) -> None:
    check = Draft202012Validator(STRUCTURED_OUTPUTS)
    value: Any = {"choice": ["a"], "json_object": True, "json": {}, "structural_tag": TAG}.get(name, "a")
    for body in ({name: value}, {name: value, "other": None}, {**dict.fromkeys(READERS), name: value}):
        assert check.is_valid(body)
        structured_outputs("structured_outputs", body)
    other = "regex" if name != "regex" else "grammar"
    for body in ({name: None}, {name: value, other: "a"}, {name: value, "other": 1}):
        assert not check.is_valid(body)
        with pytest.raises(ApiError):
            structured_outputs("structured_outputs", body)


@pytest.mark.parametrize("schema", [STRUCTURED_OUTPUTS, RESPONSE_FORMAT])
def test_a_schema_is_one(schema: Schema) -> None:
    Draft202012Validator.check_schema(schema)


def test_a_structural_tag_has_one_of_two_forms() -> None:
    check = Draft202012Validator(RESPONSE_FORMAT)
    assert check.is_valid(TAG)
    assert check.is_valid({"type": "structural_tag", "format": {"type": "any_text"}})
    assert not check.is_valid({**TAG, "format": {}})
    assert not check.is_valid({"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": []})
