"""Loads the tokenizer of a model folder. Gateway and worker use the same code, so that they agree on every text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.shared.model.files import ModelError, check_file, read_json
from quire.shared.model.folder import SENTENCE_PIECES, TEKKEN, TOKENIZER, is_gguf, tokenizer_fault
from quire.shared.model.sentence_pieces import load_sentence_pieces
from quire.shared.process.errors import FileError
from quire.shared.text.panics import faults_as
from quire.shared.text.tekken import load_tekken

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Files of tokenizers, in the order of precedence.
_FILES = (TOKENIZER, TEKKEN, SENTENCE_PIECES)
# The special tokens of a folder without tokenizer.json, unless its configuration names others.
_SENTENCE_PIECE_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# The flags of a token in `added_tokens_decoder`.
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

# Words that a tokenizer remembers, each with its tokens: about 8 KiB for a word of 250 letters, the longest that are
# remembered. The default of the library, 10,000 words, grows to 82 MiB when clients send such words.
CACHED_WORDS = 4096


def read_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name (`bos_token`, ...), as chat templates refer to them.

    Models may name further tokens, such as `think_token`, in `extra_special_tokens`.
    """
    legacy = read_json(folder / "special_tokens_map.json")
    extra = tokenizer_config.get("extra_special_tokens")
    values: dict[str, Any] = {}
    if not is_gguf(folder) and not (folder / TOKENIZER).exists():
        values = dict(_SENTENCE_PIECE_NAMES)
    given = {**legacy, **tokenizer_config}
    values |= {key: given[key] for key in _SPECIAL_TOKENS if key in given}
    values |= extra if isinstance(extra, dict) else {}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: content for key, content in contents.items() if isinstance(content, str)}


def _read_extra_tokens(folder: Path) -> list[str]:
    """Return the extra special tokens, from the newer and the older field of the configuration."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_json(folder / file)
        fields = [config.get(field) for field in ("extra_special_tokens", "additional_special_tokens")]
        values = [value for field in fields for value in (field.values() if isinstance(field, dict) else field or [])]
        contents = [value.get("content") if isinstance(value, dict) else value for value in values]
        if contents:
            return [content for content in contents if isinstance(content, str)]
    return []


def _add_declared_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Add the tokens in `added_tokens_decoder` of tokenizer_config.json, and give known tokens its flags.

    AutoTokenizer of Transformers does the same: this field has precedence over tokenizer.json. Raise ModelError.
    """
    declared = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    try:
        tokens = [value for _, value in sorted(declared.items(), key=lambda item: int(item[0]))]
        for value in tokens:
            flags = {name: bool(value[name]) for name in _FLAGS if name in value}
            add = tokenizer.add_special_tokens if flags.get("special") else tokenizer.add_tokens
            add([AddedToken(value["content"], **flags)])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is not valid ({error}); fetch the model again."
        ) from error


def eos_token_id(tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> int | None:
    """Return the id of the end-of-sequence token that the tokenizer names, or None.

    It ends an answer besides the end tokens of the model's configuration: the fine-tune of a base model often names the
    end of its turns here only.
    """
    eos: int | None = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return eos


def load_tokenizer(folder: Path, special_tokens: Mapping[str, str]) -> Tokenizer:
    """Load `tokenizer.json`, or the tokenizer of a GGUF file. Raise ModelError.

    The post-processor of the file adds the special tokens of a plain prompt. Like Transformers with such a file, this
    function ignores `add_bos_token` and `add_eos_token`.
    """
    tokenizer = _of_gguf(folder) if is_gguf(folder) else _of_folder(folder)
    if hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(CACHED_WORDS)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_declared_tokens(tokenizer, folder)
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    standard = [token for key, token in special_tokens.items() if key in _SPECIAL_TOKENS]
    missing = [token for token in dict.fromkeys(standard) if token not in known]
    contents = {token.content for token in added}
    missing += [token for token in _read_extra_tokens(folder) if token not in contents]
    # Tokens that the configuration names as special are special, and never part of a text, as in Transformers.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    return tokenizer


def _of_folder(folder: Path) -> Tokenizer:
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        raise ModelError(f"{tokenizer_fault(folder)}.")
    check_file(path)
    if path.name == TOKENIZER:
        with faults_as(lambda reason: ModelError(f"{path} is not a tokenizer: {reason}; fetch the model again.")):
            return Tokenizer.from_file(str(path))
    config = read_json(folder / "tokenizer_config.json")
    try:
        with faults_as(ValueError):
            if path.name == TEKKEN:
                return load_tekken(path)
            return load_sentence_pieces(path, config.get("add_bos_token", True), config.get("add_eos_token", False))
    except ValueError as error:
        remedy = f". {tokenizer_fault(folder)}" if path.name == SENTENCE_PIECES else "; fetch the model again"
        raise ModelError(f"{path} cannot be used: {error}{remedy}.") from error


def _of_gguf(path: Path) -> Tokenizer:
    # Memory that only GGUF models need.
    from quire.shared.model.gguf.file import open_gguf
    from quire.shared.model.gguf.tokenizer import build_tokenizer

    try:
        return build_tokenizer(open_gguf(path))
    except FileError as error:
        raise ModelError(f"{error}.") from error
