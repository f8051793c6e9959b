"""Tokenizers: tokenizer.json, Tekken and SentencePiece."""

from __future__ import annotations

import base64
import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.files import ModelError
from quire.shared.model.sentence_pieces import load_sentence_pieces
from quire.shared.text.tekken import load_tekken
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens
from tests.support.tokenizers import byte_fallback, byte_level

# --- sentence pieces --------------------------------------------------------------------------------------------------
# Writes files `tokenizer.model` of SentencePiece, and joins pieces as SentencePiece does.

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


def join_pieces(text: str, pieces: list[tuple[str, float, int]]) -> list[str]:
    """Return the pieces of a text: neighbours join_pieces by the highest score, of equal ones the leftmost first."""
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


# --- tokenizer --------------------------------------------------------------------------------------------------------


def write(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_special_tokens_come_from_the_configuration_and_then_from_the_older_file(tmp_path: Path) -> None:
    write(tmp_path, special_tokens_map={"bos_token": "<old>", "pad_token": {"content": "<pad>"}, "eos_token": None})
    assert read_special_tokens(tmp_path, {"bos_token": "<s>", "unk_token": {"content": "<unk>"}}) == {
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }


def test_a_folder_without_tokenizer_json_has_the_special_tokens_of_sentencepiece(tmp_path: Path) -> None:
    assert read_special_tokens(tmp_path, {}) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    named = read_special_tokens(tmp_path, {"bos_token": "<bos>", "unk_token": None})
    assert named == {"bos_token": "<bos>", "eos_token": "</s>"}


def test_a_further_special_token_that_the_tokenizer_shows_stays_visible(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"extra_special_tokens": {"think_token": "<think>"}}
    write(tmp_path, tokenizer_config=config)
    loaded = load_tokenizer(tmp_path, read_special_tokens(tmp_path, config))
    assert loaded.decode(loaded.encode("a<think>b", add_special_tokens=False).ids) == "a<think>b"


def test_tokens_that_only_the_configuration_declares_are_those_of_autotokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    known, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    declared = {
        str(size + 1): {"content": "<call>", "special": True},
        str(size): {"content": "<think>", "special": False, "normalized": False},
        str(known): {"content": "<|im_start|>", "special": True, "rstrip": True},
        str(end): {"content": "<|im_end|>", "special": True},
    }
    write(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": declared})
    write(tmp_path, config={"model_type": "llama"})
    ours, theirs = load_tokenizer(tmp_path, {}), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a<think>b</think>", "<|im_start|>  user\n<|im_end|>  x", "<call> y"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text
    assert ours.token_to_id("<think>") == size
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"x": {}}})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: added_tokens_decoder is not valid"):
        load_tokenizer(tmp_path, {})


def test_a_tokenizer_neither_cuts_nor_pads_and_adds_what_its_post_processor_says(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.no_truncation()
    ids = load_tokenizer(tmp_path, {}).encode("hello there").ids
    assert len(ids) > 2
    assert ids[0] == 1


def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path: Path) -> None:
    write(tmp_path, tokenizer={})
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer: .*fetch the model again"):
        load_tokenizer(tmp_path, {})


# Encodes distinct words of the longest length that the library remembers, and prints the growth of the memory in MiB.
LONG_WORDS = """
import random, re, sys
from pathlib import Path
from quire.shared.text.tokenizer import load_tokenizer

def resident() -> int:
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

tokenizer, draw = load_tokenizer(Path(sys.argv[1]), {}), random.Random(0)
before = resident()
for _ in range(8000):
    tokenizer.encode("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=250)))
print((resident() - before) / 1024)
"""


def test_words_that_clients_make_up_take_a_bounded_amount_of_memory() -> None:
    command = [sys.executable, "-c", LONG_WORDS, str(PROJECT_ROOT / "models" / "demo")]
    grown = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 5 < grown < 45, "8,000 words would take 66 MiB if all were remembered"


# --- tekken -----------------------------------------------------------------------------------------------------------
# Mistral's `tekken.json`: the ids of any text, its special tokens, and damaged files.


TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"ba", b"abab", b" a", b"aba", "é".encode(), b" abab"]
SPECIAL = 20


def tekken_write(path: Path, **changes: Any) -> Path:
    file = {
        "config": {"pattern": r" ?\p{L}+|\s+|.", "default_vocab_size": 400, "default_num_special_tokens": SPECIAL},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(TOKENS)],
    }
    path.write_text(json.dumps(file | changes))
    return path


def join(word: bytes) -> list[int]:
    """Merge the neighbours whose token has the lowest rank, as tiktoken does."""
    if word in TOKENS:
        return [SPECIAL + TOKENS.index(word)]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [parts[at] + parts[at + 1] for at in range(len(parts) - 1)]
        known = [(TOKENS.index(pair), at) for at, pair in enumerate(pairs) if pair in TOKENS]
        if not known:
            return [SPECIAL + TOKENS.index(part) for part in parts]
        _, at = min(known)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_the_ids_of_a_word_follow_from_the_ranks(tmp_path: Path) -> None:
    tokenizer = load_tekken(tekken_write(tmp_path / "tekken.json"))
    draw = random.Random(2)
    for _ in range(300):
        word = "".join(draw.choices("abé", k=draw.randrange(1, 12)))
        assert tokenizer.encode(word).ids == [1, *join(word.encode())], word
        assert tokenizer.decode(tokenizer.encode(word).ids) == word
    assert tokenizer.encode("ab abab", add_special_tokens=False).ids == [*join(b"ab"), *join(b" abab")]


def test_special_tokens_are_those_of_the_file_or_of_the_first_version(tmp_path: Path) -> None:
    tokenizer = load_tekken(tekken_write(tmp_path / "tekken.json"))
    assert [tokenizer.id_to_token(token) for token in (0, 1, 2, 3)] == ["<unk>", "<s>", "</s>", "[INST]"]
    listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[THINK]"])]
    tokenizer = load_tekken(tekken_write(tmp_path / "tekken.json", special_tokens=listed))
    assert tokenizer.token_to_id("[THINK]") == 3
    assert tokenizer.id_to_token(SPECIAL - 1) == "<SPECIAL_19>"


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"vocab": None},
        {"vocab": [{"token_bytes": "not base64!"}]},
        {"vocab": [{"token_bytes": "YQ=="}] * 2},
        {"special_tokens": [{"rank": 0, "token_str": "<unk>"}]},
    ],
)
def test_a_damaged_file_is_a_value_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_tekken(tekken_write(tmp_path / "tekken.json", **changes))


# --- sentence pieces --------------------------------------------------------------------------------------------------
# Files of SentencePiece: the pieces of any text, damaged files, and kinds that are not read.


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
        assert encoding.tokens == ["<s>", *join_pieces(text, PIECES)], text
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
