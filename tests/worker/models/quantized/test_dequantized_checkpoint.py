"""The tensors of quantised checkpoints as numbers, by their stored names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.worker.models.config import read_config
from quire.worker.models.errors import CheckpointError
from quire.worker.models.quantized.dequantized_checkpoint import DequantizedCheckpoint
from tests.support.quantized import FORMATS, edit_tensors

FLOATS = (torch.float32, torch.bfloat16)


def opened(folder: Path) -> DequantizedCheckpoint:
    quantization = read_config(folder).quantization
    assert quantization is not None
    return DequantizedCheckpoint(folder, quantization, FLOATS)


@pytest.mark.parametrize("name", FORMATS)
def test_all_tensors_have_the_values_that_they_stand_for(quantized, name: str) -> None:
    folder = quantized(name)
    checkpoint, plain = opened(folder), load_file(folder / "plain" / "model.safetensors")
    found = {at: (values, is_quantized) for at, values, is_quantized in checkpoint.tensors(torch.float32)}
    assert found.keys() == plain.keys()
    for at, (values, _) in found.items():
        assert torch.equal(values.float(), plain[at]), at
    assert sum(is_quantized for _, is_quantized in found.values()) == 14
    assert checkpoint.num_elements() == sum(values.numel() for values in plain.values())


def test_weights_are_rounded_to_the_asked_type_once(quantized) -> None:
    folder = quantized("awq")
    plain = load_file(folder / "plain" / "model.safetensors")
    for name, values, is_quantized in opened(folder).tensors(torch.bfloat16):
        if is_quantized:
            assert torch.equal(values, plain[name].bfloat16())


def test_names_stay_those_of_the_files(quantized) -> None:
    """A wrapper of a vision-language model has other names, for which Transformers has its own rules."""
    folder = quantized("fp8-block")

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    edit_tensors(folder, wrap)
    names = [name for name, _, _ in opened(folder).tensors(torch.float32)]
    assert "model.language_model.layers.0.mlp.up_proj.weight" in names
    assert not any(name.endswith("weight_scale_inv") for name in names)


@pytest.mark.parametrize(
    ("name", "end", "why"),
    [
        ("fp8-block", "weight_scale_inv", "has the type F8_E4M3"),
        ("w8a8", "weight_scale", "has the type I8"),
        ("gptq", "qzeros", "qzeros is missing"),
        ("w4a16", "weight_shape", "weight_shape is missing"),
    ],
)
def test_a_layer_without_one_of_its_tensors_is_refused(quantized, name: str, end: str, why: str) -> None:
    folder = quantized(name)
    edit_tensors(folder, lambda tensors: [tensors.pop(at) for at in list(tensors) if at.endswith(f"up_proj.{end}")])
    with pytest.raises(CheckpointError, match=why):
        opened(folder)


def test_weights_with_another_number_of_dimensions_are_refused(quantized) -> None:
    folder = quantized("gptq")
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(4).int()}))
    with pytest.raises(CheckpointError, match=r"up_proj.qweight has the shape \[4\], expected two dimensions"):
        opened(folder)


def test_scales_that_are_not_finite_are_refused(quantized) -> None:
    folder = quantized("fp8-tensor")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(torch.nan)}))
    with pytest.raises(CheckpointError, match=f"tensor {name} has values that are not finite"):
        list(opened(folder).tensors(torch.float32))
