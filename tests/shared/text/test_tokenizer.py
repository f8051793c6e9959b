from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.files import ModelError
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens
from tests.support.tokenizers import byte_fallback, byte_level


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


def test_models_name_further_special_tokens(tmp_path: Path) -> None:
    write(tmp_path, tokenizer={})
    config = {"bos_token": "<s>", "extra_special_tokens": {"think_token": "<think>", "image": {"content": "<img>"}}}
    assert read_special_tokens(tmp_path, config) == {"bos_token": "<s>", "think_token": "<think>", "image": "<img>"}


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


@pytest.mark.parametrize(
    "config",
    [
        {"extra_special_tokens": ["<tool>"]},
        {"additional_special_tokens": ["<tool>"]},
        {"extra_special_tokens": {"image_token": "<img>"}, "additional_special_tokens": ["<tool>"]},
    ],
)
def test_tokens_that_the_configuration_calls_special_are_never_part_of_a_text(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config=config)
    tokenizer = load_tokenizer(tmp_path, {"eos_token": "<end>"})
    ids = tokenizer.encode("a<tool>b<end>").ids
    assert {tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("<end>")} <= set(ids)
    assert tokenizer.decode(ids) == "ab"


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
