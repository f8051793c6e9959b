"""The tokenizers of GGUF files, compared with Transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.gguf_writer import write_gguf
from quire.shared.model.gguf.file import open_gguf
from quire.shared.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.shared.model.gguf.tokenizer import build_tokenizer
from quire.shared.model.gguf.vocabulary import GGUFVocabulary, chat_template
from quire.shared.process.errors import FileError
from quire.shared.text.tokenizer import load_tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_vocabularies import PIECES, SCORES, TOKENS, gguf_bytes, value, write_vocabulary

# --- pre tokenizers ---------------------------------------------------------------------------------------------------


TEXT = "Don't 12345  HelloWorld!!\n\n ü="
WORDS = {
    "gpt-2": ["Don", "'t", "Ġ12345", "Ġ", "ĠHelloWorld", "!!", "ĊĊ", "ĠÃ¼", "="],
    "llama-bpe": ["Don", "'t", "Ġ", "123", "45", "Ġ", "ĠHelloWorld", "!!ĊĊ", "ĠÃ¼", "="],
    "qwen2": ["Don", "'t", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠHelloWorld", "!!ĊĊ", "ĠÃ¼", "="],
    "smollm": ["Don", "'t", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠHelloWorld", "!!", "ĊĊ", "ĠÃ¼", "="],
    "tekken": ["Don", "'t", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠHello", "World", "!!ĊĊ", "ĠÃ¼", "="],
}


@pytest.mark.parametrize("name", WORDS)
def test_a_text_is_split_into_words(name: str) -> None:
    found = PRE_TOKENIZERS[name].make().pre_tokenize_str(TEXT)
    assert [word for word, _ in found] == WORDS[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_character_is_lost(name: str) -> None:
    found = PRE_TOKENIZERS[name].make().pre_tokenize_str(TEXT)
    assert "".join(word for word, _ in found) == TEXT.replace(" ", "Ġ").replace("\n", "Ċ").replace("ü", "Ã¼")


# --- vocabulary -------------------------------------------------------------------------------------------------------


def vocabulary(path: Path, **changes: object) -> GGUFVocabulary:
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GGUFVocabulary(open_gguf(write_vocabulary(path / "a.gguf", keys)))


def test_end_tokens_are_those_that_are_named_and_those_that_models_use(tmp_path: Path) -> None:
    im_end = TOKENS.index("<|im_end|>")
    assert vocabulary(tmp_path).eos_token_ids == [2, im_end]
    assert vocabulary(tmp_path, eot_token_id=7).eos_token_ids == [2, 7, im_end]
    assert vocabulary(tmp_path, bos_token_id=im_end).eos_token_ids == [2]
    assert vocabulary(tmp_path, eos_token_id=None).eos_token_ids == [im_end, 2]


def test_types_and_scores_may_be_absent(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, token_type=None, scores=None)
    assert set(found.types) == {1}
    assert set(found.scores) == {0.0}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "t5", r"'tokenizer.ggml.model' is 't5', expected one of gpt2, llama; give the Hugging Face folder"),
        ("model", None, r"'tokenizer.ggml.model' is missing"),
        ("tokens", None, r"'tokenizer.ggml.tokens' is missing, expected the text of each token"),
        ("tokens", ["a", "a"], r"'tokenizer.ggml.tokens' is an array of 2, expected .* none of them twice"),
        (
            "token_type",
            [1, 2],
            rf"'tokenizer.ggml.token_type' is an array of 2, expected a number for each of {len(TOKENS)}",
        ),
        ("scores", [float("nan")] * len(TOKENS), r"'tokenizer.ggml.scores' is an array of"),
        ("eot_token_id", 10**6, r"'tokenizer.ggml.eot_token_id' is 1000000, expected an integer from 0 to"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key: str, value: object, said: str, tmp_path: Path) -> None:
    def read() -> tuple[object, ...]:
        found = vocabulary(tmp_path, **{key: value})
        return found.tokens, found.types, found.scores, found.eos_token_ids

    with pytest.raises(FileError, match=said):
        read()


def test_an_empty_chat_template_is_refused(tmp_path: Path) -> None:
    assert chat_template(open_gguf(write_vocabulary(tmp_path / "a.gguf"))) is None
    (tmp_path / "b.gguf").write_bytes(gguf_bytes([("tokenizer.chat_template", value(8, ""))]))
    with pytest.raises(FileError, match="chat_template' is empty"):
        chat_template(open_gguf(tmp_path / "b.gguf"))


# --- tokenizer --------------------------------------------------------------------------------------------------------
# Tokenizers of GGUF files give the ids of the tokenizer that the file was made from, and those of Transformers.


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
    with pytest.raises(FileError, match=said) as caught:
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
