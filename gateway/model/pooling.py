"""The pooling that a model's sentence-transformers files name: the default of `pooling` in embedding calls.

The files are modules.json, which lists the modules after the decoder, and the configuration of the pooling module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.shared.model.files import ModelError, read_json

MODULES = "modules.json"
POOLING = "1_Pooling"
# The modules that this server can stand for, by the last part of their type.
_PLAIN_MODULES = ("Transformer", "Pooling", "Normalize")
# The flags of older files, and the modes of newer ones.
_MODES = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


def read_pooling(folder: Path) -> str:
    """Return the pooling of a model, one of `quire.shared.protocol.messages.POOLINGS`; "last" without these files.

    The result is empty if the files name a pooling, or a module after it, that this server does not have. Raises
    ModelError if a file cannot be read.
    """
    path, place = folder / MODULES, POOLING
    if path.exists():
        modules = read_modules(path)
        if any(kind not in _PLAIN_MODULES for kind, _ in modules):
            return ""
        places = [place for kind, place in modules if kind == "Pooling"]
        if len(places) != 1:
            return ""
        place = places[0]
    file = folder / place / "config.json"
    if not file.resolve().is_relative_to(folder.resolve()) or not file.exists():
        return "" if path.exists() else "last"
    return _mode(read_json(file))


def read_modules(path: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module. Raises ModelError."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch the model again.") from error
    if type(modules) is not list or not all(_is_module(module) for module in modules):
        raise ModelError(f"{path} is not a list of modules; fetch the model again.")
    return [(module["type"].rpartition(".")[2], module["path"]) for module in modules]


def _is_module(module: Any) -> bool:
    return type(module) is dict and type(module.get("type")) is str and type(module.get("path")) is str


def _mode(config: dict[str, Any]) -> str:
    mode = config.get("pooling_mode")
    if mode is not None:
        return _MODES.get(mode, "") if type(mode) is str else ""
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return _FLAGS.get(on[0], "") if len(on) == 1 else ""
