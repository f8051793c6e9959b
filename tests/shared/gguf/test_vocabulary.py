from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.gguf.errors import GGUFError
from quire.shared.gguf.file import open_gguf
from quire.shared.gguf.vocabulary import GGUFVocabulary, chat_template
from tests.support.gguf_bytes import gguf_bytes, value
from tests.support.gguf_vocabularies import TOKENS, write_vocabulary


def vocabulary(path: Path, **changes: object) -> GGUFVocabulary:
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GGUFVocabulary(open_gguf(write_vocabulary(path / "a.gguf", keys)))


def test_end_tokens_are_those_that_are_named_and_those_that_models_use(tmp_path: Path) -> None:
    im_end = TOKENS.index("<|im_end|>")
    assert vocabulary(tmp_path).eos_token_ids == [2, im_end]
    assert vocabulary(tmp_path, eot_token_id=7).eos_token_ids == [2, 7, im_end]
    assert vocabulary(tmp_path, bos_token_id=im_end).eos_token_ids == [2]
    assert vocabulary(tmp_path, eos_token_id=None).eos_token_ids == [im_end, 2]


def test_special_tokens_have_the_names_of_chat_templates(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, padding_token_id=5).special_tokens()
    assert found == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<0x02>"}


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

    with pytest.raises(GGUFError, match=said):
        read()


def test_an_empty_chat_template_is_refused(tmp_path: Path) -> None:
    assert chat_template(open_gguf(write_vocabulary(tmp_path / "a.gguf"))) is None
    (tmp_path / "b.gguf").write_bytes(gguf_bytes([("tokenizer.chat_template", value(8, ""))]))
    with pytest.raises(GGUFError, match="chat_template' is empty"):
        chat_template(open_gguf(tmp_path / "b.gguf"))
