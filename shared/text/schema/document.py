"""A JSON schema as a whole: its references, and the bounds of its rewriting."""

from __future__ import annotations

import copy
from typing import Any
from urllib.parse import unquote

from quire.shared.text.grammar_error import GrammarError

# Bound of the parts of schemas that rewriting copies.
MAX_COPIES = 20_000
_MAX_REFERENCES = 100
# Keywords that constrain nothing.
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$defs",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)


class Silent(dict[str, Any]):
    """A schema that evaluates no property and no item, such as a schema that stands for `not`."""


class Document:
    """The schema as the client wrote it, while rewriting changes a copy.

    Decisions look at the original: a rewritten part may match fewer values, so its complement may match too many.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = copy.deepcopy(root)
        # References inside of an embedded resource are relative to that resource, and are not followed here.
        self.has_resources = any("$id" in part for part in _parts(self.root) if part is not self.root)
        self._copied = 0

    def copy(self, schema: Any) -> Any:
        """Return a deep copy. Raise GrammarError if rewriting copies too much."""
        self._copied += 1 + sum(1 for _ in _parts(schema))
        if self._copied > MAX_COPIES:
            raise GrammarError("it is too large when its conditions are written out; make it simpler")
        return copy.deepcopy(schema)

    def resolve(self, schema: Any) -> Any:
        """Follow references that are alone in their schema, or with annotations. Others are returned unchanged.

        References to elsewhere are not followed.
        """
        for _ in range(_MAX_REFERENCES):
            if type(schema) is not dict or "$ref" not in schema or schema.keys() - ANNOTATIONS != {"$ref"}:
                break
            target = self.target(schema["$ref"])
            if target is None:
                break
            schema = target
        return schema

    def target(self, reference: Any) -> Any:
        """Return the schema that a reference points to, or None if it is not in the document."""
        if type(reference) is not str or not reference.startswith("#") or self.has_resources:
            return None
        if not reference.startswith("#/") and reference != "#":
            named = [
                part for part in _parts(self.root) if part.get("$anchor", part.get("$dynamicAnchor")) == reference[1:]
            ]
            return named[0] if len(named) == 1 else None
        node: Any = self.root
        for name in reference[2:].split("/") if len(reference) > 1 else ():
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if type(node) is list:
                node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
            else:
                node = node.get(name) if type(node) is dict else None
        return node


def _parts(value: Any) -> list[dict[str, Any]]:
    """Return all objects within a value, itself included."""
    waiting, parts = [value], []
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            parts.append(part)
            waiting += part.values()
        elif type(part) is list:
            waiting += part
    return parts
