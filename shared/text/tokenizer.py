"""Loads the tokenizer of a model folder. Gateway and worker use the same code, so that they agree on every text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.shared.gguf.errors import GGUFError
from quire.shared.gguf.file import open_gguf
from quire.shared.gguf.model_files import is_gguf
from quire.shared.gguf.tokenizer import build_tokenizer
from quire.shared.model.files import ModelError, read_json
from quire.shared.model.folder import tokenizer_fault
from quire.shared.text.panics import faults_as

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Words that a tokenizer remembers, each with its tokens: about 8 KiB for a word of 250 letters, the longest that are
# remembered. The default of the library, 10,000 words, grows to 82 MiB when clients send such words.
CACHED_WORDS = 4096


def read_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name (`bos_token`, ...), as chat templates refer to them."""
    legacy = read_json(folder / "special_tokens_map.json")
    found = {}
    for key in _SPECIAL_TOKENS:
        value = tokenizer_config[key] if key in tokenizer_config else legacy.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _read_extra_tokens(folder: Path) -> list[str]:
    """Return the extra special tokens, from the newer or the older field of the configuration."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_json(folder / file)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        values = list(extra.values()) if isinstance(extra, dict) else extra
        if isinstance(values, list):
            contents = [value.get("content") if isinstance(value, dict) else value for value in values]
            return [content for content in contents if isinstance(content, str)]
    return []


def eos_token_id(tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> int | None:
    """The id of the end-of-sequence token that the tokenizer names, or None.

    Callers use this id only if the model's configuration names no end-of-sequence token.
    """
    eos: int | None = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return eos


def load_tokenizer(folder: Path, special_tokens: Mapping[str, str]) -> Tokenizer:
    """Load `tokenizer.json`, or the tokenizer of a GGUF file. Raises ModelError.

    The post-processor of the file adds the special tokens of a plain prompt. Like Transformers with such a file, this
    function ignores `add_bos_token` and `add_eos_token`.
    """
    tokenizer = _of_gguf(folder) if is_gguf(folder) else _of_folder(folder)
    if hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(CACHED_WORDS)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    missing = [token for token in dict.fromkeys(special_tokens.values()) if token not in known]
    contents = {token.content for token in added}
    missing += [token for token in _read_extra_tokens(folder) if token not in contents]
    # Tokens that the configuration names as special are special, and never part of a text, as in Transformers.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    return tokenizer


def _of_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{tokenizer_fault(folder)}.")
    with faults_as(lambda reason: ModelError(f"{path} is not a tokenizer: {reason}; fetch the model again.")):
        return Tokenizer.from_file(str(path))


def _of_gguf(path: Path) -> Tokenizer:
    try:
        return build_tokenizer(open_gguf(path))
    except GGUFError as error:
        raise ModelError(f"{error}.") from error
