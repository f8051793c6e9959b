"""A GGUF file as a model folder: the contents of its JSON files, made from the metadata.

`model.gguf/config.json` and the other files do not exist. Through these functions, code that reads the JSON files of a
folder works for GGUF files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.shared.model.gguf.config import generation_config, model_config
from quire.shared.model.gguf.file import GGUFFile, open_gguf
from quire.shared.model.gguf.vocabulary import GGUFVocabulary, chat_template


def gguf_json(path: Path, name: str) -> dict[str, Any]:
    """Return the content of the JSON file `name` of a GGUF file; empty for a file that it has no data for.

    Raises FileError.
    """
    makers = {
        "config.json": model_config,
        "generation_config.json": generation_config,
        "tokenizer_config.json": _tokenizer_config,
    }
    return makers[name](open_gguf(path)) if name in makers else {}


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    config: dict[str, Any] = dict(GGUFVocabulary(file).special_tokens())
    template = chat_template(file)
    return config if template is None else config | {"chat_template": template}
