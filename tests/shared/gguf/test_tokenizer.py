"""Tokenizers of GGUF files give the ids of the tokenizer that the file was made from, and those of Transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.gguf_writer import write_gguf
from quire.shared.gguf.errors import GGUFError
from quire.shared.gguf.file import open_gguf
from quire.shared.gguf.tokenizer import build_tokenizer
from quire.shared.gguf.vocabulary import GGUFVocabulary
from quire.shared.text.sentence_pieces import merges_of
from quire.shared.text.tokenizer import load_tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_vocabularies import PIECES, SCORES, TOKENS, write_vocabulary

transformers = pytest.importorskip("transformers")

DEMO = PROJECT_ROOT / "models" / "demo"
TEXTS = [
    "Hello, world! 12345 grün\n\n  x don't I'M",
    " a<|begin|>b<|end|> c",
    "fooBar  \t\r\n 3.14 ... </s> 日本語 🙂",
    "",
    " ",
    "the  thing and\nthe\x00",
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from the name of a pre-tokenizer to a GGUF file of the demo model."""
    folder = tmp_path_factory.mktemp("demo")

    def get(pre: str) -> Path:
        file = folder / f"{pre}.gguf"
        return file if file.exists() else write_gguf(DEMO, file, "Q4_0", pre)

    return get


def test_the_ids_and_texts_are_those_of_the_checkpoint(demo) -> None:  # type: ignore[no-untyped-def]
    found, expected = load_tokenizer(demo("gpt-2"), {}), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for text in TEXTS:
        for special in (True, False):
            ids = expected.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).ids == ids
            assert found.decode(ids) == expected.decode(ids)
            assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    assert found.get_vocab() == expected.get_vocab()


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_the_ids_are_those_of_transformers(pre: str, demo) -> None:  # type: ignore[no-untyped-def]
    file = demo(pre)
    expected = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    found = build_tokenizer(open_gguf(file))
    for text in TEXTS:
        assert found.encode(text).ids == expected(text)["input_ids"], text


def words(file: Path, text: str) -> list[str]:
    pre_tokenizer = build_tokenizer(open_gguf(file)).pre_tokenizer
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_numbers_are_split_as_the_models_expect(demo) -> None:  # type: ignore[no-untyped-def]
    expected = {
        "gpt-2": ["a", "Ġ12345"],
        "llama-bpe": ["a", "Ġ", "123", "45"],
        "qwen2": ["a", "Ġ", "1", "2", "3", "4", "5"],
        "smollm": ["a", "Ġ", "1", "2", "3", "4", "5"],
        "default": ["a", "Ġ", "123", "45"],
    }
    assert {pre: words(demo(pre), "a 12345") for pre in expected} == expected


def joined(text: str) -> list[str]:
    """Join the neighbours whose token has the highest score, the leftmost ones first, as SentencePiece does."""
    scores = dict(zip(TOKENS, SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def bytes_of(part: str) -> list[str]:
    return [part] if part in TOKENS else [f"<0x{byte:02X}>" for byte in part.encode()]


SENTENCES = ["the thing and the land", "in  the    sand", "she sells grün 🙂 shells", "x", " the", "ing▁ing"]


def test_sentence_piece_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(open_gguf(write_vocabulary(tmp_path / "a.gguf")))
    for text in SENTENCES:
        expected = [token for part in joined(text) for token in bytes_of(part)]
        found = tokenizer.encode(text)
        assert found.tokens == ["<s>", *expected]
        assert tokenizer.decode(found.ids) == text.replace("▁", " ")


def test_sentence_piece_has_the_ids_of_transformers(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "a.gguf", {"tokenizer.ggml.add_bos_token": True})
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    found = build_tokenizer(open_gguf(file))
    for text in SENTENCES:
        # Transformers adds no space before a leading one; SentencePiece, llama.cpp and Llama 2's tokenizer.json do.
        if not text.startswith(" "):
            assert found.encode(text).ids == expected(text)["input_ids"], text


def test_special_tokens_are_whole_and_words_of_the_user_are_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(open_gguf(write_vocabulary(tmp_path / "a.gguf")))
    ids = tokenizer.encode("the<|im_end|>[tool]", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(token) for token in ids] == ["▁the", "<|im_end|>", "[tool]"]
    assert tokenizer.decode(ids) == "the[tool]"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [1, TOKENS.index("▁the")]),
        ({"tokenizer.ggml.add_bos_token": False}, [TOKENS.index("▁the")]),
        ({"tokenizer.ggml.add_eos_token": True}, [1, TOKENS.index("▁the"), 2]),
        ({"tokenizer.ggml.add_space_prefix": False}, [1, TOKENS.index("t"), TOKENS.index("he")]),
    ],
)
def test_the_flags_of_the_file_are_honoured(changes: dict[str, Any], ids: list[int], tmp_path: Path) -> None:
    assert build_tokenizer(open_gguf(write_vocabulary(tmp_path / "a.gguf", changes))).encode("the").ids == ids


def test_merges_are_the_splits_of_tokens_in_the_order_of_scores(tmp_path: Path) -> None:
    merges = merges_of(GGUFVocabulary(open_gguf(write_vocabulary(tmp_path / "a.gguf"))))
    assert merges[:3] == [("▁", "t"), ("h", "e"), ("▁t", "he")]
    assert ("in", "g") in merges
    assert ("i", "ng") not in merges


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.scores": None}, r"'tokenizer.ggml.scores' is missing, expected a score for each token"),
        ({"tokenizer.ggml.add_bos_token": 1}, r"'tokenizer.ggml.add_bos_token' is 1, expected true or false"),
        (
            {"tokenizer.ggml.bos_token_id": 10**6},
            r"'tokenizer.ggml.bos_token_id' is 1000000, expected an integer from 0",
        ),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            r"'tokenizer.ggml.bos_token_id' is missing, expected a token id, as add_bos_token is true",
        ),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, r"remove_extra_whitespaces' is True, expected false"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "jais"},
            r"pre' is 'jais', expected one of default, gpt",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, r"merges' is missing, expected merges"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]},
            r"merges' has 'ab', expected two texts with a space between them",
        ),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["q z"]},
            r"tokens' and 'tokenizer.ggml.merges' are not a tokenizer",
        ),
    ],
)
def test_a_wrong_vocabulary_is_refused_by_its_key(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = open_gguf(write_vocabulary(tmp_path / "a.gguf", changes))
    with pytest.raises(GGUFError, match=said) as caught:
        build_tokenizer(file)
    assert "\n" not in str(caught.value)


def test_the_chat_template_and_end_tokens_serve_a_gateway(tmp_path: Path) -> None:
    from quire.gateway.model.served_model import load_model

    folder = make_checkpoint(tmp_path / "model", "qwen2")
    file = write_gguf(folder, tmp_path / "a.gguf", general__sampling__temp=0.7, general__sampling__top_k=20)
    found, expected = load_model(str(file), "a"), load_model(str(folder), "a")
    assert found.template is not None
    assert expected.template is not None
    messages = [{"role": "user", "content": "hi"}]
    assert found.template.render(messages) == expected.template.render(messages)
    assert found.eos_token_ids == expected.eos_token_ids
    assert found.max_model_len == expected.max_model_len
    assert found.vocab_size == expected.vocab_size
    assert found.special_tokens == expected.special_tokens
    assert found.context == expected.context
    assert found.sampling_defaults == {**expected.sampling_defaults, "temperature": 0.7, "top_k": 20}
