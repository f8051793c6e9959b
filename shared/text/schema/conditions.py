"""Conditions of JSON Schema that become `allOf` and `anyOf`: `not`, `if`, `oneOf`, `dependentRequired`, ...

Each condition becomes a choice between a schema and the complement of another. A complement may lack values, so answers
may be fewer than the schema allows.
"""

from __future__ import annotations

from typing import Any

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.document import Document, Silent
from quire.shared.text.schema.facts import are_disjoint, kinds
from quire.shared.text.schema.negation import complement

CONDITIONS = frozenset({"not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas"})
# Largest number of branches of `oneOf` that are written out; each is combined with the complements of all others.
_MAX_ONE_OF = 12


def write_out(schema: dict[str, Any], document: Document) -> None:
    """Replace the conditions of a schema, in place, those of its parts excepted. Raise GrammarError."""
    conditions = schema.keys() & CONDITIONS
    if not conditions:
        return
    _one_of(schema, document)
    added: list[Any] = []
    if "not" in schema:
        added.append(_outside("not", schema.pop("not"), document))
    if "if" in schema and ("then" in schema or "else" in schema):
        added.append(_if(schema, document))
    # Without `if`, `then` and `else` have no effect, and neither has `if` without them.
    for keyword in ("then", "else"):
        schema.pop(keyword, None)
    if "if" in schema:
        # Where the condition matches, it evaluates properties and items.
        added.append({"anyOf": [schema.pop("if"), Silent()]})
    added += _dependencies(schema, document)
    if added:
        others = schema.get("allOf", [])
        if type(others) is not list:
            raise GrammarError("allOf must be an array")
        if type(named := schema.get("properties")) is dict:
            # llguidance orders the properties of combined schemas by the first that names them in `allOf`.
            added.insert(0, Silent({"properties": dict.fromkeys(named, True)}))
        schema["allOf"] = [*others, *added]


def _outside(keyword: str, schema: Any, document: Document) -> Any:
    """Return a schema for values outside of a schema. Raise GrammarError if none is found."""
    outside = complement(schema, document)
    if not outside.branches:
        if outside.is_whole:
            return False
        raise GrammarError(f"{keyword} cannot be followed here: write the values that are allowed instead")
    return Silent({"anyOf": outside.branches})


def _if(schema: dict[str, Any], document: Document) -> Any:
    condition = schema.pop("if")
    outside = _outside("if", condition, document)
    met = {"allOf": [document.copy(condition), schema.pop("then", True)]}
    return {"anyOf": [met, {"allOf": [outside, schema.pop("else", True)]}]}


def _one_of(schema: dict[str, Any], document: Document) -> None:
    branches = schema.get("oneOf")
    if type(branches) is not list:
        return
    if are_disjoint(branches, document):
        if "anyOf" not in schema:
            renamed = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in schema.items()]
            schema.clear()
            schema.update(renamed)
            return
        del schema["oneOf"]
        chosen = branches
    else:
        chosen = _written_out(branches, document)
        if not chosen:
            return  # llguidance refuses it with a remedy
        del schema["oneOf"]
    others = schema.get("allOf", [])
    schema["allOf"] = [*(others if type(others) is list else []), {"anyOf": chosen}]


def _written_out(branches: list[Any], document: Document) -> list[Any]:
    """Return the branches, each with the complements of all others; empty if a complement is not found.

    Branches that match nothing else than other branches are left out.
    """
    if len(branches) > _MAX_ONE_OF:
        return []
    written = []
    outside = [complement(branch, document) for branch in branches]
    for index, branch in enumerate(branches):
        its_kinds = kinds(document.resolve(branch))
        parts: list[Any] = [document.copy(branch)]
        for other in outside[:index] + outside[index + 1 :]:
            matching = [document.copy(schema) for schema in other.branches if not its_kinds.isdisjoint(kinds(schema))]
            if not matching and not other.is_whole:
                return []
            parts.append(Silent({"anyOf": matching}) if matching else False)
        if False not in parts:
            written.append({"allOf": parts})
    return written


def _dependencies(schema: dict[str, Any], document: Document) -> list[Any]:
    added: list[Any] = []
    for keyword in ("dependentRequired", "dependentSchemas"):
        value = schema.pop(keyword, {})
        if type(value) is not dict:
            raise GrammarError(f"{keyword} must be an object")
        for name, needs in value.items():
            absent = Silent({"properties": {name: False}})
            # Only objects, because `dependentSchemas` evaluates nothing of other values.
            present: dict[str, Any] = {"type": "object", "required": [name]}
            if keyword == "dependentSchemas":
                present["allOf"] = [needs]
            else:
                present["required"] += needs
            added.append({"anyOf": [absent, present]})
    return added
