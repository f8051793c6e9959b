"""`unevaluatedProperties` and `unevaluatedItems` become `additionalProperties` and `items`.

A schema is split into branches, such that each says which properties and items it evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.arrays import write_out_contains
from quire.shared.text.schema.conditions import write_out
from quire.shared.text.schema.document import Document, Silent

UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_MAX_BRANCHES = 64
_MAX_DEPTH = 16
# Keywords that stay where they are, because references point to them.
_IDENTIFIERS = ("$schema", "$id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "$comment", "title")


@dataclass(slots=True)
class Branch:
    """Schemas that a value matches, and what they evaluate.

    names, patterns: of properties. items: the number of first items. all_properties, all_items: whether they evaluate
    all of them.
    """

    schemas: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    items: int = 0
    all_properties: bool = False
    all_items: bool = False

    def with_other(self, other: Branch) -> Branch:
        """Return the branch of values that match both."""
        return Branch(
            self.schemas + other.schemas,
            self.names + other.names,
            self.patterns + other.patterns,
            max(self.items, other.items),
            self.all_properties or other.all_properties,
            self.all_items or other.all_items,
        )


def write_out_unevaluated(schema: dict[str, Any], document: Document) -> None:
    """Replace both keywords of a schema, in place. Raise GrammarError."""
    given = {keyword: schema.pop(keyword) for keyword in UNEVALUATED if keyword in schema}
    if not given:
        return
    kept = {keyword: schema.pop(keyword) for keyword in _IDENTIFIERS if keyword in schema}
    branches = _branches(dict(schema), document, 0)
    written: list[Any] = []
    for branch in branches:
        closed: dict[str, Any] = {}
        if "unevaluatedProperties" in given and not branch.all_properties:
            closed["properties"] = dict.fromkeys(branch.names, True)
            closed["patternProperties"] = dict.fromkeys(branch.patterns, True)
            closed["additionalProperties"] = given["unevaluatedProperties"]
        if "unevaluatedItems" in given and not branch.all_items:
            closed["prefixItems"] = [True] * branch.items
            closed["items"] = given["unevaluatedItems"]
        # First, because llguidance takes the order of the properties from there.
        written.append({"allOf": [document.copy(closed), *map(document.copy, branch.schemas)]})
    schema.clear()
    schema.update(kept)
    schema["anyOf"] = written


def _branches(schema: Any, document: Document, depth: int) -> list[Branch]:
    """Return the branches of a schema: a value matches it if it matches one of them."""
    if isinstance(schema, Silent) or not isinstance(schema, dict):
        return [Branch([schema])]
    if depth > _MAX_DEPTH or "$dynamicRef" in schema:
        raise GrammarError("unevaluatedProperties and unevaluatedItems do not go with references that are this deep")
    schema = dict(schema)
    write_out(schema, document)
    items = _evaluated_items(schema)
    write_out_contains(schema, document)
    base = {keyword: value for keyword, value in schema.items() if keyword not in ("allOf", "anyOf", "$ref")}
    branch = Branch(
        [base],
        list(base.get("properties", {})),
        list(base.get("patternProperties", {})),
        items,
        "additionalProperties" in base or "unevaluatedProperties" in base,
        "items" in base or "unevaluatedItems" in base,
    )
    branches = [branch]
    for part in schema.get("allOf", []):
        branches = _both(branches, _branches(part, document, depth + 1))
    if "anyOf" in schema:
        choices = [branch for part in schema["anyOf"] for branch in _branches(part, document, depth + 1)]
        branches = _both(branches, choices)
    if "$ref" in schema:
        target = document.target(schema["$ref"])
        if target is None:
            raise GrammarError("unevaluatedProperties and unevaluatedItems do not go with references to elsewhere")
        branches = _both(branches, _branches(target, document, depth + 1))
    return branches


def _evaluated_items(schema: dict[str, Any]) -> int:
    """Return the number of first items that `prefixItems` evaluates."""
    prefix = schema.get("prefixItems", [])
    return len(prefix) if type(prefix) is list else 0


def _both(some: list[Branch], others: list[Branch]) -> list[Branch]:
    if len(some) * len(others) > _MAX_BRANCHES:
        raise GrammarError("unevaluatedProperties and unevaluatedItems do not go with so many branches")
    return [branch.with_other(other) for branch in some for other in others]
