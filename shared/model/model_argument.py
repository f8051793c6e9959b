"""The argument MODEL of the commands: a folder, a GGUF file, or a name on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from quire.shared.config.command_line import CommandError
from quire.shared.model.files import made_json
from quire.shared.model.folder import CONFIG, find_fault, find_gguf, is_gguf
from quire.shared.process.errors import FileError

# The models that come with Quire, as paths below the folder of the sources.
DEFAULT_MODEL = "models/demo"
OWN_MODELS = (DEFAULT_MODEL, "models/demo-vision")

_SOURCES = Path(__file__).resolve().parents[2]
# With the quantisation of a GGUF model, or its file, after a colon.
_HUGGING_FACE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:\w[\w.-]*(/\w[\w.-]*)*)?", re.ASCII)


def resolve_model(model: str) -> str:
    """Return the absolute path of a folder or GGUF file, or a Hugging Face name unchanged. Raises CommandError.

    OWN_MODELS are found from every working directory.
    """
    path = Path(model).expanduser()
    if model in OWN_MODELS and not path.is_dir():
        path = _SOURCES / model
    if path.is_dir():
        if (gguf := find_gguf(path)) is not None:
            return _checked_gguf(gguf)
        if fault := find_fault(path):
            raise CommandError(f"model: {fault}")
        if not (path / "config.json").is_file():
            raise CommandError(
                f"model: {path} holds none: config.json is missing; give a folder with config.json, *.safetensors and "
                "tokenizer.json, or a Hugging Face name"
            )
        return str(path.resolve())
    if path.is_file():
        if is_gguf(path):
            return _checked_gguf(path)
        raise CommandError(
            f"model: {path} is a file; give a GGUF file, or the folder that holds config.json, *.safetensors and "
            "tokenizer.json"
        )
    # `models/x` is a misspelt folder if the folder `models` exists; else `models/x` is a Hugging Face name.
    folder_exists = "/" in model and path.parent.is_dir()
    if path.is_absolute() or folder_exists or not _HUGGING_FACE_NAME.fullmatch(model):
        raise CommandError(
            f"model: there is none at {path.absolute()}; give a folder with config.json, or a Hugging Face name "
            "such as Qwen/Qwen2.5-0.5B-Instruct or, for GGUF files, owner/name:Q4_K_M"
        )
    return model


def _checked_gguf(path: Path) -> str:
    """Return the absolute path of a GGUF file. Raises CommandError if its header or its metadata cannot be served."""
    try:
        made_json(path / CONFIG)
    except FileError as error:
        raise CommandError(f"model: {error}") from error
    return str(path.absolute())  # not resolved: a link's target may have another suffix
