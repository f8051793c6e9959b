"""The served name of a model: in messages, in Redis keys and for users."""

from __future__ import annotations

import re
from pathlib import Path

from quire.shared.errors import StartError

# A lane stands inside a Redis hash tag and in channel names: no braces, no white space.
_NAME = re.compile(r"[A-Za-z0-9._/:@+-]{1,256}")


class InvalidModelName(StartError, ValueError):
    """A served model name cannot be part of a Redis key. The text has the remedy."""


def served_name(model: str, served_model_name: str = "") -> str:
    """Return the name for clients: `served_model_name`, else the name of a local folder, else the Hugging Face name.

    Raises InvalidModelName if that cannot be part of a Redis key.
    """
    folder = Path(model).expanduser()
    name = served_model_name or (folder.resolve().name if folder.exists() else model)
    if not _NAME.fullmatch(name):
        raise InvalidModelName(
            f"{name!r} cannot be a served model name: use 1 to 256 letters, digits and . _ / : @ + - "
            "(--served-model-name, QUIRE_SERVED_MODEL_NAME)"
        )
    return name
