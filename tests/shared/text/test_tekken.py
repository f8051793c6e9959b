"""Mistral's `tekken.json`: the ids of any text, its special tokens, and damaged files.

`tests/outside/clients/test_mistral_tokenizers.py` compares published files with Mistral's library.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.shared.text.tekken import load_tekken

TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"ba", b"abab", b" a", b"aba", "é".encode(), b" abab"]
SPECIAL = 20


def write(path: Path, **changes: Any) -> Path:
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
    tokenizer = load_tekken(write(tmp_path / "tekken.json"))
    draw = random.Random(2)
    for _ in range(300):
        word = "".join(draw.choices("abé", k=draw.randrange(1, 12)))
        assert tokenizer.encode(word).ids == [1, *join(word.encode())], word
        assert tokenizer.decode(tokenizer.encode(word).ids) == word
    assert tokenizer.encode("ab abab", add_special_tokens=False).ids == [*join(b"ab"), *join(b" abab")]


def test_special_tokens_are_those_of_the_file_or_of_the_first_version(tmp_path: Path) -> None:
    tokenizer = load_tekken(write(tmp_path / "tekken.json"))
    assert [tokenizer.id_to_token(token) for token in (0, 1, 2, 3)] == ["<unk>", "<s>", "</s>", "[INST]"]
    listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[THINK]"])]
    tokenizer = load_tekken(write(tmp_path / "tekken.json", special_tokens=listed))
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
        load_tekken(write(tmp_path / "tekken.json", **changes))
