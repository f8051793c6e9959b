"""Typed access to the fields of a model's JSON files. Errors name file, field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.shared.model.files import made_json
from quire.shared.model.folder import CONFIG, find_fault, is_gguf
from quire.shared.process.errors import CheckpointError, FileError, NotSupported

REQUIRED: Any = object()


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read the JSON object in a file. Raises CheckpointError if the file is missing, unreadable or malformed.

    If the folder is a GGUF file, the object is made from its metadata.
    """
    try:
        if (made := made_json(path)) is not None:
            return made
    except FileError as error:
        raise CheckpointError(error.where, error.what, error.remedy) from error
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path, "this file is missing", remedy) from None
    except OSError as error:
        raise CheckpointError(path, f"this file cannot be read ({error.strerror})", remedy) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"this file is not valid JSON ({error})", remedy) from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"this file holds a {type(value).__name__} and not a JSON object", remedy)
    return value


def config_fields(folder: Path) -> Fields:
    """Return the fields of `config.json` in a model folder.

    Raises CheckpointError if the file is missing or malformed, and for a folder of another format: an adapter, GGUF
    files, or the original format of the model's authors.
    """
    if fault := find_fault(folder):
        raise CheckpointError(*fault)
    path = folder / CONFIG
    values = read_json(path, "give the folder of a complete Hugging Face checkpoint")
    return Fields(values, str(folder if is_gguf(folder) else path))


class Fields:
    """A JSON object, and its place for error messages. A null field counts as absent, except in `has`."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Return whether the field exists, even if it is null."""
        return name in self._values

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._values)

    def fault(self, name: str, supported: str) -> CheckpointError:
        """Return the error for a value that cannot be honoured."""
        return CheckpointError(*self._said(name, supported))

    def _said(self, name: str, supported: str) -> tuple[str, str, str]:
        value = json.dumps(self._values.get(name))
        value = value if len(value) <= 120 else value[:117] + "..."
        what = f"{name} is {value}" if name in self._values else f"{name} is missing"
        return self.where, what, f"supported: {supported}"

    def unsupported(self, name: str, supported: str) -> NotSupported:
        """Return the error for a valid value whose meaning is not supported."""
        return NotSupported(*self._said(name, supported))

    def integer(self, name: str, default: int = REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self.get(name, REQUIRED)
        if value is REQUIRED and default is not REQUIRED:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.fault(name, f"an integer from {minimum} to {maximum}")
        return int(value)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fault(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def section(self, name: str) -> Fields:
        """Return the object in a field; empty if the field is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.fault(name, "a JSON object")
        return Fields(value, f"{self.where}, {name}")

    def token_ids(self, name: str, default: Any = None) -> tuple[int, ...]:
        """Return the token ids of a field that holds one or a list of them."""
        value = self.get(name, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self.fault(name, "a token id or a list of token ids")
        return tuple(ids)


def special_token_ids(folder: Path, config: Fields, name: str, default: Any = None) -> tuple[int, ...]:
    """Return the special tokens `name` of a model: of generation_config.json, else config.json, else the default."""
    path = folder / "generation_config.json"
    if path.exists():
        generation = Fields(read_json(path, "repair the file or remove it"), str(path))
        if generation.get(name) is not None:
            return generation.token_ids(name)
    return config.token_ids(name, default)
