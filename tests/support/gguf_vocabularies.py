"""GGUF files with a vocabulary and few tensors, for tests of tokenizers and of the configuration."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PIECES = [
    *("▁", "t", "h", "e", "a", "n", "i", "s", "o", "r", "d", "l", "g"),
    *("▁t", "he", "▁the", "in", "▁in", "ing", "▁a", "an", "nd", "and", "▁and", "er", "▁s", "es", "ll"),
    *("o▁", "▁▁", "▁▁▁▁", "ü"),
]
# Unknown, BOS, EOS, all bytes, the pieces, a control token and a word of the user.
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|im_end|>", "[tool]"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4]
SCORES = [*[0.0] * 259, *(-float(rank) for rank in range(len(PIECES))), 0.0, 0.0]
MODEL = {
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "general.name": "test",
}


def write_vocabulary(path: Path, changes: dict[str, Any] | None = None, architecture: str = "llama") -> Path:
    """Write a file of MODEL with these changes, where None leaves out a key, and with an embedding."""
    writer = gguf.GGUFWriter(None, architecture)
    keys = MODEL | {"general.architecture": None} | (changes or {})
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 32), dtype=np.float16))
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- gguf bytes -------------------------------------------------------------------------------------------------------
# GGUF files byte by byte, for tests of the parser: they may be wrong in any field.

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
