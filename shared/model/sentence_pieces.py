"""SentencePiece BPE: the pieces of a vocabulary, their tokenizer, and the file `tokenizer.model` that holds them.

The file is a message of Protocol Buffers, `ModelProto` of sentencepiece_model.proto: field 1 has the pieces (1 text, 2
score, 3 type), field 2 the trainer (3 model type, 40 id of the unknown piece), field 3 the normaliser (2 its table, 3
whether a space comes before a text, 4 whether repeated spaces are removed).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPACE = "▁"  # SentencePiece's sign for a space
MAX_PIECE = 256  # characters of a piece for which merges are derived
MAX_PIECES = 1 << 22
# Types of pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2  # the model type
# The fields of a message by their numbers.
Message = dict[int, int | bytes]


class Pieces(NamedTuple):
    """A vocabulary: texts, scores and types of all tokens. adds_space: a space comes before each text."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown: int | None = None
    adds_space: bool = True

    @property
    def has_bytes(self) -> bool:
        """True if each byte is a token, so that every text has tokens."""
        return sum(kind == BYTE for kind in self.types) == 256


def make_tokenizer(pieces: Pieces) -> Tokenizer:
    """Return the tokenizer of a vocabulary, without a post-processor and without added tokens."""
    model = models.BPE(
        vocab={text: token for token, text in enumerate(pieces.tokens)},
        merges=merges_of(pieces),
        unk_token=None if pieces.unknown is None else pieces.tokens[pieces.unknown],
        fuse_unk=True,
        byte_fallback=pieces.has_bytes,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if pieces.adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if pieces.adds_space else [])])
    return tokenizer


def merges_of(pieces: Pieces) -> list[tuple[str, str]]:
    """Derive the merges of a vocabulary, the most urgent first.

    SentencePiece joins the neighbours whose token has the highest score, of equal ones the leftmost. So each way to
    split a token into two others is a merge, with the score of the token as its rank. The split with the longer left
    part comes first: in a run of spaces, whose tokens have equal scores, it gives the tokens of SentencePiece.
    """
    ids = {text: token for token, text in enumerate(pieces.tokens)}
    merges = []
    for token, text in enumerate(pieces.tokens):
        if pieces.types[token] not in (NORMAL, USER_DEFINED) or len(text) > MAX_PIECE:
            continue
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                merges.append((-pieces.scores[token], -at, left, right))
    merges.sort()
    return [(pieces.tokens[left], pieces.tokens[right]) for _, _, left, right in merges]


def load_sentence_pieces(path: Path, adds_bos: bool, adds_eos: bool) -> Tokenizer:
    """Return the tokenizer of a file `tokenizer.model` of the kind BPE.

    adds_bos, adds_eos: whether `<s>` and `</s>` are put around a plain prompt, as the fields add_bos_token and
    add_eos_token of tokenizer_config.json say. Raises ValueError for a damaged file, and for one of another kind.
    """
    pieces = _read(path.read_bytes())
    tokenizer = make_tokenizer(pieces)
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        texts = [text for text, piece_kind in zip(pieces.tokens, pieces.types, strict=True) if piece_kind == kind]
        add([AddedToken(text, special=kind == CONTROL, normalized=False) for text in texts])
    wanted = [text for text, is_added in (("<s>", adds_bos), ("</s>", adds_eos)) if is_added]
    ids = {text: tokenizer.token_to_id(text) for text in wanted}
    if None in ids.values():
        raise ValueError("it has no tokens <s> and </s>, which add_bos_token and add_eos_token put around a prompt")
    if wanted:
        single = [*(["<s>"] if adds_bos else []), "$A", *(["</s>"] if adds_eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    return tokenizer


def _read(data: bytes) -> Pieces:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: Message = {}
    normalizer: Message = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece.get(1, b"")).decode("utf-8"))
            scores.append(struct.unpack("<f", _integer(piece, 2, 0).to_bytes(4, "little"))[0])
            types.append(_integer(piece, 3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    if not 0 < len(tokens) <= MAX_PIECES or len(set(tokens)) != len(tokens):
        raise ValueError("it is no file of SentencePiece, or has a piece twice")
    if _integer(trainer, 3, 1) != _BPE:
        raise ValueError("it is not of the kind BPE")
    if normalizer.get(2, b"") or _integer(normalizer, 4, 1):
        raise ValueError("it normalises texts")
    unknown = _integer(trainer, 40, 0)
    is_known = unknown < len(types) and types[unknown] == UNKNOWN
    return Pieces(tokens, scores, types, unknown if is_known else None, bool(_integer(normalizer, 3, 1)))


def _integer(message: Message, number: int, default: int) -> int:
    """Return a field of a message; of 32 bits, as no field that is read has more."""
    value = message.get(number, default)
    if not isinstance(value, int) or value >= 1 << 32:
        raise ValueError("it is no file of SentencePiece")
    return value


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("it is no file of SentencePiece")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message: an integer, or the bytes of a text or an inner message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data))
        if size > len(data) - at:
            raise ValueError("it is cut off, or no file of SentencePiece")
        content = data[at : at + size]
        yield number, content if kind == 2 else int.from_bytes(content, "little")
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("it is cut off, or no file of SentencePiece")
