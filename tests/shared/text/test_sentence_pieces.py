"""Files of SentencePiece: the pieces of any text, damaged files, and kinds that are not read.

`tests/outside/clients/test_mistral_tokenizers.py` compares published files with SentencePiece itself.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.shared.text.sentence_pieces import load_sentence_pieces
from tests.support.sentence_pieces import BYTE, CONTROL, NORMAL, UNKNOWN, join, write_pieces

SPACES = [("▁" * size, -1e9, NORMAL) for size in (2, 4, 8, 5, 16, 6, 12, 3, 7)]  # all with the same score
PIECES = [
    *[("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)],
    *[(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)],
    *[(text, -float(rank), NORMAL) for rank, text in enumerate(["▁a", "ab", "▁ab", "ba", "bab", "▁abab"])],
    *SPACES,
    *[(text, -2e9, NORMAL) for text in "▁abc"],
]


def test_the_pieces_of_a_text_are_those_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_sentence_pieces(write_pieces(tmp_path / "tokenizer.model", PIECES), True, False)
    draw = random.Random(3)
    texts = [" " * count + "a" for count in range(40)] + ["".join(draw.choices("abc ", k=30)) for _ in range(300)]
    for text in texts:
        encoding = tokenizer.encode(text)
        assert encoding.tokens == ["<s>", *join(text, PIECES)], text
        assert tokenizer.decode(encoding.ids) == text


def test_bytes_stand_for_characters_that_no_piece_has(tmp_path: Path) -> None:
    tokenizer = load_sentence_pieces(write_pieces(tmp_path / "tokenizer.model", PIECES), False, True)
    ids = tokenizer.encode("aé").ids
    assert [tokenizer.id_to_token(one) for one in ids] == ["▁a", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(ids) == "aé"


@pytest.mark.parametrize(
    ("options", "said"), [({"kind": 1}, "not of the kind BPE"), ({"removes_spaces": True}, "normalises texts")]
)
def test_other_kinds_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_sentence_pieces(write_pieces(tmp_path / "tokenizer.model", PIECES, **options), True, False)


def test_a_damaged_file_is_never_more_than_a_value_error(tmp_path: Path) -> None:
    path = write_pieces(tmp_path / "tokenizer.model", PIECES[:20])
    whole = path.read_bytes()
    draw = random.Random(1)
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"."):
            load_sentence_pieces(path, True, True)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            load_sentence_pieces(path, True, True)
        except ValueError:
            continue
