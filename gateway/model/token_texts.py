"""The text and bytes of single tokens, for answers that list them.

A token may be a part of a character; a tokenizer decodes such a token to U+FFFD. So the bytes are read from the
vocabulary. A vocabulary writes bytes in one of two ways; the tokenizer's decoder tells which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

# Maximum number of cached tokens. A vocabulary may be larger, but texts use a small part of it.
MAX_KEPT = 1 << 16
_BYTE = re.compile(r"<0x([0-9A-F]{2})>", re.ASCII)


class TokenText(NamedTuple):
    """One token as JSON.

    text: a string, with U+FFFD for a part of a character. name: the same, but a token with such a part is written
    `bytes:\\xe2\\x80`. bytes: the array of its bytes.
    """

    text: str
    name: str
    bytes: str


class TokenTexts(dict[int, TokenText]):
    """Texts by token id, made on demand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        kinds = set(_kinds(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder is not None else set()
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds
        # True if the vocabulary marks the beginning of a word with a sign of its own in the token.
        self._has_spaces = not self._byte_of and bool(kinds & {"ByteFallback", "Metaspace", "Replace"})

    def __missing__(self, token_id: int) -> TokenText:
        if len(self) >= MAX_KEPT:
            self.clear()
        raw = self.bytes_of(token_id)
        text = raw.decode("utf-8", "replace")
        name = text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        octets = json.dumps(list(raw), separators=(",", ":"))
        made = self[token_id] = TokenText(json.dumps(text), json.dumps(name), octets)
        return made

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token in the middle of a text; empty for an id that the tokenizer lacks."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_of and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if self._has_bytes and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace("▁", " ") if self._has_spaces else token).encode()


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a decoder and of the decoders in it."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies (GPT-2).

    Printable characters of Latin-1 are their own bytes; the characters from U+0100 on are the other bytes, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
