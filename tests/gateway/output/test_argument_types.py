from typing import Any

import pytest

from quire.gateway.output.argument_types import properties_of, resolved, types_of
from quire.gateway.output.python_literals import PythonArguments
from quire.gateway.output.tools import Tool

ROOT: dict[str, Any] = {
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "$defs": {"City": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}, "Deep": {"anyOf": []}},
}
ROOT["$defs"]["Deep"]["anyOf"].append({"$ref": "#/$defs/Deep"})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/City"}, {"type": "null"}]}, {"string", "null"}),
        ({"enum": ["a", 1, True, None, 1.5, [], {}]},
         {"string", "integer", "boolean", "null", "number", "array", "object"}),
        ({"const": "x"}, {"string"}),
        ({"$ref": "#/$defs/City"}, {"string"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/$defs/Deep"}, set()),
        ({"$ref": "#/properties/nothing/x"}, set()),
        ({"$ref": "https://example.org/x"}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)  # fmt: skip
def test_types(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_properties_and_references() -> None:
    assert list(properties_of(ROOT)) == ["city"]
    assert properties_of({"properties": 1}) == {}
    assert resolved(ROOT["properties"]["city"], ROOT) == {"type": "string"}


def test_alternatives_that_refer_to_each_other_end() -> None:
    """Without a bound, the work would grow with 20 to the power of the depth."""
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 20 + [{"type": "integer"}]}}}
    assert types_of({"$ref": "#/$defs/A"}, root) == {"integer"}
    arguments = PythonArguments()
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, **root}
    arguments.of(Tool("run", parameters=schema))
    assert len(arguments.rules) < 100
