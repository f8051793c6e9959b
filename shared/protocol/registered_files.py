"""Reads the files of a model folder that a worker registers, for gateways that do not have the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.shared.model.config import CONTEXT_KEYS, HIDDEN_KEYS
from quire.shared.model.files import ModelError, check_file, read_json
from quire.shared.model.folder import is_gguf
from quire.shared.model.labels import FIELDS as LABEL_FIELDS
from quire.shared.protocol.messages.manifest import FILE_LIMITS, FileEntry, ModelManifest
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens

TOKENIZER, TOKENIZER_CONFIG, CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
# The fields of config.json that a gateway reads.
_FIELDS = (
    *CONTEXT_KEYS,
    *HIDDEN_KEYS,
    "vocab_size",
    "eos_token_id",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    *LABEL_FIELDS,
    "classifier_from_token",
    "is_original_qwen3_reranker",
    "sentence_transformers",
    "sbert_ce_default_activation_function",
)
# Files that are made from the metadata of a GGUF file.
_GGUF_FILES = (TOKENIZER_CONFIG, "generation_config.json")


def read_files(path: Path) -> dict[str, bytes]:
    """Return the files of a model folder or a GGUF file by name, and of config.json the fields that gateways read.

    Raise ModelError for a file that is missing, unreadable, or larger than its limit.
    """
    files = _of_gguf(path) if is_gguf(path) else _of_folder(path)
    files[CONFIG] = _dump(_reduced(read_json(path / CONFIG, required=True)))
    for name, content in files.items():
        if len(content) > FILE_LIMITS[name]:
            raise ModelError(
                f"{path / name} has {len(content)} bytes, and only files of up to {FILE_LIMITS[name]} can be "
                "registered for gateways; start the gateways with the model's folder."
            )
    return files


def manifest_of(model: str, aliases: tuple[str, ...], files: Mapping[str, bytes]) -> ModelManifest:
    """Return the manifest of a model with these files."""
    return ModelManifest(model, aliases, tuple(FileEntry.of(name, files[name]) for name in sorted(files)))


def _of_folder(folder: Path) -> dict[str, bytes]:
    files = {}
    for name in FILE_LIMITS:
        check_file(folder / name)
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"{folder / name} cannot be read: {error}.") from error
    if TOKENIZER not in files:  # it is made of another file
        config = read_json(folder / TOKENIZER_CONFIG)
        files[TOKENIZER] = load_tokenizer(folder, {}).to_str().encode()
        files[TOKENIZER_CONFIG] = _dump({**read_special_tokens(folder, config), **config})
    return files


def _of_gguf(path: Path) -> dict[str, bytes]:
    files = {name: _dump(read_json(path / name)) for name in _GGUF_FILES}
    return files | {TOKENIZER: load_tokenizer(path, {}).to_str().encode()}


def _reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    reduced = {name: config[name] for name in _FIELDS if name in config}
    inner = config.get("text_config")
    if isinstance(inner, dict):
        reduced["text_config"] = {name: inner[name] for name in _FIELDS if name in inner}
    return reduced


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode()
