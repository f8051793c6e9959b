"""Parts of JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.schema_parts import (
    COUNT,
    FLAG,
    OBJECT_TEXT,
    TEXT,
    Schema,
    any_of,
    array,
    closed,
    or_null,
    record,
    text,
    with_nulls,
)

# Accepted values, then refused ones.
CASES: list[tuple[Schema, list[Any], list[Any]]] = [
    (text(1, 3), ["a", "abc"], ["", "abcd", 5, None]),
    (text(0, 3), ["", "abc"], ["abcd"]),
    (or_null(COUNT), [0, 5, None], [-1, "5"]),
    (any_of(TEXT, FLAG), ["x", True], [1, None]),
    (array(TEXT, low=1, high=2), [["a"], ["a", "b"]], [[], ["a", "b", "c"], [1], "a"]),
    (array(TEXT), [[], ["a"] * 99], [{}]),
    (record({"b": TEXT}, a=COUNT), [{"a": 1}, {"a": 1, "c": 1}], [{}, {"a": 1, "b": 1}]),
    (closed({"a": {}}, {"b": TEXT}), [{"a": 1}, {"a": None, "b": "x"}], [{}, {"a": 1, "c": 1}, {"a": 1, "b": None}]),
    (with_nulls({"a": {}}, {"b": TEXT}), [{"a": 1, "b": None, "c": None}, {"a": 1, "b": "x"}], [{"a": 1, "c": 1}]),
    (OBJECT_TEXT, ["{}", ' {"a":\n1} '], ["", "[]", "x", "5", {}]),
]


@pytest.mark.parametrize(("schema", "accepted", "refused"), CASES)
def test_a_part_accepts_what_it_describes(schema: Schema, accepted: list[Any], refused: list[Any]) -> None:
    Draft202012Validator.check_schema(schema)
    check = Draft202012Validator(schema)
    assert [value for value in accepted if not check.is_valid(value)] == []
    assert [value for value in refused if check.is_valid(value)] == []
