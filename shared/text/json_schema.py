"""JSON schemas that an answer must follow: what both services accept, as a grammar of llguidance.

A schema is text, so that it means the same to gateway and worker. A keyword that llguidance lacks is an error,
never ignored, unless it constrains nothing. White space is as `json.dumps` writes it: without
that limit a model sometimes writes white space until the answer is cut.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any
from urllib.parse import unquote

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

# RFC 3339, with `T` and `Z` in upper case. The year 0000 is left out: Python's `datetime` has no such year.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_FRACTION = r"(?:\.[0-9]{1,9})?"
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# The second 60 exists only at 23:59 UTC. Listed are the local times of offsets of whole and half hours.
_LEAP_SECOND = "|".join(
    [f"23:59:60{_FRACTION}Z"]
    + [
        f"{hour:02}:59:60{_FRACTION}(?:[+]{(hour + 1) % 24:02}:00|-{23 - hour:02}:00)"
        f"|{hour:02}:29:60{_FRACTION}(?:[+]{hour:02}:30|-{23 - hour:02}:30)"
        for hour in range(24)
    ]
)
_TIME = f"(?:{_MINUTE}:[0-5][0-9]{_FRACTION}(?:Z|[+-]{_MINUTE})|{_LEAP_SECOND})"

# Formats that answers follow. llguidance has all of them, but allows 29 February in any year and the second 60 in any
# minute; those with a pattern are compiled as that pattern. Other formats are annotations, as in JSON Schema 2020-12.
FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "duration": None,
    "email": None,
    "hostname": None,
    "ipv4": None,
    "ipv6": None,
    "uri": None,
    "uuid": None,
}

# Keywords whose values are no schemas, although they may look like one.
_DATA = frozenset({"const", "default", "enum", "examples"})
# Keywords whose values are schemas by name.
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
_SCALARS = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
_KINDS = frozenset({"array", "object", *_SCALARS.values()})
# Bounds of the search for branches of `oneOf` that exclude each other.
_MAX_BRANCHES = 100
_MAX_REFERENCES = 100
_OVERLAP = (
    "oneOf has branches that may both match; use anyOf, or give each branch type object and a required property with a "
    "const of its own"
)


class SchemaError(ValueError):
    """A schema that no answer can be made to follow: what is wrong with it, in one line."""


def grammar(schema: str) -> str:
    """The grammar of a schema, for LLMatcher. Raises SchemaError for what is no JSON object."""
    try:
        parsed = json.loads(schema)
        if type(parsed) is not dict:
            raise SchemaError("it must be a JSON object")
        if "x-guidance" in parsed:
            raise SchemaError("x-guidance is not supported")  # options of llguidance, such as to ignore what it lacks
        _simplify(parsed)
        made: str = LLMatcher.grammar_from_json_schema(canonical(parsed), overrides=_OPTIONS)
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
    """An error of llguidance about a schema: without the mark that it adds, with a remedy that a client has."""
    if "oneOf constraints are not supported" in error:  # it names an option of its own
        return _OVERLAP
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]


def _simplify(root: dict[str, Any]) -> None:
    """Write a schema, in place, in the part of JSON Schema that llguidance has, with the same meaning.

    Formats become patterns or vanish, keywords that constrain nothing vanish, and `oneOf` becomes `anyOf` where at most
    one branch can match. A keyword with a value of the wrong type is left for llguidance to refuse.
    """
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if type(value) is list:
            waiting += value
        elif type(value) is dict:
            _simplify_one(value, root)
            for keyword, inner in value.items():
                if keyword in _BY_NAME and type(inner) is dict:
                    waiting += inner.values()
                elif keyword not in _DATA:
                    waiting.append(inner)


def _simplify_one(schema: dict[str, Any], root: dict[str, Any]) -> None:
    if type(schema.get("format")) is str:
        _replace_format(schema)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if _is_any_name(schema.get("propertyNames")):
        del schema["propertyNames"]
    branches = schema.get("oneOf")
    if type(branches) is list and "anyOf" not in schema and _are_disjoint(branches, root):
        renamed = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in schema.items()]
        schema.clear()
        schema.update(renamed)
    if "oneOf" not in schema:
        # An annotation of OpenAPI. llguidance refuses recursive branches next to an unknown keyword.
        schema.pop("discriminator", None)


def _replace_format(schema: dict[str, Any]) -> None:
    name = schema["format"]
    if name in FORMATS and FORMATS[name] is None:
        return
    del schema["format"]
    if name not in FORMATS:
        return
    if "pattern" not in schema:
        schema["pattern"] = FORMATS[name]
    elif type(others := schema.get("allOf", [])) is list:
        schema["allOf"] = [*others, {"pattern": FORMATS[name]}]


def _is_any_name(schema: Any) -> bool:
    """Tell if a value of `propertyNames` allows every name; a name is always a string."""
    if type(schema) is not dict:
        return schema is True
    kinds, form = schema.get("type", "string"), schema.get("format", "")
    if kinds != "string" and not (type(kinds) is list and "string" in kinds):
        return False
    return type(form) is str and form not in FORMATS and schema.keys() <= {"type", "format", *_ANNOTATIONS}


def _are_disjoint(branches: list[Any], root: dict[str, Any]) -> bool:
    """Tell if types, constants and required properties prove that no value matches two of the branches."""
    if len(branches) > _MAX_BRANCHES:
        return False
    found = [_resolve(branch, root) for branch in branches]
    return all(_exclude(one, other, root) for index, one in enumerate(found) for other in found[:index])


def _exclude(one: Any, other: Any, root: dict[str, Any]) -> bool:
    """Tell if no value matches both schemas. Looks at required properties of objects, and no deeper."""
    if _differ(one, other):
        return True
    if _kinds(one) != {"object"} or _kinds(other) != {"object"}:
        return False
    fields, others = one.get("properties"), other.get("properties")
    if type(fields) is not dict or type(others) is not dict:
        return False
    required = [name for schema in (one, other) if type(schema.get("required")) is list for name in schema["required"]]
    return any(
        type(name) is str
        and name in fields
        and name in others
        and _differ(_resolve(fields[name], root), _resolve(others[name], root))
        for name in required
    )


def _differ(one: Any, other: Any) -> bool:
    """Tell if two schemas have no type in common, or no constant."""
    if _kinds(one).isdisjoint(_kinds(other)):
        return True
    constants, others = _constants(one), _constants(other)
    return constants is not None and others is not None and constants.isdisjoint(others)


def _resolve(schema: Any, root: dict[str, Any]) -> Any:
    """The schema that a reference leads to; any other schema is itself, and so is a reference to elsewhere."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if type(schema) is dict else None
        if type(reference) is not str or not reference.startswith("#/"):
            break
        found: Any = root
        for name in reference[2:].split("/"):
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            found = found.get(name) if type(found) is dict else None
        if found is None:
            break
        schema = found
    return schema


def _kinds(schema: Any) -> frozenset[str]:
    """The types that a schema may allow; an integer is a number."""
    if type(schema) is not dict:
        return _KINDS
    kinds = schema.get("type")
    allowed = [kinds] if type(kinds) is str else kinds
    known = _KINDS
    if type(allowed) is list and all(type(kind) is str for kind in allowed):
        known = frozenset("number" if kind == "integer" else kind for kind in allowed)
    constants = _constants(schema)
    return known if constants is None else known & {kind for kind, _ in constants}


def _constants(schema: Any) -> frozenset[tuple[str, Any]] | None:
    """The values that `const` or `enum` allows, each with its type; None without them, and where one is no scalar."""
    if type(schema) is not dict or ("const" not in schema and "enum" not in schema):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if type(values) is not list or not all(type(value) in _SCALARS for value in values):
        return None
    return frozenset((_SCALARS[type(value)], value) for value in values)


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
