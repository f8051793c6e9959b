"""The refusal of a folder that is no Hugging Face checkpoint names its format and the way out; its commands work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from quire.shared.model import folder as model_folder
from quire.shared.model.config import read_model_config
from quire.shared.model.files import ModelError
from quire.shared.model.model_argument import resolve_model
from quire.shared.process.errors import CheckpointError
from quire.shared.text.tokenizer import load_tokenizer
from quire.worker.models.choice import choose_model
from quire.worker.models.files.loader import Weights, resolve
from tests.support.checkpoints import make_checkpoint, make_tokenizer
from tests.support.commands import refusal
from tests.support.gguf_vocabularies import write_vocabulary

# --- folder -----------------------------------------------------------------------------------------------------------
# The refusal of a folder that is no Hugging Face checkpoint names its format and the way out; its commands work.


ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base\nmodel"})
MERGE = "merge_and_unload(), then save_pretrained()"

# By format: the files of the folder, and parts of the refusal.
OTHERS = {
    "GGUF": (
        {"a-Q4_0.gguf": "", "b-Q8_0.gguf": ""},
        ["several GGUF files, a-Q4_0.gguf, b-Q8_0.gguf", "give one of them as the model, such as"],
    ),
    "adapter": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
        ["adapter_config.json", "adapter (LoRA) of owner/base model and no model", MERGE],
    ),
    "adapter with a configuration": (
        {"adapter_config.json": "{", "adapter_model.safetensors": "", "config.json": "{}"},
        ["adapter (LoRA) and no model", MERGE],
    ),
    "Mistral's own": (
        {"params.json": "{}", "consolidated.safetensors": "", "tekken.json": "{}"},
        ["params.json and consolidated.safetensors", "convert_mistral_weights_to_hf.py"],
    ),
    "Meta's own": (
        {"params.json": "{}", "consolidated.00.pth": "", "tokenizer.model": ""},
        ["consolidated.00.pth", "convert_llama_weights_to_hf.py"],
    ),
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def run(command: str) -> None:
    """Run a command that a message gives, in this process, which has perhaps imported Transformers."""
    program, option, code = shlex.split(command)
    assert (program, option) == ("python", "-c")
    exec(code, {})


@pytest.mark.parametrize("kind", OTHERS)
def test_gateway_and_worker_name_another_format_and_the_way_out(kind: str, tmp_path: Path) -> None:
    files, parts = OTHERS[kind]
    folder = write(tmp_path, files)
    with pytest.raises(ModelError) as by_gateway:
        read_model_config(folder)
    for implementation in ("auto", "quire", "transformers"):
        with pytest.raises(CheckpointError) as by_worker:
            choose_model(folder, implementation)
        assert f"{by_worker.value}." == str(by_gateway.value)
    said = str(by_gateway.value)
    assert said.startswith(str(folder))
    assert "\n" not in said
    for part in parts:
        assert part in said


@pytest.mark.parametrize("kind", ["llama", "sharded"])
def test_an_adapter_next_to_a_model_is_refused_and_may_be_removed(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", sharded=kind == "sharded")
    write(folder, {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""})
    for read in (read_model_config, choose_model):
        with pytest.raises((ModelError, CheckpointError)) as caught:
            read(folder)
        assert f"{folder / 'adapter_config.json'}: this folder holds a model and an adapter" in str(caught.value)
        assert MERGE in str(caught.value)
        assert "or remove this file to serve the base model" in str(caught.value)
    (folder / "adapter_config.json").unlink()
    assert read_model_config(folder)["model_type"] == "llama"
    assert choose_model(folder).architecture == "LlamaForCausalLM"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write(tmp_path, {"a.gguf": "", "README.md": ""})
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve(str(tmp_path)) == model_folder.find_gguf(tmp_path) == tmp_path / "a.gguf"
    write(tmp_path, {"mmproj-a-f16.gguf": ""})  # the projector of images
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"
    for other in ("b.gguf", "config.json", "adapter_config.json", "model.safetensors"):
        assert model_folder.find_gguf(write(tmp_path / other, {"a.gguf": "", other: ""})) is None


def test_weights_of_other_formats_next_to_a_configuration_are_named(tmp_path: Path) -> None:
    for files, said in (
        ({"a.gguf": "", "b.gguf": "", "c.gguf": "", "d.gguf": ""}, "a.gguf, b.gguf, c.gguf, ...; give one"),
        ({"a.gguf": ""}, "no safetensors files and a.gguf; give the file as the model"),
        ({"mmproj.gguf": "", "model-Q4_0.gguf": ""}, "no safetensors files and model-Q4_0.gguf; give the file as the"),
        ({"consolidated.safetensors": ""}, "convert_mistral_weights_to_hf.py"),
        ({}, "there is no model.safetensors; give the folder of a complete Hugging Face checkpoint"),
    ):
        folder = write(tmp_path / "-".join(["f", *files]), {"config.json": "{}"} | files)
        assert read_model_config(folder) == {}, "a gateway needs no weights"
        with pytest.raises(CheckpointError, match=re.escape(said)):
            Weights(folder)


def test_other_formats_do_not_matter_where_the_weights_are_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    write(folder, {"a.gguf": "", "consolidated.safetensors": "", "params.json": "{}", "pytorch_model.bin": ""})
    assert model_folder.find_fault(folder) is None
    assert "model.norm.weight" in Weights(folder)


@pytest.mark.slow
def test_pickled_weights_are_converted_by_the_command_that_the_refusal_gives(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path / "model", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickle format") as caught:
        Weights(folder)
    run(str(caught.value).partition("if you trust their author: ")[2])
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()
    assert "model.norm.weight" in Weights(folder)


@pytest.mark.slow
def test_a_tokenizer_is_converted_by_the_command_that_the_refusal_gives(tmp_path: Path) -> None:
    """From vocab.json and merges.txt, as older models of the GPT-2 kind have them."""
    make_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    expected = load_tokenizer(tmp_path, {}).encode("in the house").ids
    merges = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"])
    write(
        tmp_path,
        {
            "vocab.json": json.dumps(tokenizer["model"]["vocab"]),
            "merges.txt": f"#version: 0.2\n{merges}\n",
            "config.json": json.dumps({"model_type": "gpt2"}),
            "tokenizer_config.json": json.dumps({"tokenizer_class": "GPT2Tokenizer"}),
        },
    )
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"the folder has the tokenizer as vocab\.json") as caught:
        load_tokenizer(tmp_path, {})
    command = re.search(r"make one: (python .*) \(pip", str(caught.value))
    assert command
    run(command[1])
    assert load_tokenizer(tmp_path, {}).encode("in the house").ids == expected


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("tiktoken.model", r"the tokenizer as tiktoken\.model, .*pip install transformers tiktoken"),
        (None, r"any other file of a tokenizer; copy tokenizer\.json"),
    ],
)
def test_a_missing_tokenizer_says_how_to_make_one(file: str | None, said: str, tmp_path: Path) -> None:
    if file:
        write(tmp_path, {file: ""})
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path))}: tokenizer\.json is missing.*{said}"):
        load_tokenizer(tmp_path, {})


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "tokenizer.model",
            r"SentencePiece.*the tokenizer as tokenizer\.model, .*pip install .* sentencepiece",
        ),
        ("tekken.json", r"; fetch the model again\.$"),
    ],
)
def test_a_damaged_tokenizer_of_mistral_names_its_file(file: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, {file: ""})
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path / file))} cannot be used: .*{said}"):
        load_tokenizer(tmp_path, {})


def test_a_folder_of_nothing_known_has_no_explanation(tmp_path: Path) -> None:
    assert model_folder.find_fault(tmp_path) is None
    assert model_folder.find_fault(tmp_path / "missing") is None
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: this file is missing"):
        choose_model(tmp_path)


# --- model argument ---------------------------------------------------------------------------------------------------
# `quire worker`, `quire gateway` and `quire serve` refuse a folder of another format by name, on one line.


# test_folder.py has all formats in one process.
@pytest.mark.slow
@pytest.mark.parametrize("command", ["worker", "gateway", "serve"])
def test_each_command_names_another_format_and_the_way_out(command: str, tmp_path: Path) -> None:
    files, parts = OTHERS["adapter with a configuration"]
    said = refusal(1, command, str(write(tmp_path / "model", files)))
    for part in parts:
        assert part in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["worker", "gateway"])
def test_a_damaged_gguf_file_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.gguf": "GGUF"})
    said = refusal(1, command, str(tmp_path / "a.gguf"))
    assert "a.gguf: the version ends past the end of the file" in said
    assert "download the file again" in said


def test_a_gguf_file_is_itself_and_the_model_of_its_folder(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "blob")
    (tmp_path / "model").mkdir()
    link = tmp_path / "model" / "a.gguf"
    link.symlink_to(tmp_path / "blob")  # as in the cache of the Hugging Face Hub
    assert resolve_model(str(link)) == resolve_model(str(link.parent)) == str(link)
