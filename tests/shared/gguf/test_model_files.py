"""A GGUF file stands for a model folder: gateway and worker read its JSON files from the metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.gguf.model_files import gguf_json, is_gguf
from quire.shared.model.files import ModelError, read_json
from quire.worker.models.choice import choose_model
from quire.worker.models.errors import CheckpointError
from quire.worker.models.fields import read_json as read_by_worker
from tests.support.gguf_vocabularies import TOKENS, write_vocabulary


def test_the_files_have_the_metadata(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "a.gguf", {"tokenizer.chat_template": "{{ messages }}"})
    assert read_json(file / "config.json", required=True)["vocab_size"] == len(TOKENS)
    assert read_by_worker(file / "config.json", "")["hidden_size"] == 32
    assert read_json(file / "generation_config.json")["bos_token_id"] == 1
    assert read_json(file / "tokenizer_config.json") == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }
    assert gguf_json(file, "special_tokens_map.json") == {}


def test_a_gguf_file_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.GGUF").write_text("")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "a.bin").write_text("")
    assert is_gguf(tmp_path / "a.GGUF")
    assert not any(is_gguf(tmp_path / name) for name in ("folder.gguf", "a.bin", "missing.gguf"))


def test_gateway_and_worker_refuse_a_damaged_file_with_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError) as by_gateway:
        read_json(tmp_path / "a.gguf" / "config.json")
    with pytest.raises(CheckpointError) as by_worker:
        choose_model(tmp_path / "a.gguf")
    assert str(by_gateway.value) == f"{by_worker.value}."


def test_transformers_does_not_compute_gguf_files(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf: --model-impl is transformers, but .*give --model-impl auto"):
        choose_model(file, "transformers")
    assert choose_model(file).architecture == "LlamaForCausalLM"
