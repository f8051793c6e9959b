"""`/tokenizer_info` shows the tokenizer's configuration with the template in use, and no path of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.gateway.features.tokenization.tokenizer_info import tokenizer_info
from quire.gateway.model.served_model import load_model
from tests.support.gateway.running import TEMPLATE, write_model


def info(folder: Path, **config: Any) -> dict[str, Any]:
    return tokenizer_info(load_model(str(write_model(folder, **config)), "model"))


def test_the_fields_of_the_file_without_paths(tmp_path: Path) -> None:
    paths = dict.fromkeys(("name_or_path", "vocab_file", "merges_file", "tokenizer_file"), "/home/someone/model")
    end = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    found = info(tmp_path / "a", **paths, eos_token=end, model_max_length=512, tokenizer_class="Qwen2Tokenizer")
    assert found == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "model_max_length": 512,
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": TEMPLATE,
    }
    assert info(tmp_path / "b")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_template_is_the_one_in_use(tmp_path: Path) -> None:
    """That of a file of its own, or the default of several; a model without a template has no such field."""
    several = [{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "x"}]
    assert info(tmp_path / "several", chat_template=several)["chat_template"] == "{{ messages }}"
    assert "chat_template" not in info(tmp_path / "none", chat_template=None)
    folder = write_model(tmp_path / "file")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tokenizer_info(load_model(str(folder), "model"))["chat_template"] == "{{ messages[0].content }}"
