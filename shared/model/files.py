"""Reads the JSON files of a model folder, and the error for a model that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.shared.model.folder import is_gguf
from quire.shared.process.errors import FileError, StartError

# The size of a file other than weights.
MAX_FILE_BYTES = 256 << 20


class ModelError(StartError):
    """A model cannot be served. The text names the file, the fault and the remedy."""


def check_file(path: Path) -> None:
    """Raise ModelError for a path that is no regular file, such as a device or a pipe, and for a huge file.

    A missing file is no fault.
    """
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a regular file; fetch the model again.")
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; fetch the model again.")


def made_json(path: Path) -> dict[str, Any] | None:
    """Return the object of a JSON file of a GGUF file, made from its metadata; None for a file of a folder.

    Raises FileError.
    """
    if not is_gguf(path.parent):
        return None
    from quire.shared.model.gguf.model_files import gguf_json  # memory that only GGUF models need

    return gguf_json(path.parent, path.name)


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Read a JSON object of a model folder. A missing file is an empty object, unless `required`. Raises ModelError.

    If the folder is a GGUF file, the object is made from its metadata.
    """
    try:
        if (made := made_json(path)) is not None:
            return made
    except FileError as error:
        raise ModelError(f"{error}.") from error
    check_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelError(f"{path} is missing; a model folder needs config.json and tokenizer.json.") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch the model again.") from error
    if type(value) is not dict:
        raise ModelError(f"{path} is not a JSON object; fetch the model again.")
    return value
