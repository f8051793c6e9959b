"""A wrong adapter is refused in one line that names the file, the field, what was expected and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.lora import LINEARS
from quire.kernels.reference import ReferenceOps
from quire.worker.engine.adapters import Adapter
from quire.worker.models.config import read_config
from quire.worker.models.errors import CheckpointError
from quire.worker.models.lora.adapter import load_adapter
from tests.support.adapters import change_config, write_adapter
from tests.support.checkpoints import make_checkpoint

WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", "qwen3")


def load(folder: Path, base: Path, max_rank: int = 64) -> Adapter:
    return load_adapter("a", folder, read_config(base), ReferenceOps(), max_rank)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_an_adapter_has_the_factors_of_each_layer(base: Path, tmp_path: Path) -> None:
    adapter = load(write_adapter(tmp_path / "a", base, rank=6, rank_pattern={"up_proj": 3}), base)
    layers = adapter.packed.layers  # type: ignore[attr-defined]
    assert [set(layer) for layer in layers] == [set(LINEARS)] * 3
    assert sorted(part.offset for part in layers[0]["qkv"]) == [0, 128, 192]
    assert sorted(len(part.a) for part in layers[0]["gate_up"]) == [3, 6]
    assert adapter.rank == 6


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


CONFIG_FAULTS = {
    "dora": ({"use_dora": True}, "adapter_config.json: use_dora is True: DoRA scales whole columns"),
    "saved": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: the adapter replaces whole layers"),
    "bias": ({"bias": "all"}, "bias is 'all': the adapter changes biases"),
    "type": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected 'LORA'"),
    "target": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head', expected some of q_proj, "),
    "unknown": ({"use_magic": 3}, "use_magic is 3: this field is not known"),
    "init": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base weights"),
    "rank": ({"r": 65}, "the rank 65 is above --max-lora-rank 64; raise it, up to 512"),
    "no rank": ({"r": 0}, "r is 0, expected a whole number of at least 1"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha is 'x', expected a positive number"),
    "pattern": ({"alpha_pattern": {"(a+)+$": 3}}, r"alpha_pattern has the key '\(a\+\)\+\$', expected the name"),
    "conv": ({"layer_replication": [[0, 2]]}, "layer_replication is .*: the adapter repeats layers"),
    "shape": ({"r": 5}, rf"{WEIGHTS}: tensor base_model.*lora_A.weight has the shape \[4, 64\], expected \[5, 64\]"),
    "missing": ({"target_modules": ["q_proj"]}, "is of no module of target_modules"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_wrong_field_is_named(name: str, base: Path, tmp_path: Path) -> None:
    fields, message = CONFIG_FAULTS[name]
    folder = write_adapter(tmp_path / "a", base)
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
        "tensor base_model.model.lm_head.weight is not of a projection that an adapter may change",
    ),
    "layer": (
        lambda tensors: tensors.update({FIRST.replace("layers.0", "layers.7"): torch.ones(4, 64)}),
        r"is of a layer that this model does not have \(base_model_name_or_path of the adapter: tests/base\)",
    ),
    "type": (
        lambda tensors: tensors.update({FIRST: torch.ones(4, 64, dtype=torch.int8)}),
        "has the type int8, expected float32, bfloat16 or float16",
    ),
    "base": (
        lambda tensors: tensors.update({FIRST: torch.ones(4, 96)}),
        r"has the shape \[4, 96\], expected \[4, 64\] \(base_model_name_or_path of the adapter: tests/base\)",
    ),
    "none": (lambda tensors: tensors.clear(), "this file has no tensors"),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_a_wrong_tensor_is_named(name: str, base: Path, tmp_path: Path) -> None:
    change, message = TENSOR_FAULTS[name]
    folder = write_adapter(tmp_path / "a", base)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, base)
    assert str(folder / WEIGHTS) in str(caught.value)


def test_damaged_and_missing_files_are_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder of the adapter 'a' is missing; correct its path"):
        load(tmp_path / "none", base)
    folder = write_adapter(tmp_path / "a", base)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-5])
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
