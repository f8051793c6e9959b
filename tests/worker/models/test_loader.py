"""Each kind of fault in weight files has its own message with the place, the fault and a remedy."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels import ReferenceOps
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files import loader
from quire.worker.models.native.decoder import Decoder
from tests.support.checkpoints import make_checkpoint

pytest.importorskip("transformers")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    families = ("llama", "llama-bias", "qwen2")
    made = {family: make_checkpoint(folder / family, family, num_hidden_layers=2) for family in families}
    return made | {"sharded": make_checkpoint(folder / "sharded", "llama", num_hidden_layers=2, sharded=True)}


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies an original checkpoint, so that a test can damage the copy."""
    return lambda family: shutil.copytree(originals[family], tmp_path / family)


def load(path: Path, dtype: torch.dtype = torch.float32, max_model_len: int = 0, progress: Any = None) -> Decoder:
    return Decoder.load(path, ReferenceOps("cpu", dtype), dtype, "cpu", max_model_len, progress)


def refusal(path: Path, *parts: str, **arguments: Any) -> None:
    """Check that loading fails with one line that has each of the parts, and a remedy after the last semicolon."""
    with pytest.raises(CheckpointError) as caught:
        load(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    assert str(path) in message
    for part in parts:
        assert part in message


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)
    return path


# Finding a model


def test_a_name_is_downloaded_without_pickles_and_code(monkeypatch, tmp_path):
    import fnmatch

    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **arguments: Any) -> str:
        asked.update(arguments, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "model.safetensors").touch()
    assert loader.resolve("owner/model") == tmp_path
    assert asked["name"] == "owner/model"

    def wanted(file: str) -> bool:
        allowed, ignored = asked["allow_patterns"], asked["ignore_patterns"]
        return any(fnmatch.fnmatch(file, p) for p in allowed) and not any(fnmatch.fnmatch(file, p) for p in ignored)

    for file in ("config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors", INDEX):
        assert wanted(file), file
    for file in ("pytorch_model.bin", "modeling_x.py", "original/consolidated.00.pth", "consolidated.safetensors"):
        assert not wanted(file), file


# Files of weights


def test_a_missing_folder_is_refused(tmp_path):
    refusal(tmp_path / "nothing", "config.json: this file is missing", "complete Hugging Face checkpoint")


def test_a_context_beyond_the_positions_of_the_model_is_refused(originals):
    refusal(originals["llama"], "--max-model-len is 257", "max_position_embeddings is 256", max_model_len=257)
    refusal(originals["llama"], "--max-model-len is -1", max_model_len=-1)
    assert load(originals["llama"]).max_model_len == 256


def test_a_context_that_is_too_long_names_the_field_that_makes_it_longer(copy):
    path = copy("llama")
    refusal(
        path,
        "from 1 to 256, or 0 for 256; for longer contexts set max_position_embeddings of config.json to 300, or ",
        '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}',
        max_model_len=300,
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}))
    assert load(path, max_model_len=300).max_model_len == 300


@pytest.mark.parametrize(
    ("change", "fault", "remedy"),
    [
        (lambda one: None, "is missing, expected with the shape [64, 64]", "must be complete"),
        (lambda one: one[:, :32].clone(), "has the shape [64, 32], expected [64, 64]", "of the same model"),
        (lambda one: one.to(torch.int8), "has the type I8, expected F32, BF16, F16", "not quantised"),
        (lambda one: one.double(), "has the type F64", "save the model in one of these types"),
        (lambda one: one * float("nan"), "has values that are not finite as float32", "download or copy"),
    ],
    ids=["missing", "misshapen", "integers", "64 bits", "not finite"],
)
def test_a_bad_tensor_is_named_with_its_fault_and_the_remedy(copy, change, fault, remedy):
    path = copy("llama")
    tensors = load_file(path / WEIGHTS)
    tensors[Q_PROJ] = change(tensors[Q_PROJ])
    save_file({name: one for name, one in tensors.items() if one is not None}, path / WEIGHTS)
    refusal(path, f"tensor {Q_PROJ} {fault}", remedy)


def test_weights_beyond_the_range_of_the_asked_type_are_refused(copy):
    path = edit_weights(copy("llama"), lambda tensors: tensors[Q_PROJ][3].fill_(1e6))
    load(path)
    refusal(path, f"tensor {Q_PROJ} has values that are not finite as float16", "another dtype", dtype=torch.float16)


@pytest.mark.parametrize("size", [0, 5, 300, 100_000])
def test_a_truncated_file_is_refused(copy, size):
    path = copy("llama")
    content = (path / WEIGHTS).read_bytes()
    assert len(content) > size
    (path / WEIGHTS).write_bytes(content[:size])
    refusal(path, WEIGHTS, "this is not a complete safetensors file", "download or copy the checkpoint again")


def test_a_missing_shard_is_named(copy):
    path = copy("sharded")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refusal(path, shard.name, "this file of weights is missing", "download or copy")


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(copy):
    path = copy("sharded")
    index = json.loads((path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][Q_PROJ] = next(file for file in files if file != index["weight_map"][Q_PROJ])
    (path / INDEX).write_text(json.dumps(index))
    refusal(path, index["weight_map"][Q_PROJ], f"tensor {Q_PROJ}", "is not in this file")


@pytest.mark.parametrize("placed", ["mtp.fc.weight", "model.layers.99.mlp.up_proj.weight"])
def test_a_promised_tensor_that_no_layer_needs_may_be_absent(copy, placed, caplog):
    path = copy("sharded")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][placed] = index["weight_map"][Q_PROJ]
    (path / INDEX).write_text(json.dumps(index))
    weights = loader.Weights(path)
    weights.check({Q_PROJ: weights.shape(Q_PROJ)})
    assert f"has 1 tensors that no file has: {placed}" in caplog.text


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "a/model.safetensors", "x.bin", "", 3])
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(copy, file):
    path = copy("sharded")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][Q_PROJ] = file
    (path / INDEX).write_text(json.dumps(index))
    refusal(path, INDEX, f"tensor {Q_PROJ} is placed in", "not a safetensors file of this folder")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(copy, text):
    path = copy("sharded")
    (path / INDEX).write_text(text)
    refusal(path, INDEX, "weight_map is not an object with an entry per tensor")


@pytest.mark.parametrize(
    ("family", "change", "parts"),
    [
        ("sharded", lambda path: (path / INDEX).unlink(), [f"neither {WEIGHTS} nor {INDEX}", "add the index"]),
        (
            "llama",
            lambda path: (path / WEIGHTS).rename(path / "pytorch_model.bin"),
            ["pickle format", "save_pretrained"],
        ),
        (
            "llama",
            lambda path: (path / WEIGHTS).unlink(),
            [f"there is no {WEIGHTS}", "complete Hugging Face checkpoint"],
        ),
    ],
    ids=["no index", "a pickle", "nothing"],
)
def test_a_folder_without_readable_weights_is_refused_with_what_to_add(copy, family, change, parts):
    path = copy(family)
    change(path)
    refusal(path, *parts)


# Unusual checkpoints that load


def logits(path: Path) -> torch.Tensor:
    from quire.worker.engine.forward_batch import ForwardBatch

    decoder = load(path)
    count = torch.arange(8, dtype=torch.int32)
    ends = torch.tensor([0, 8], dtype=torch.int32)
    batch = ForwardBatch(count, count, count, torch.zeros((1, 1), dtype=torch.int32), ends[1:], ends, count.long())
    with torch.inference_mode():
        return decoder.forward(batch, decoder.alloc_kv_cache(1, 8))


def test_a_checkpoint_of_the_body_alone_has_names_without_a_prefix(copy, originals):
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert torch.equal(logits(edit_weights(copy("qwen2"), strip)), logits(originals["qwen2"]))


def test_tied_weights_may_be_stored_under_either_name_or_both(copy, originals):
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    path, expected = copy("qwen2"), logits(originals["qwen2"])
    edit_weights(path, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    assert torch.equal(logits(path), expected)
    edit_weights(path, lambda tensors: tensors.pop(embedding))
    assert torch.equal(logits(path), expected)
    edit_weights(path, lambda tensors: tensors.update({embedding: tensors[head] * 2}))
    assert not torch.equal(logits(path), expected)  # as in Transformers, two different tensors are not tied


def test_unknown_tensors_are_told_of_once_and_known_extras_never(copy, caplog):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors.update({f"vision.{index}": torch.ones(1) for index in range(9)})

    path = edit_weights(copy("llama"), add)
    with caplog.at_level(logging.WARNING):
        load(path)
    (record,) = caplog.records
    assert "9 tensors are not part of this model and are not used: vision.0, vision.1" in record.message
    assert "inv_freq" not in record.message


def test_progress_ends_at_the_bytes_of_all_tensors(originals):
    for family in ("sharded", "qwen2"):
        seen: list[tuple[int, int]] = []
        decoder = load(originals[family], progress=lambda done, total, seen=seen: seen.append((done, total)))
        files = originals[family].glob("*.safetensors")
        total = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
        assert seen == sorted(seen)
        assert seen[-1] == (total, total)
        if not decoder.config.tie_word_embeddings:
            assert decoder.weight_bytes == total
