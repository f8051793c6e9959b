"""Readers of the grammars that clients give, one for each kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.gateway.errors.api_errors import InvalidRequest, invalid, refused
from quire.shared.protocol.sampling_params import MAX_SCHEMA_LENGTH
from quire.shared.text import grammar, json_schema

# Directives of llguidance's Lark that set options of the library, or refer to schemas without Quire's checks.
_DIRECTIVES = ("%json", "%llguidance")


class GivenGrammar(NamedTuple):
    """A grammar, and the name of the parameter that it comes from, for errors."""

    name: str
    text: str


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
    if type(value) is not list or not value or any(type(one) is not str or not one for one in value):
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


def only(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keys of an object that are not known. Raises InvalidRequest."""
    for key in value:
        if key not in known:
            raise refused(
                f"{name}.{key[:80]}",
                f"{name}.{key[:80]} is not supported; {name} has {', '.join(known)} only.",
                code="unsupported_parameter",
            )
