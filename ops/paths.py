"""Where things are: the project, the demo model, the state of `quire serve`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from quire.ops.errors import CommandError
from quire.shared.model.folder import find_fault, gguf_fault

PROJECT_ROOT = Path(__file__).resolve().parent.parent
# The folder on the import path in which the package `quire` lies.
IMPORT_ROOT = Path(__file__).parents[2]
DEFAULT_MODEL = "models/demo"

_HUGGING_FACE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`.quire` beside the sources; for an installed package `$XDG_STATE_HOME/quire` or ~/.local/state/quire."""
    if (PROJECT_ROOT / "pyproject.toml").is_file():
        return PROJECT_ROOT / ".quire"
    return user_state_dir(environ)


def resolve_state_dir(state_dir: str, environ: Mapping[str, str]) -> Path:
    """The state folder of a `quire serve` with this --state-dir, which may be empty."""
    return Path(state_dir).expanduser().absolute() if state_dir else default_state_dir(environ)


def user_state_dir(environ: Mapping[str, str]) -> Path:
    """What belongs to the user rather than to a server."""
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"


def resolve_model(model: str) -> str:
    """An absolute folder, or a Hugging Face name as it is. Raises CommandError for a folder that holds no model.

    The default model lies in the project, wherever the command is called from.
    """
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL and not path.is_dir():
        path = PROJECT_ROOT / DEFAULT_MODEL
    if path.is_dir():
        if fault := find_fault(path):
            raise CommandError(f"model: {fault}")
        if not (path / "config.json").is_file():
            raise CommandError(
                f"model: {path} holds none: config.json is missing; give a folder with config.json, *.safetensors and "
                "tokenizer.json, or a Hugging Face name"
            )
        return str(path.resolve())
    if path.is_file():
        if path.suffix == ".gguf":
            raise CommandError(f"model: {gguf_fault(path)}")
        raise CommandError(
            f"model: {path} is a file; give the folder that holds config.json, *.safetensors and tokenizer.json"
        )
    # `models/x` is a misspelt folder where there is a folder `models`, and a Hugging Face name where there is none.
    folder_exists = "/" in model and path.parent.is_dir()
    if path.is_absolute() or folder_exists or not _HUGGING_FACE_NAME.fullmatch(model):
        raise CommandError(
            f"model: there is none at {path.absolute()}; give a folder with config.json, or a Hugging Face name "
            "such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    return model
