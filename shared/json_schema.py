"""JSON schemas that an answer must follow: what both services accept, as a grammar of llguidance.

A schema is text, so that it means the same to gateway and worker. What llguidance does not know of JSON Schema is an
error, never ignored. White space is as `json.dumps` writes it: a model that may go on with it for ever sometimes does.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

# What `{"type": "json_object"}` asks for.
ANY_OBJECT = '{"type":"object"}'

_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class SchemaError(ValueError):
    """A schema that no answer can be made to follow: what is wrong with it, in one line."""


def grammar(schema: str) -> str:
    """The grammar of a schema, for LLMatcher. Raises SchemaError for what is no JSON object."""
    try:
        made: str = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
    except ValueError as error:
        raise SchemaError(one_line(str(error))) from error
    return made


def matcher(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer; its first mask is made. Raises SchemaError."""
    made = LLMatcher(tokenizer, grammar(schema), log_level=0)
    return _look(made)


@lru_cache(maxsize=64)
def check(schema: str) -> None:
    """Raise SchemaError unless answers can follow a schema, whatever the tokenizer. It may take a tenth of a second."""
    made = matcher(schema, LLTokenizer("byte"))
    # Behind what every answer begins with, such as a brace, all properties are open: there most limits are met.
    made.consume_tokens(made.compute_ff_tokens())
    _look(made)


def _look(made: LLMatcher) -> LLMatcher:
    """Make the mask of what may come next. Raises SchemaError."""
    if not made.is_error() and not made.is_stopped():
        made.compute_bitmask()
    if made.is_error():
        raise SchemaError(one_line(made.get_error()))
    return made


def canonical(schema: dict[str, Any]) -> str:
    """The text of a schema, with properties in their order, which is that of the answer."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def one_line(error: str) -> str:
    """What llguidance says, without the state that it adds, which has what the answer said."""
    return " ".join(error.split("<state>")[0].split())[:300]
