"""GGUF files byte by byte, for tests of the parser: they may be wrong in any field."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value with its type in front. kind 9: content is the type of the elements, and the elements."""
    return struct.pack("<I", kind) + _content(kind, content)


def _content(kind: int, content: Any) -> bytes:
    if kind == 8:
        return text(content)
    if kind == 9:
        inner, elements = content
        return struct.pack("<IQ", inner, len(elements)) + b"".join(_content(inner, one) for one in elements)
    return struct.pack("<" + FORMS[kind], content)


def tensor(name: str, sizes: Iterable[int], kind: int, offset: int) -> bytes:
    """The header of a tensor. sizes: columns first."""
    dims = list(sizes)
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    metadata: Iterable[tuple[str, bytes]] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    magic: bytes = b"GGUF",
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file. num_tensors, num_keys: other counts than those of the lists."""
    pairs, infos = list(metadata), list(tensors)
    counts = len(infos) if num_tensors is None else num_tensors, len(pairs) if num_keys is None else num_keys
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(key) + one for key, one in pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data
