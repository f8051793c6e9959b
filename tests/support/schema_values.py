"""Hypothesis strategies for the JSON schemas of an OpenAPI document: values that a schema accepts, and others."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from quire.shared.text import grammar
from quire.shared.text.grammar import GrammarVocabulary

Schema = dict[str, Any]
Values = st.SearchStrategy[Any]

# Bounds of generated values. Longer ones are the business of the tests of each limit.
MAX_ITEMS = 3
MAX_CHARACTERS = 12
MAX_OPTIONAL = 4

SCALARS: Values = (
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
) | st.text(max_size=MAX_CHARACTERS)
ANYTHING: Values = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=MAX_ITEMS) | st.dictionaries(st.text(max_size=8), inner, max_size=MAX_ITEMS),
    max_leaves=6,
)
# Half of a surrogate pair is not a character.
CHARACTERS = st.characters(exclude_categories=["Cs"])


class SchemaValues:
    """Strategies for the schemas of one document."""

    def __init__(self, document: Schema) -> None:
        self._document = document

    def resolve(self, schema: Schema) -> Schema:
        """The schema that a reference stands for."""
        while "$ref" in schema:
            found: Any = self._document
            for part in schema["$ref"][2:].split("/"):
                found = found[part]
            schema = found
        return schema

    def valid(self, schema: Schema) -> Values:
        """Values that the schema accepts, except for some patterns of strings."""
        schema = self.resolve(schema)
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "anyOf" in schema and "type" not in schema:
            return st.one_of([self.valid(one) for one in schema["anyOf"]])
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return st.one_of([self._of_kind(kind, schema) for kind in kinds]) if kinds else ANYTHING

    def near(self, schema: Schema) -> Values:
        """Accepted bodies in which one property has any value, perhaps under an unknown name."""
        names = st.sampled_from([*self.resolve(schema)["properties"], "unknown", ""])
        return st.builds(lambda body, name, value: {**body, name: value}, self.valid(schema), names, ANYTHING)

    def with_one_property(self, schema: Schema, body: dict[str, Any]) -> Values:
        """The body with one more property of the schema, or with another value of one that it has."""
        properties = sorted(self.resolve(schema)["properties"].items())
        return st.one_of(
            [self.valid(one).map(lambda value, name=name: {**body, name: value}) for name, one in properties]
        )

    def _of_kind(self, kind: str, schema: Schema) -> Values:
        if kind == "null":
            return st.none()
        if kind == "boolean":
            return st.booleans()
        if kind == "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        if kind == "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(low, schema.get("maximum"), allow_nan=False, allow_infinity=False)
        if kind == "string":
            return self._text(schema)
        if kind == "array":
            most = min(schema.get("maxItems", MAX_ITEMS), MAX_ITEMS)
            return st.lists(self.valid(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)
        assert kind == "object", kind
        return self._object(schema)

    def _text(self, schema: Schema) -> Values:
        if schema.get("contentMediaType") == "application/json":
            return self.valid(schema["contentSchema"]).map(json.dumps)
        if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        least = schema.get("minLength", 0)
        most = min(schema.get("maxLength", MAX_CHARACTERS), max(MAX_CHARACTERS, least))
        return st.text(CHARACTERS, min_size=least, max_size=most)

    def _object(self, schema: Schema) -> Values:
        properties = schema.get("properties", {})
        if not properties:
            names = self._text(schema.get("propertyNames", {}))
            extra = schema.get("additionalProperties")
            values = self.valid(extra) if isinstance(extra, dict) else SCALARS
            return st.dictionaries(names, values, max_size=MAX_ITEMS)
        return self._record(schema, properties)

    @st.composite
    @staticmethod
    def _drawn(draw: st.DrawFn, self: SchemaValues, schema: Schema, properties: Schema) -> dict[str, Any]:
        required = list(schema.get("required", ()))
        # An object with `type` has alternatives of what it requires, not of its form.
        either = [one["required"][0] for one in (*schema.get("oneOf", ()), *schema.get("anyOf", ()))]
        if either:
            required.append(draw(st.sampled_from(either)))
        others = sorted(properties.keys() - set(required) - set(either))
        chosen = draw(st.lists(st.sampled_from(others), max_size=MAX_OPTIONAL, unique=True)) if others else []
        found = {name: draw(self.valid(properties[name])) for name in (*required, *chosen)}
        for name in either:
            if found.get(name, "") is None:
                found[name] = draw(self.valid(properties[name]).filter(lambda value: value is not None))
        return found

    def _record(self, schema: Schema, properties: Schema) -> Values:
        return SchemaValues._drawn(self, schema, properties)


# --- schema checks ----------------------------------------------------------------------------------------------------
# Schemas that tests of rewriting use: which values their grammars accept.

VOCABULARY = GrammarVocabulary({}, (256,), 257)
BYTES = VOCABULARY.tokenizer(has_all_ids=False)


def accepts(schema: Any, value: Any) -> bool:
    """Tell if the grammar of a schema accepts a value as `json.dumps` writes it. Raises GrammarError."""
    return accepts_text(schema, json.dumps(value, ensure_ascii=False))


def accepts_text(schema: Any, text: str) -> bool:
    """Tell if the grammar of a schema accepts a text. Raises GrammarError."""
    made = grammar.matcher(grammar.write("json_schema", schema), BYTES, ())
    data = list(text.encode())
    return bool(made.try_consume_tokens(data) == len(data) and made.is_accepting())


def accepted(schema: Any, *values: Any) -> list[Any]:
    """Return the values that the grammar of a schema accepts."""
    return [value for value in values if accepts(schema, value)]
