"""compressed-tensors: integers, packed and plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.shared.model.folder import WEIGHTS
from quire.worker.models.config import read_config
from quire.worker.models.quantized.checkpoint import QuantizedCheckpoint
from tests.support.quantized import FORMATS, edit_config, quantize_checkpoint
from tests.support.vision_checkpoints import make_vision

NAMES = ("w8a8", "w8a16", "w4a16", "w4a16-asym", "w4a16-order", "w4a16-channel")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_were_written(read_weights, name):
    for found, written in read_weights(name):
        assert torch.equal(found, written.to(torch.bfloat16).float())


O_PROJ = "layers.0.self_attn.o_proj"


@pytest.mark.parametrize("stored", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("listed", ["model.language_model.", "language_model.model.", "model.", "re:", "re:escaped"])
@pytest.mark.parametrize("field", ["ignore", "targets"])
def test_lists_of_a_vision_language_model_have_names_of_any_version(
    stored: str, listed: str, field: str, tmp_path: Path
) -> None:
    """One layer is in 16 bits: `ignore` has it, or `targets` have all others."""
    path = quantize_checkpoint(make_vision(tmp_path / "gemma3", "gemma3"), tmp_path / "quantized", "w4a16")
    own, plain = "language_model.model.", load_file(path / "plain" / WEIGHTS)
    tensors = {name: one for name, one in load_file(path / WEIGHTS).items() if f"{own}{O_PROJ}." not in name}
    tensors[f"{own}{O_PROJ}.weight"] = plain[f"{own}{O_PROJ}.weight"].bfloat16()
    save_file({name.replace(own, stored): one for name, one in tensors.items()}, path / WEIGHTS)
    prefix = {"re:": "re:.*language_model.*", "re:escaped": r"re:model\.language_model\."}.get(listed, listed)
    layers = [name.removeprefix(own).removesuffix(".weight_packed") for name in tensors if name.endswith("_packed")]
    quantization = FORMATS["w4a16"][1]
    if field == "ignore":
        quantization = quantization | {"ignore": ["lm_head", prefix + O_PROJ, "re:.*vision_tower.*"]}
    else:
        group = quantization["config_groups"]["group_0"] | {"targets": [prefix + name for name in layers]}
        quantization = quantization | {"config_groups": {"group_0": group}}
    edit_config(path, quantization_config=quantization)
    config = read_config(path)
    assert config.quantization is not None
    weights = QuantizedCheckpoint(path, config.quantization, (torch.float32, torch.bfloat16))
    weights.check(config.tensor_shapes())
    assert weights.layout(f"model.{O_PROJ}.weight") is None
    assert weights.layout("model.layers.1.self_attn.o_proj.weight") is not None
