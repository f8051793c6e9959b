"""Keywords of arrays that become `prefixItems` and `enum`: `contains` and `uniqueItems`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.document import Document, Silent
from quire.shared.text.schema.facts import KINDS, are_disjoint, kind_of, kinds
from quire.shared.text.schema.negation import complement

# Bounds of the arrays and items that are listed.
_MAX_CONTAINED = 64
_MAX_VALUES = 32
_MAX_ARRAYS = 400
_NOT_ARRAYS = {"type": sorted(KINDS - {"array"})}


def write_out_contains(schema: dict[str, Any], document: Document) -> None:
    """Replace `contains`, in place: the items that match come first, after those of `prefixItems`."""
    wanted = schema.pop("contains", None)
    low, high = schema.pop("minContains", 1), schema.pop("maxContains", None)
    if wanted is None or (low == 0 and high is None):
        return
    if not _is_count(low) or not (high is None or _is_count(high)) or max(low, high or 0) > _MAX_CONTAINED:
        raise GrammarError(f"minContains and maxContains must be from 0 to {_MAX_CONTAINED}")
    before = schema.get("prefixItems", [])
    place = len(before) if type(before) is list else 0
    if schema.get("items") is False or schema.get("maxItems", place + low) < place + low:
        place = 0
    added: dict[str, Any] = {"prefixItems": [True] * place + [document.copy(wanted) for _ in range(low)]}
    added["minItems"] = place + low
    if high is not None:
        if high < low:
            raise GrammarError("maxContains is less than minContains")
        outside = complement(wanted, document).branches
        rest: Any = {"anyOf": outside} if outside else False
        # The items before and after those that match do not match; up to `high` others may.
        free = [True] * (high - low)
        added["prefixItems"] = [document.copy(rest)] * place + added["prefixItems"][place:] + free
        # `contains` evaluates only the items that match, wherever they are.
        added = Silent(added, items=rest)
    schema["allOf"] = [*schema.get("allOf", []), added]


def write_out_unique_items(schema: dict[str, Any], document: Document) -> None:
    """Replace `uniqueItems`, in place: the arrays are listed, or consist of items that differ by their schemas.

    Raise GrammarError if the items have infinitely many values.
    """
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("uniqueItems") is not True:
        return
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if type(prefix) is not list or not _is_count(low) or not (high is None or _is_count(high)):
        return
    del schema["uniqueItems"]
    longest = len(prefix) if items is False else high
    longest = longest if high is None or longest is None else min(longest, high)
    if longest is not None and longest <= 1:
        return
    if len(prefix) > 1 and low <= len(prefix) and are_disjoint(prefix, document):
        schema["maxItems"] = len(prefix) if longest is None else min(longest, len(prefix))
        return
    listed = _arrays(prefix, items, low, longest, document)
    if not listed:
        raise GrammarError("uniqueItems needs items of few values, such as an enum; leave it out, or list the values")
    schema["allOf"] = [*schema.get("allOf", []), {"anyOf": [_NOT_ARRAYS, {"enum": listed}]}]


def _arrays(prefix: list[Any], items: Any, low: int, high: int | None, document: Document) -> list[list[Any]]:
    """Return arrays of different values, the shortest first; empty if the values are too many."""
    columns = [_values(schema, document) for schema in prefix]
    rest = _values(items, document) if high is None or high > len(prefix) else []
    if rest is None or any(column is None for column in columns):
        return []
    known = [column for column in columns if column is not None]
    arrays: list[list[Any]] = []
    for length in range(low, len(known) + len(rest) + 1 if high is None else high + 1):
        # Without `prefixItems`, many values come in the order of their list, as properties do.
        ordered = not known and len(rest) > 5
        candidates = (
            itertools.combinations(rest, length)
            if ordered
            else _different([*known[:length], *[rest] * (length - len(known))])
        )
        added = [list(array) for array in itertools.islice(candidates, _MAX_ARRAYS + 1)]
        if len(arrays) + len(added) > _MAX_ARRAYS:
            break
        arrays += added
    return arrays


def _different(columns: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield one value of each column, such that no two are equal."""
    if not columns:
        yield ()
        return
    for before in _different(columns[:-1]):
        taken = {_key(value) for value in before}
        for value in columns[-1]:
            if _key(value) not in taken:
                yield (*before, value)


def _values(schema: Any, document: Document) -> list[Any] | None:
    """Return values among which are all those of a schema; None if they are many or unknown."""
    schema = document.resolve(schema)
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return None
    values = _constants(schema)
    for keyword in ("anyOf", "oneOf"):
        if values is None and type(branches := schema.get(keyword)) is list:
            parts = [_values(branch, document) for branch in branches]
            values = None if None in parts else [value for part in parts for value in part or []]
    if values is None and type(schema.get("allOf")) is list:
        values = next((listed for part in schema["allOf"] if (listed := _values(part, document)) is not None), None)
    if values is None and "$ref" in schema:
        values = _constants(document.target(schema["$ref"]))
    if type(values) is not list or len(values) > _MAX_VALUES:
        return None
    allowed = kinds({"type": schema.get("type")})
    return list({_key(value): value for value in values if kind_of(value) in allowed}.values())


def _constants(schema: Any) -> Any:
    """Return the values that a schema lists itself, by `const`, `enum` or its type; None without such a list."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return schema["enum"]
    named = schema.get("type")
    named = named if type(named) is list else [named]
    if named == ["integer"]:
        low, high = schema.get("minimum"), schema.get("maximum")
        if type(low) is int and type(high) is int and high - low < _MAX_VALUES:
            return list(range(low, high + 1))
        return None
    is_few = {"boolean", "null"}.issuperset(named)
    return [constant for constant in (True, False, None) if kind_of(constant) in named] if is_few else None


def _key(value: Any) -> str:
    """Return a text that is equal for equal values of JSON: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list:
        return [_plain(item) for item in value]
    return {name: _plain(inner) for name, inner in value.items()} if type(value) is dict else value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
