"""The manifest of a model: what its workers serve, and the files that turn texts into tokens, by their digests.

Workers register the manifest in Redis, and gateways without the model folder fetch the files that it names. The names
of files are a fixed list: no file can hold code, and none can lead out of a folder.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from quire.shared.config.validators import Integer, InvalidValue, checked, fixed_array, read_map, short_array
from quire.shared.model.naming import MAX_ALIASES, is_served_name
from quire.shared.protocol.messages.codec import VERSION, as_map, decode, pack

MIB = 1024 * 1024
# The files of a manifest, each with its largest size in bytes.
FILE_LIMITS = {
    "tokenizer.json": 64 * MIB,
    "tokenizer_config.json": 4 * MIB,
    "special_tokens_map.json": MIB,
    "chat_template.jinja": MIB,
    "chat_template.json": MIB,
    "additional_chat_templates/tool_use.jinja": MIB,
    "generation_config.json": MIB // 4,
    "config.json": MIB // 4,
    "modules.json": MIB // 16,
    "1_Pooling/config.json": MIB // 16,
    "1_LogitScore/config.json": MIB // 16,
    "config_sentence_transformers.json": MIB // 16,
    "sentence_bert_config.json": MIB // 16,
}
MAX_MANIFEST_BYTES = 16 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a model: its name, the SHA-256 digest of its content in hexadecimal, and its size in bytes."""

    name: str
    digest: str
    size: int

    @classmethod
    def of(cls, name: str, content: bytes) -> FileEntry:
        """Return the entry of a file with this content."""
        return cls(name, hashlib.sha256(content).hexdigest(), len(content))


def _name(name: str, value: Any) -> str:
    if type(value) is not str or not is_served_name(value):
        raise InvalidValue(name, "must be a served model name")
    return value


def _aliases(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_name(name, alias) for alias in short_array(name, value, MAX_ALIASES))


def _files(name: str, value: Any) -> tuple[FileEntry, ...]:
    entries = []
    for triple in short_array(name, value, len(FILE_LIMITS)):
        file, digest, size = fixed_array(name, triple, 3)
        if type(file) is not str or file not in FILE_LIMITS:
            raise InvalidValue(name, f"may only have {', '.join(FILE_LIMITS)}")
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise InvalidValue(name, f"has no SHA-256 digest for {file}")
        if type(size) is not int or not 0 <= size <= FILE_LIMITS[file]:
            raise InvalidValue(name, f"has a wrong size for {file}, which may have {FILE_LIMITS[file]} bytes")
        entries.append(FileEntry(file, digest, size))
    if len({entry.name for entry in entries}) < len(entries):
        raise InvalidValue(name, "has a file twice")
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The registration of a model by its workers. model: the served name, and the lane. aliases: its other names."""

    model: str = checked(_name)
    aliases: tuple[str, ...] = checked(_aliases)
    files: tuple[FileEntry, ...] = checked(_files)
    version: int = checked(Integer(VERSION, VERSION), default=VERSION)

    def encode(self) -> bytes:
        """Return the manifest as a message."""
        files = [[entry.name, entry.digest, entry.size] for entry in self.files]
        return pack(as_map(self) | {"files": files})

    @classmethod
    def decode(cls, data: bytes) -> ModelManifest:
        """Read a message. Raise MessageError."""
        return decode(data, MAX_MANIFEST_BYTES, lambda value: read_map(cls, "manifest", value))
