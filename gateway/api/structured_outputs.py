"""The parameter `structured_outputs` of vLLM: it becomes a grammar that the answer must follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.gateway.api.given_grammars import (
    GivenGrammar,
    only,
    read_choice,
    read_grammar,
    read_json_object,
    read_regex,
    read_schema_or_text,
    read_structural_tag,
)
from quire.gateway.errors.api_errors import invalid

READERS: dict[str, Callable[[str, Any], GivenGrammar | tuple[()]]] = {
    "json": read_schema_or_text,
    "regex": read_regex,
    "choice": read_choice,
    "grammar": read_grammar,
    "json_object": read_json_object,
    "structural_tag": read_structural_tag,
}


def structured_outputs(name: str, value: Any) -> GivenGrammar | tuple[()]:
    """Return the grammar of the one field that is given; empty if it is false. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    only(name, {key: one for key, one in value.items() if one is not None}, tuple(READERS))
    given = [key for key in READERS if value.get(key) is not None]
    if len(given) != 1:
        raise invalid(name, f"an object with exactly one of {', '.join(READERS)}", value)
    return READERS[given[0]](f"{name}.{given[0]}", value[given[0]])
