"""Writes files `tokenizer.model` of SentencePiece, and joins pieces as SentencePiece does."""

from __future__ import annotations

import struct
from pathlib import Path

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write_pieces(path: Path, pieces: list[tuple[str, float, int]], kind: int = 2, removes_spaces: bool = False) -> Path:
    """Write texts, scores and types as a file of SentencePiece. kind: 1 is unigram, 2 BPE."""
    data = b""
    for text, score, piece_kind in pieces:
        piece = _text(1, text.encode()) + _tag(2, 5) + struct.pack("<f", score)
        data += _text(1, piece + (_number(3, piece_kind) if piece_kind != NORMAL else b""))
    data += _text(2, _number(3, kind) + _number(40, 0)) + _text(3, _text(1, b"identity") + _number(4, removes_spaces))
    path.write_bytes(data)
    return path


def join(text: str, pieces: list[tuple[str, float, int]]) -> list[str]:
    """Return the pieces of a text: neighbours join by the highest score, of equal ones the leftmost first."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [symbols[at] + symbols[at + 1] for at in range(len(symbols) - 1)]
        known = [(-scores[pair], at) for at, pair in enumerate(pairs) if pair in scores]
        if not known:
            return symbols
        _, at = min(known)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _number(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(value)


def _text(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    groups = []
    while True:
        value, low = value >> 7, value & 0x7F
        groups.append(low | (0x80 if value else 0))
        if not value:
            return bytes(groups)
