"""The parameters of a call that give a grammar: their readers, one for each kind, and what these accept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.gateway.errors.api_errors import InvalidRequest, invalid, of_check, only, refused
from quire.gateway.output.given_grammar import GivenGrammar
from quire.shared.config.schema_parts import ANY_OBJECT, NULL, TEXT, Schema, any_of, array, closed, or_null
from quire.shared.config.validators import Flag, InvalidValue, Text
from quire.shared.protocol.sampling_params import GRAMMAR_PARAMETERS, MAX_SCHEMA_LENGTH, Parameter
from quire.shared.text import grammar, json_schema

# Directives of llguidance's Lark that set options of the library, or refer to schemas without Quire's checks.
_DIRECTIVES = ("%json", "%llguidance")
_FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
# The fields of each type of `response_format`.
FIELDS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": ("type", "format", "structures", "triggers"),
}


def read_schema(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of a JSON schema. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    return _given(name, "json_schema", value)


def read_schema_or_text(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of a JSON schema, which may be given as JSON text. Raises InvalidRequest."""
    return read_schema(name, _of_text(name, value))


def read_json_object(name: str, value: Any) -> GivenGrammar | tuple[()]:
    """Return the grammar of any object for true; empty for false. Raises InvalidRequest."""
    if type(value) is not bool:
        raise invalid(name, "true or false", value)
    return GivenGrammar(name, grammar.ANY_OBJECT) if value else ()


def read_regex(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of a pattern. Raises InvalidRequest."""
    return _given(name, "regex", _text(name, value))


def read_choice(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of one of several texts. Raises InvalidRequest."""
    if type(value) is not list or not value or any(type(choice) is not str or not choice for choice in value):
        raise invalid(name, "an array of strings that are not empty", value)
    return _given(name, "choice", value)


def read_grammar(name: str, value: Any) -> GivenGrammar:
    """Return a grammar in EBNF, or in Lark if it has no `::=`. Raises InvalidRequest."""
    text = _text(name, value)
    if "::=" in text:
        return _given(name, "ebnf", text)
    for directive in _DIRECTIVES:
        if directive in text:
            raise refused(name, f"{name} contains {directive}, which is not supported; give a schema as json instead.")
    return _given(name, "lark", text)


def read_structural_tag(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of a structural tag, which may be given as JSON text. Raises InvalidRequest."""
    value = _of_text(name, value)
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    return _given(name, "structural_tag", value)


def response_format(name: str, value: Any) -> GivenGrammar | tuple[()]:
    """Return the grammar of a response format; empty if any text will do. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    kind = value.get("type")
    if type(kind) is not str or kind not in FIELDS:
        raise invalid(f"{name}.type", "text, json_object, json_schema or structural_tag", kind)
    only(name, value, FIELDS[kind])
    if kind == "json_schema":
        return read_json_schema(f"{name}.json_schema", value.get("json_schema"))
    if kind == "structural_tag":
        return read_structural_tag(name, value)
    return GivenGrammar(name, grammar.ANY_OBJECT) if kind == "json_object" else ()


def read_json_schema(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of an object with name, schema, description and strict. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    only(name, value, ("name", "description", "schema", "strict"))
    try:
        title = Text()(f"{name}.name", value.get("name"))
        for key, check in (("description", Text()), ("strict", Flag())):
            if value.get(key) is not None:
                check(f"{name}.{key}", value[key])
    except InvalidValue as error:
        raise of_check(error) from None
    if not _FORMAT_NAME.fullmatch(title):
        raise invalid(f"{name}.name", "1 to 64 of the characters a-z, A-Z, 0-9, _ and -", title)
    return read_schema(f"{name}.schema", value.get("schema"))


# An object, or the JSON text of one. The pattern: which strings are accepted before they are parsed.
_OBJECT_OR_TEXT = any_of(
    ANY_OBJECT,
    TEXT
    | {
        "pattern": r"^\s*\{[\s\S]*\}\s*$",
        "contentMediaType": "application/json",
        "contentSchema": ANY_OBJECT,
        "maxLength": MAX_SCHEMA_LENGTH,
    },
)
_GRAMMAR_TEXT: Schema = TEXT | {"minLength": 1, "maxLength": MAX_SCHEMA_LENGTH}
# The forms of `structured_outputs`: the reader, and what it accepts.
FORMS: dict[str, tuple[Callable[[str, Any], GivenGrammar | tuple[()]], Any]] = {
    "json": (read_schema_or_text, _OBJECT_OR_TEXT),
    "regex": (read_regex, _GRAMMAR_TEXT),
    "choice": (read_choice, array(TEXT | {"minLength": 1}, low=1)),
    # EBNF has `::=`. Lark has not, and some of its directives are refused.
    "grammar": (
        read_grammar,
        _GRAMMAR_TEXT | {"anyOf": [{"pattern": "::="}, {"not": {"pattern": "|".join(_DIRECTIVES)}}]},
    ),
    "json_object": (read_json_object, Flag()),
    "structural_tag": (read_structural_tag, _OBJECT_OR_TEXT),
}


def structured_outputs(name: str, value: Any) -> GivenGrammar | tuple[()]:
    """Return the grammar of the one field that is given; empty if it is false. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    only(name, {key: item for key, item in value.items() if item is not None}, FORMS)
    given = [key for key in FORMS if value.get(key) is not None]
    if len(given) != 1:
        raise invalid(name, f"an object with exactly one of {', '.join(FORMS)}", value)
    read, _ = FORMS[given[0]]
    return read(f"{name}.{given[0]}", value[given[0]])


def _given(name: str, kind: str, value: Any) -> GivenGrammar:
    try:
        length = len(value) if type(value) is str else len(json_schema.canonical(value))
        text = grammar.write(kind, value)
    except RecursionError:
        raise _too_deep(name, value) from None
    if length > MAX_SCHEMA_LENGTH:
        raise refused(name, f"{name} has {length} characters; at most {MAX_SCHEMA_LENGTH} are allowed.")
    return GivenGrammar(name, text)


def _too_deep(name: str, value: Any) -> InvalidRequest:
    return invalid(name, "an object that is not nested so deeply", value)


def _text(name: str, value: Any) -> str:
    if type(value) is not str or not value:
        raise invalid(name, "a string that is not empty", value)
    return value


def _of_text(name: str, value: Any) -> Any:
    """Return the value of a JSON text; any other value is returned unchanged. Raises InvalidRequest."""
    if type(value) is not str:
        return value
    if len(value) > MAX_SCHEMA_LENGTH:
        raise refused(name, f"{name} has {len(value)} characters; at most {MAX_SCHEMA_LENGTH} are allowed.")
    try:
        return json.loads(value, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(name, value) from None
    except ValueError:
        raise invalid(name, "an object, or the JSON text of one", value) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_ONE_GRAMMAR = "an answer follows one grammar"
# The object `json_schema` of a response format: what it must have, and what it may have.
JSON_SCHEMA: tuple[Schema, Schema] = (
    {"name": _FORMAT_NAME, "schema": ANY_OBJECT},
    {"description": or_null(Text()), "strict": or_null(Flag())},
)
_RESPONSE_FORMAT = any_of(
    closed({"type": {"enum": ["text", "json_object"]}}),
    closed({"type": {"const": "json_schema"}, "json_schema": closed(*JSON_SCHEMA)}),
    closed({"type": {"const": "structural_tag"}, "format": ANY_OBJECT}),
    closed(
        {
            "type": {"const": "structural_tag"},
            "structures": array(closed({"begin": TEXT, "schema": ANY_OBJECT, "end": TEXT})),
            "triggers": array(TEXT),
        }
    ),
)


_STRUCTURED_OUTPUTS: Schema = {
    "type": "object",
    "properties": {name: or_null(schema) for name, (_, schema) in FORMS.items()},
    "additionalProperties": NULL,
    # Exactly one of them is not null.
    "oneOf": [{"required": [name], "properties": {name: {"not": NULL}}} for name in FORMS],
}


def _guided(form: str, kind: str) -> dict[str, Parameter]:
    """Return the parameter of an old field of `structured_outputs`. It excludes those before it in the table."""
    name, (read, schema) = f"guided_{form}", FORMS[form]
    before = GRAMMAR_PARAMETERS[: GRAMMAR_PARAMETERS.index(name)]
    what = f"extension, an older name of vLLM: `{form}` of `structured_outputs`"
    excludes = dict.fromkeys(before, _ONE_GRAMMAR)
    return {name: Parameter(read=read, default=(), kind=kind, schema=schema, excludes=excludes, help=what)}


GRAMMARS: dict[str, Parameter] = {
    "response_format": Parameter(
        read=response_format,
        default=(),
        kind="object with `type`: `text`, `json_object`, `json_schema` or `structural_tag`",
        schema=_RESPONSE_FORMAT,
        help="[structured output](#structured-output): the answer is JSON that follows a schema. Not with "
        "`use_beam_search`, `ignore_eos` and `min_tokens`",
    ),
    "structured_outputs": Parameter(
        read=structured_outputs,
        default=(),
        kind=f"object with one of {', '.join(f'`{name}`' for name in FORMS)}",
        schema=_STRUCTURED_OUTPUTS,
        excludes={"response_format": _ONE_GRAMMAR},
        help="extension, as in vLLM: [structured output](#structured-output). Not with `response_format`",
    ),
    **_guided("json", "object, or the JSON text of one"),
    **_guided("regex", "string"),
    **_guided("choice", "array of strings"),
    **_guided("grammar", "string"),
}
