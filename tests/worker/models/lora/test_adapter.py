"""Adapters of PEFT are read; a wrong one is refused in one line with the file, the field and the remedy."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.kernels.lora import LINEARS
from quire.kernels.reference import ReferenceOps
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import GenerationRequest
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.adapters import Adapter
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.files.lora.adapter import load_adapter
from quire.worker.models.files.lora.adapter_config import (
    READ,
    REASONS,
    WITHOUT_EFFECT,
    AdapterConfig,
    read_adapter_config,
)
from quire.worker.models.native.config import read_config
from quire.worker.models.native.decoder import Decoder
from tests.support.adapters import change_config, load_adapted, write_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.parity import GREEDY, assert_greedy, prompts
from tests.support.vision_checkpoints import OWN, make_vision

WEIGHTS = "adapter_model.safetensors"

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", "qwen3")


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a", base)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of an adapter, for changes."""
    return Path(shutil.copytree(written, tmp_path / "a"))


def load(folder: Path, base: Path, max_rank: int = 64) -> Adapter:
    return load_adapter("a", folder, read_config(base), ReferenceOps(), max_rank)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_the_digest_is_that_of_the_files(base: Path, tmp_path: Path) -> None:
    one = load(write_adapter(tmp_path / "one", base), base)
    again = load(write_adapter(tmp_path / "two", base), base)
    other = load(write_adapter(tmp_path / "three", base, seed=2), base)
    alpha = load(write_adapter(tmp_path / "four", base, alpha=9), base)
    assert one.digest == again.digest
    assert len({one.digest, other.digest, alpha.digest}) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_factors_are_kept_or_widened(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = load(write_adapter(tmp_path / "a", base, dtype=dtype), base)
    kept = adapter.packed.layers[0]["o"][0].a.dtype  # type: ignore[attr-defined]
    assert kept is (torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)


def answers(path: Path, adapter: Path, texts: list[tuple[int, ...]]) -> list[list[int]]:
    """Return the greedy answers of a checkpoint with an adapter."""
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    engine = Engine(model, EngineLimits(200, 8, 8, 64, model.max_model_len), model.config.eos_token_ids, None)
    engine.adapters.limit = 1
    engine.adapters.add(model.load_adapter("a", adapter, 64))
    for number, text in enumerate(texts):
        engine.add(GenerationRequest(str(number), "m", text, GREEDY, adapter="a"))
    found: list[list[int]] = [[] for _ in texts]
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                found[int(item.request_id)].extend(delta.token_ids)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in OWN if kind != "gemma4"])
@pytest.mark.parametrize("covers_tower", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["all", "text"])
def test_an_adapter_of_a_vision_language_model_changes_its_text(
    kind: str, covers_tower: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_vision(tmp_path / kind, kind)
    text = r".*(language|text)_model.*\.(q|v|up|down)_proj"
    adapter = write_adapter(tmp_path / "a", path, targets="all-linear" if covers_tower else text, size=1.0)
    stored = [name for name in load_file(adapter / WEIGHTS) if re.search(r"vision|visual|projector|connector", name)]
    assert bool(stored) == covers_tower
    found = answers(path, adapter, prompts()[:6])
    assert_greedy(load_adapted(path, adapter), prompts()[:6], found)
    assert ("tensors are not of the text model and are not used" in caplog.text) == covers_tower


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_an_adapter_has_the_names_of_any_version_of_transformers(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_vision(tmp_path / "gemma3", "gemma3")
    own = "model.language_model."
    adapter = write_adapter(tmp_path / "a", path, rank_pattern={own + "layers.1.mlp.up_proj": 2})
    layers = load(adapter, path).packed.layers  # type: ignore[attr-defined]
    tensors = {name.replace(own, prefix): tensor for name, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, adapter / WEIGHTS)
    change_config(adapter, rank_pattern={prefix + "layers.1.mlp.up_proj": 2})
    again = load(adapter, path).packed.layers  # type: ignore[attr-defined]
    for one, other in zip(layers, again, strict=True):
        for linear in LINEARS:
            pairs = zip(one[linear], other[linear], strict=True)
            assert all(torch.equal(part.a, same.a) and torch.equal(part.b, same.b) for part, same in pairs)


CONFIG_FAULTS = {
    "dora": (
        {"use_dora": True},
        r"use_dora is True, and the module of tensor \S+lora_A.weight has no lora_magnitude_v",
    ),
    "saved": ({"modules_to_save": ["lm_head"]}, "modules_to_save has lm_head, and no tensor is of such a module"),
    "saved type": ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', expected names"),
    "bias": ({"bias": "some"}, "bias is 'some', expected 'none', 'lora_only' or 'all'"),
    "tokens": (
        {"trainable_token_indices": [1, 1]},
        r"trainable_token_indices is \[1, 1\], expected 1 to 65536 different",
    ),
    "added": ({"trainable_token_indices": [269]}, "of embed_tokens has 269, and the model has 269 tokens"),
    "experts": (
        {"target_parameters": ["experts"]},
        "target_parameters is .*: the adapter changes parameters that are no",
    ),
    "type": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected 'LORA'"),
    "unknown": ({"use_magic": 3}, "use_magic is 3: this field is not known"),
    "init": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base weights"),
    "rank": ({"r": 65}, "the rank 65 is above --max-lora-rank 64; raise it, up to 512"),
    "no rank": ({"r": 0}, "r is 0, expected a whole number of at least 1"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha is 'x', expected a positive number"),
    "pattern": (
        {"alpha_pattern": {"(a+)+$": 3}},
        r"alpha_pattern has the expression '\(a\+\)\+\$'; supported: at most",
    ),
    "patterns": ({"rank_pattern": [8]}, r"rank_pattern is \[8\], expected an object"),
    "conv": ({"layer_replication": [[0, 2]]}, "layer_replication is .*: the adapter repeats layers"),
    "shape": ({"r": 5}, rf"{WEIGHTS}: tensor base_model.*lora_A.weight has the shape \[4, 64\], expected \[5, 64\]"),
    "missing": ({"target_modules": ["q_proj"]}, "is of no module of target_modules"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_wrong_field_is_named(name: str, base: Path, folder: Path) -> None:
    fields, message = CONFIG_FAULTS[name]
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, base)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "nan": (lambda tensors: tensors[FIRST].fill_(torch.nan), "has values that are not finite"),
    "no A": (lambda tensors: tensors.pop(FIRST), f"tensor {FIRST} is missing"),
    "neither": (
        lambda tensors: [tensors.pop(FIRST), tensors.pop(FIRST.replace("_A", "_B"))],
        f"tensor {FIRST} is missing, and target_modules has its module",
    ),
    "head": (
        lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(2)}),
        r"tensor base_model.model.lm_head.weight has the shape \[2\], expected \[269, 64\]",
    ),
    "added tokens": (
        lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": torch.ones(272, 64)}),
        "embed_tokens.weight has 272 tokens, and the model has 269: added tokens are not served",
    ),
    "whole layer": (
        lambda tensors: tensors.update({FIRST.replace("lora_A.weight", "weight"): torch.ones(128, 64)}),
        "replaces a linear layer, and only embed_tokens, lm_head and norms may be replaced",
    ),
    "other part": (
        lambda tensors: tensors.update({FIRST.replace("lora_A", "lora_C"): torch.ones(4)}),
        "is of a layer that this model does not have",
    ),
    "layer": (
        lambda tensors: tensors.update({FIRST.replace("layers.0", "layers.7"): torch.ones(4, 64)}),
        r"is of a layer that this model does not have \(base_model_name_or_path of the adapter: .*/model\)",
    ),
    "type": (
        lambda tensors: tensors.update({FIRST: torch.ones(4, 64, dtype=torch.int8)}),
        "has the type int8, expected float32, bfloat16 or float16",
    ),
    "base": (
        lambda tensors: tensors.update({FIRST: torch.ones(4, 96)}),
        r"has the shape \[4, 96\], expected \[4, 64\] \(base_model_name_or_path of the adapter: .*/model\)",
    ),
    "twice": (
        lambda tensors: tensors.update(
            {FIRST.replace("model.layers", "model.language_model.layers"): tensors[FIRST].clone()}
        ),
        r"tensors \S+language_model\S+ and \S+ are of the same module",
    ),
    "none": (lambda tensors: tensors.clear(), "this file has no tensors"),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_a_wrong_tensor_is_named(name: str, base: Path, folder: Path) -> None:
    change, message = TENSOR_FAULTS[name]
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, base)
    assert str(folder / WEIGHTS) in str(caught.value)


def test_damaged_and_missing_files_are_named(base: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder of the adapter 'a' is missing; correct its path"):
        load(folder / "none", base)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        load(folder, base)
    size = int.from_bytes(data[:8], "little")
    for header in (b"[]", b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"{", b'{"x": 1}'):
        (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
            load(folder, base)
    (folder / WEIGHTS).write_bytes(b"\0" * 40_000_000)
    with pytest.raises(CheckpointError, match=r"this file is larger than .* bytes, the most for this model"):
        load(folder, base)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: this file of the adapter is missing"):
        load(folder, base)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"only adapter_model.bin is here, which is pickled"):
        load(folder, base)
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"adapter_config.json: this file is not a JSON object"):
        load(folder, base)


MODULE = "model.layers.3.mlp.up_proj"


def read(**fields: Any) -> AdapterConfig:
    return read_adapter_config(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | fields).encode(), "file")


@pytest.mark.parametrize(
    "key",
    [
        "up_proj",
        "mlp.up_proj",
        "model.layers.3.mlp.up_proj",
        r"layers\.(1|3)\..*",
        "^model.layers.3.mlp.up_proj",
        "ers"
        r".[23].mlp.up_proj",
        "^up_proj",
        "p_proj",
        "mlp",
        "layers.3",
    ],
)
def test_patterns_are_matched_as_in_peft(key: str) -> None:
    from peft.utils.other import get_pattern_key

    config = read(rank_pattern={"x": 3, key: 4}, alpha_pattern={key: 3})
    matches = get_pattern_key(["x", key], MODULE) == key
    assert config.rank_of(MODULE) == (4 if matches else 8)
    assert config.scale_of(MODULE, 4) == (0.75 if matches else 4)


def test_each_field_of_peft_is_honoured_or_refused() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert not fields - READ - WITHOUT_EFFECT - set(REASONS)


def test_an_unknown_field_is_refused_only_if_it_has_a_value() -> None:
    assert read(use_news=False, news_config=None, news=[], news_scale=0.0, news_type="none", name="").rank == 8
    for value in (True, 1, "x", [1], {"x": 1}):
        with pytest.raises(CheckpointError, match=r"^file: news is .*: this field is not known; merge it into"):
            read(news=value)


@pytest.mark.parametrize(
    "fields", [{"target_modules": ".*proj"}, {"target_modules": ["q_proj"], "layers_to_transform": [1]}]
)
def test_modules_selected_in_another_way_are_those_of_the_tensors(fields: dict[str, Any]) -> None:
    assert read(**fields).targets is None


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^file: this file is not"):
        read_adapter_config(data, "file")
