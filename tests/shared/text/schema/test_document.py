from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.document import MAX_COPIES, Document

ROOT: dict[str, Any] = {
    "$defs": {
        "a/b": {"const": 1},
        "list": {"anyOf": [{}, {"const": 2}]},
        "named": {"$anchor": "x"},
        "far": {"$ref": "#x"},
    }
}


def test_references_are_followed_within_the_document() -> None:
    document = Document(ROOT)
    for reference, target in (
        ("#", ROOT),
        ("#/$defs/a~1b", {"const": 1}),
        ("#/$defs/list/anyOf/1", {"const": 2}),
        ("#x", {"$anchor": "x"}),
        ("#/$defs/none", None),
        ("#/$defs/list/anyOf/7", None),
        ("#y", None),
        ("https://example.com", None),
        (5, None),
    ):
        assert document.target(reference) == target
    assert document.resolve({"$ref": "#/$defs/far"}) == {"$anchor": "x"}
    assert document.resolve({"$ref": "#/$defs/list/anyOf/1", "title": "Two"}) == {"const": 2}
    assert document.resolve({"$ref": "#x", "type": "null"}) == {"$ref": "#x", "type": "null"}
    assert document.resolve({"$ref": "#y"}) == {"$ref": "#y"}
    assert document.resolve(True) is True


def test_a_reference_to_itself_ends() -> None:
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert Document(circle).resolve(circle) == {"$ref": "#/$defs/a"}


def test_the_original_stays_when_the_schema_is_rewritten() -> None:
    root: dict[str, Any] = {"$defs": {"a": {"const": 1}}}
    document = Document(root)
    root["$defs"]["a"]["const"] = 2
    assert document.target("#/$defs/a") == {"const": 1}


def test_references_in_a_document_with_embedded_resources_are_not_followed() -> None:
    """They are relative to the resource."""
    assert Document({"$defs": {"a": {"$id": "x", "$ref": "#/b"}}, "b": {}}).target("#/b") is None
    assert Document({"$id": "x", "b": {}}).target("#/b") == {}


def test_what_is_copied_is_bounded() -> None:
    with pytest.raises(GrammarError, match="too large"):
        Document({}).copy({"a": [{"b": {}}] * MAX_COPIES})
