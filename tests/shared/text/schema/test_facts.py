from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.schema.document import Document
from quire.shared.text.schema.facts import KINDS, are_disjoint, constants, kinds


def test_the_types_of_a_schema() -> None:
    assert kinds(True) == KINDS
    assert kinds(False) == frozenset()
    assert kinds({"type": "integer"}) == {"number"}
    assert kinds({"type": ["string", "null"], "enum": ["a", 5]}) == {"string"}
    assert kinds({"const": {}}) == KINDS


def test_the_constants_of_a_schema_have_their_types() -> None:
    assert constants({"enum": [1, True, "1"]}) == {("number", 1), ("boolean", True), ("string", "1")}
    assert constants({"const": []}) is None
    assert constants({"type": "null"}) is None


def kind(name: str, **changes: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} | changes


@pytest.mark.parametrize(
    ("branches", "disjoint"),
    [
        ([{"type": "string"}, {"type": "number"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"enum": [2, "1"]}], True),
        ([kind("a"), kind("b"), {"type": "null"}], True),
        ([kind("a"), kind("b", required=[])], True),
        ([kind("a", required=[]), kind("b", required=[])], False),
        ([kind("a"), {"$ref": "#/$defs/b"}], True),
        ([{"const": number} for number in range(101)], False),  # too many to compare
    ],
)
def test_branches_exclude_each_other_by_types_constants_and_required_properties(
    branches: list[Any], disjoint: bool
) -> None:
    assert are_disjoint(branches, Document({"$defs": {"b": kind("b")}})) is disjoint
