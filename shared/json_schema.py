"""JSON schemas that an answer must follow: what both services accept, as a grammar of llguidance.

A schema is text, so that it means the same to gateway and worker. What llguidance does not know of JSON Schema is an
error, never ignored. White space is as `json.dumps` writes it: a model that may go on with it for ever sometimes does.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# What `{"type": "json_object"}` asks for.
ANY_OBJECT = '{"type":"object"}'

_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# What one mask may cost, on the thread that all requests share: milliseconds, where ordinary ones take less than 2 ms
# with a vocabulary of 50,000. By default some take more than a second. A state of the lexer is half a kilobyte.
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=10_000, max_lexer_states=100_000, verbose_errors=False)

# What the trial of a schema may take. Nothing inside llguidance bounds all of how a grammar is made: `multipleOf` takes
# time and memory by its value, patterns of one text multiply, and a chain of references overflows the stack.
TRIAL_CPU_S = 2
_TRIAL_BYTES = 64 * 1024 * 1024
# Far below what the threads of a worker have: what fits here fits there.
_TRIAL_STACK_BYTES = 1024 * 1024


class SchemaError(ValueError):
    """A schema that no answer can be made to follow: what is wrong with it, in one line."""


def grammar(schema: str) -> str:
    """The grammar of a schema, for LLMatcher. Raises SchemaError for what is no JSON object."""
    try:
        if "x-guidance" in json.loads(schema):
            raise SchemaError("x-guidance is not supported")  # options of llguidance, such as to ignore what it lacks
        made: str = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
    except SchemaError:
        raise
    except (TypeError, ValueError) as error:
        raise SchemaError(one_line(str(error))) from error
    return made


def matcher(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer; its first mask is made. Raises SchemaError."""
    made = LLMatcher(tokenizer, grammar(schema), log_level=0, limits=_LIMITS)
    return _look(made)


def check(schema: str) -> None:
    """Raise SchemaError unless answers can follow a schema, whatever the tokenizer.

    It may take for ever, exhaust the memory and end the process: for schemas of clients this file is a program.
    """
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
    """What llguidance says of a schema, without the mark that it adds."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]


def _trial() -> None:
    """Check the schema that is the standard input; what is wrong with it is the standard output. Ends with 0 if it has
    come so far."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_TRIAL_BYTES, _TRIAL_BYTES))
    schema = sys.stdin.buffer.read().decode()
    found: list[str] = []

    def look() -> None:
        try:
            check(schema)
            found.append("")
        except SchemaError as error:
            found.append(str(error))

    threading.stack_size(_TRIAL_STACK_BYTES)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    sys.stdout.buffer.write(found[0].encode())


if __name__ == "__main__":
    _trial()
