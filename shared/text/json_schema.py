"""JSON schemas as llguidance takes them.

A keyword that cannot be followed is an error, never ignored, unless it constrains nothing. Answers have the white space
that `json.dumps` writes: without that limit a model sometimes writes white space until the answer reaches its maximum
length.
"""

from __future__ import annotations

import json
from typing import Any

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.rewrite import simplify

# Options of llguidance. Clients cannot set them, because one of them ignores unknown keywords.
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS_KEYWORD = "x-guidance"
_WITHOUT_UNICODE_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}


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
