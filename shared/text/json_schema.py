"""JSON schemas that an answer must follow: each becomes a grammar of llguidance, the same in gateway and worker.

A schema is passed on as text, so that it means the same in both services. A keyword that llguidance lacks is an error,
never ignored, unless it constrains nothing. Answers have the white space that `json.dumps` writes: without that limit a
model sometimes writes white space until the answer reaches its maximum length.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.shared.text.json_schema_rewrite import simplify

# The schema of the response format `{"type": "json_object"}`.
ANY_OBJECT = '{"type":"object"}'

_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Limits of the work for one mask: some milliseconds, because the thread that computes masks serves all requests. An
# ordinary mask takes less than 2 ms with a vocabulary of 50,000. With llguidance's default limits some masks take more
# than a second. A state of the lexer takes half a kilobyte.
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=10_000, max_lexer_states=100_000, verbose_errors=False)

_OVERLAP = (
    "oneOf has branches that may both match; use anyOf, or give each branch type object and a required property with a "
    "const of its own"
)


class SchemaError(ValueError):
    """A schema that answers cannot be made to follow. The text is one line that names the fault."""


def grammar(schema: str) -> str:
    """Return the grammar of a schema, for LLMatcher. Raises SchemaError, also for a text that is not a JSON object."""
    try:
        parsed = json.loads(schema)
        if type(parsed) is not dict:
            raise SchemaError("it must be a JSON object")
        if "x-guidance" in parsed:
            raise SchemaError("x-guidance is not supported")  # sets options of llguidance, such as to ignore keywords
        simplify(parsed)
        made: str = LLMatcher.grammar_from_json_schema(canonical(parsed), overrides=_OPTIONS)
    except SchemaError:
        raise
    except (TypeError, ValueError) as error:
        raise SchemaError(one_line(str(error))) from error
    return made


def matcher(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of an answer, with its first mask computed. Raises SchemaError."""
    made = LLMatcher(tokenizer, grammar(schema), log_level=0, limits=_LIMITS)
    return _look(made)


def check(schema: str) -> None:
    """Raise SchemaError unless answers can follow a schema, with any tokenizer.

    The check may run without end, exhaust the memory or end the process. Check the schemas of clients in a process with
    limits (`json_schema_trial.py`).
    """
    made = matcher(schema, LLTokenizer("byte"))
    # Most limits are met after the forced beginning of an answer, such as a brace, where all properties may follow.
    made.consume_tokens(made.compute_ff_tokens())
    _look(made)


def _look(made: LLMatcher) -> LLMatcher:
    """Compute the mask of the next token, unless the matcher has stopped. Raises SchemaError."""
    if not made.is_error() and not made.is_stopped():
        made.compute_bitmask()
    if made.is_error():
        raise SchemaError(one_line(made.get_error()))
    return made


def canonical(schema: dict[str, Any]) -> str:
    """Return the text of a schema. The order of the properties is kept: answers have the same order."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def one_line(error: str) -> str:
    """Return an error of llguidance as one line, without its markup and with a remedy that a client can apply."""
    if "oneOf constraints are not supported" in error:  # llguidance proposes an option that clients cannot set
        return _OVERLAP
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]
