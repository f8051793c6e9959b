"""The tokenizer of a model folder, the same in gateway and worker: what one takes for text the other must too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.shared.model.folder import tokenizer_fault

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelError(Exception):
    """A model that cannot be served: what is wrong, where, and the remedy."""


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """A JSON object of a model folder; empty if the file is not there, unless it is required. Raises ModelError."""
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


def read_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, which templates refer to: `bos_token` and so on."""
    legacy = read_json(folder / "special_tokens_map.json")
    found = {}
    for key in _SPECIAL_TOKENS:
        value = tokenizer_config[key] if key in tokenizer_config else legacy.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _read_extra_tokens(folder: Path) -> list[str]:
    """Special tokens beside those that have a role, under the newer or the older of their names."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_json(folder / file)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        values = list(extra.values()) if isinstance(extra, dict) else extra
        if isinstance(values, list):
            contents = [value.get("content") if isinstance(value, dict) else value for value in values]
            return [content for content in contents if isinstance(content, str)]
    return []


def load_tokenizer(folder: Path, special_tokens: Mapping[str, str]) -> Tokenizer:
    """The tokenizer of the file. Its own post-processor says what goes around a plain prompt; like Transformers, this
    does not look at `add_bos_token` and `add_eos_token` where there is such a file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{tokenizer_fault(folder)}.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ModelError(f"{path} is not a tokenizer: {error}; fetch the model again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    missing = [token for token in dict.fromkeys(special_tokens.values()) if token not in known]
    contents = {token.content for token in added}
    missing += [token for token in _read_extra_tokens(folder) if token not in contents]
    # As Transformers does: what the configuration names as special is special, and never part of a text.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    return tokenizer
