"""JSON schemas as llguidance takes them, rewritten in the part of JSON Schema that it has.

A keyword that cannot be followed is an error, never ignored, unless it constrains nothing. The rewritten schema may
match fewer values, never more. Answers have the white space that `json.dumps` writes: without that limit a model
sometimes writes white space until the answer reaches its maximum length.
"""

from __future__ import annotations

import json
from typing import Any

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.arrays import write_out_contains, write_out_unique_items
from quire.shared.text.schema.bounds import write_out_bounds
from quire.shared.text.schema.conditions import write_out
from quire.shared.text.schema.document import Document
from quire.shared.text.schema.formats import replace_format
from quire.shared.text.schema.names import exclude_other_spellings, write_out_few_names, write_out_names
from quire.shared.text.schema.patterns import without_lookaheads
from quire.shared.text.schema.unevaluated import write_out_unevaluated

# Options of llguidance. Clients cannot set them, because one of them ignores unknown keywords.
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS_KEYWORD = "x-guidance"
_WITHOUT_UNICODE_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}

# Keywords whose values are data, although they may look like schemas.
_DATA = frozenset({"const", "default", "enum", "examples"})
# Keywords whose values are schemas by name.
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_COUNTS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)


def compiled(schema: Any) -> str:
    """Return the text of a schema for llguidance, with its options. Raise GrammarError."""
    if type(schema) is not dict:
        raise GrammarError("it must be a JSON object")
    if _OPTIONS_KEYWORD in schema:
        raise GrammarError(f"{_OPTIONS_KEYWORD} is not supported")
    rewritten: dict[str, Any] = json.loads(canonical(schema))
    options = _OPTIONS if simplify(rewritten) else _OPTIONS | _WITHOUT_UNICODE_ESCAPES
    return canonical({_OPTIONS_KEYWORD: options, **rewritten})


def canonical(value: Any) -> str:
    """Return the JSON text of a value. The order of properties is kept: answers have the same order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def simplify(root: dict[str, Any]) -> bool:
    """Write a schema, in place, in the part of JSON Schema that llguidance has.

    Return False if the schema can be followed only without the escape `\\u` in answers.

    Keywords that are not known stay, and llguidance refuses them by name, as it refuses values of the wrong type.
    Raise GrammarError.
    """
    document, schemas = Document(root), []
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if type(value) is list:
            waiting += value
        elif isinstance(value, dict):
            _simplify_schema(value, document)
            schemas.append(value)
            for keyword, inner in value.items():
                if keyword in _BY_NAME and type(inner) is dict:
                    waiting += inner.values()
                elif keyword not in _DATA:
                    waiting.append(inner)
    return exclude_other_spellings(schemas)


def _simplify_schema(schema: dict[str, Any], document: Document) -> None:
    for keyword in _COUNTS:
        if type(count := schema.get(keyword)) is float and count.is_integer():
            schema[keyword] = int(count)
    write_out_unevaluated(schema, document)
    write_out(schema, document)
    write_out_contains(schema, document)
    write_out_unique_items(schema, document)
    write_out_names(schema, document)
    write_out_few_names(schema, document)
    _write_out_lookaheads(schema)
    write_out_bounds(schema)
    _use_anchors(schema, document)
    if type(schema.get("format")) is str:
        replace_format(schema)
    if "oneOf" not in schema:
        # `discriminator` is an annotation of OpenAPI; llguidance refuses recursive branches next to an unknown keyword.
        schema.pop("discriminator", None)


def _write_out_lookaheads(schema: dict[str, Any]) -> None:
    if type(pattern := schema.get("pattern")) is str and (parts := without_lookaheads(pattern)) is not None:
        del schema["pattern"]
        schema["allOf"] = [*schema.get("allOf", []), *({"pattern": part} for part in parts)]


def _use_anchors(schema: dict[str, Any], document: Document) -> None:
    """Write dynamic anchors as plain anchors, in a document in which each has a name of its own."""
    reference = schema.get("$dynamicRef")
    if type(reference) is str and document.target(reference) is not None and "$ref" not in schema:
        schema["$ref"] = schema.pop("$dynamicRef")
    if not document.has_resources and type(schema.get("$dynamicAnchor")) is str and "$anchor" not in schema:
        schema["$anchor"] = schema.pop("$dynamicAnchor")
