"""The arguments of a tool call in a message: clients send them as JSON text, and chat templates take an object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# The key under which arguments that are no JSON object travel as text, as clients of the Messages API send them.
INVALID_JSON = "INVALID_JSON"


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call from their JSON text; an empty text stands for none.

    A text that is no JSON object, such as that of an answer that was cut off, becomes the only value of an object.
    """
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    return arguments if type(arguments) is dict else {INVALID_JSON: text}


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return the text of `arguments_of`."""
    text = arguments.get(INVALID_JSON)
    if type(text) is str and len(arguments) == 1:
        return text
    return json.dumps(arguments, ensure_ascii=False)
