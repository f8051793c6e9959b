"""What a model is called: on the wire, in keys, and by users."""

from __future__ import annotations

import re
from pathlib import Path

# A lane stands inside a Redis hash tag and in channel names: no braces, no white space.
_NAME = re.compile(r"[A-Za-z0-9._/:@+-]{1,256}")


class InvalidModelName(ValueError):
    """A served model name that cannot be part of a key."""


def served_name(model: str, served_model_name: str = "") -> str:
    """The name that clients use: `served_model_name`, else a local folder's own name, else the Hugging Face name.

    Raises InvalidModelName with the remedy where that is not a name that keys can hold.
    """
    folder = Path(model).expanduser()
    name = served_model_name or (folder.resolve().name if folder.exists() else model)
    if not _NAME.fullmatch(name):
        raise InvalidModelName(
            f"{name!r} cannot be a served model name: use 1 to 256 letters, digits and . _ / : @ + - "
            "(--served-model-name, QUIRE_SERVED_MODEL_NAME)"
        )
    return name
