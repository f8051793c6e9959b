"""The served name of a model: in messages, in Redis keys and for users."""

from __future__ import annotations

import re
from pathlib import Path

from quire.shared.model.folder import gguf_name, is_gguf
from quire.shared.process.errors import StartError

# A lane stands inside a Redis hash tag and in channel names: no braces, no white space.
# Largest number of other names of a model.
MAX_ALIASES = 16
# Longest name of a LoRA adapter.
MAX_ADAPTER_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9._/:@+-]{1,256}")


class InvalidModelName(StartError, ValueError):
    """A served model name cannot be part of a Redis key. The text has the remedy."""


def is_served_name(name: str) -> bool:
    """Return whether a model may have this name."""
    return _NAME.fullmatch(name) is not None


def read_aliases(text: str, name: str) -> tuple[str, ...]:
    """Return the names in the setting --model-aliases of a model with this served name. Raises InvalidModelName."""
    aliases = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if wrong := [alias for alias in aliases if not is_served_name(alias) or alias == name]:
        why = "is the model's own name" if wrong[0] == name else "cannot be the name of a model"
        raise InvalidModelName(
            f"--model-aliases (QUIRE_MODEL_ALIASES): {wrong[0]!r:.200} {why}; use 1 to 256 letters, digits and "
            ". _ / : @ + -, and separate aliases by commas"
        )
    if len(aliases) > MAX_ALIASES:
        raise InvalidModelName(f"--model-aliases has {len(aliases)} names; give at most {MAX_ALIASES}")
    return aliases


def served_name(model: str, served_model_name: str = "") -> str:
    """Return the name for clients: `served_model_name`, else that of a local folder or file, else that of Hugging Face.

    Raises InvalidModelName if that cannot be part of a Redis key.
    """
    folder = Path(model).expanduser()
    name = served_model_name or (_local_name(folder) if folder.exists() else model)
    if not is_served_name(name):
        raise InvalidModelName(
            f"{name!r} cannot be a served model name: use 1 to 256 letters, digits and . _ / : @ + - "
            "(--served-model-name, QUIRE_SERVED_MODEL_NAME)"
        )
    return name


def _local_name(path: Path) -> str:
    return gguf_name(path) if is_gguf(path) else path.resolve().name
