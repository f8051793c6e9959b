"""GPTQ: both versions, zero points, act-order, 8 bits."""

from __future__ import annotations

import pytest
import torch

from quire.worker.models.fields import Fields
from quire.worker.models.quantized.gptq import GptqLayer, read_gptq

NAMES = ("gptq", "gptq-asym", "gptq-v2-asym", "gptq-order", "gptq-8")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_were_written(read_weights, name):
    for found, written in read_weights(name):
        assert torch.equal(found, written.to(torch.float16).float())


def test_version_1_stores_zero_points_less_1_with_borrows():
    """The zero point is 0 where all weights of a group are above zero."""
    layout = GptqLayer(bits=4, group_size=32, act_order=False, is_v1=True)
    tensors = {
        "qweight": torch.full((4, 8), 0x33333333, dtype=torch.int32),
        "qzeros": torch.tensor([[0x0000_0200 - 0x1111_1111]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = layout.weight(8, 32, tensors.get)
    assert weight.dequantized(torch.float32)[:, 0].tolist() == [3, 3, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [0, 1], ids=["middle", "less-1"])
def test_the_zero_point_of_symmetric_layers_is_the_middle_whatever_is_stored(
    bits: int, checkpoint_format: str, stored: int
) -> None:
    fields = {"bits": bits, "group_size": 32, "sym": True, "checkpoint_format": checkpoint_format}
    layout = read_gptq(Fields(fields, "config.json")).layer("q_proj", {"q_proj.qweight": "I32"}.get)
    values, zeros = (0x99999999, 0x88888888) if bits == 4 else (0x81818181, 0x80808080)
    zeros -= stored * (0x11111111 if bits == 4 else 0x01010101)
    tensors = {
        "qweight": torch.full((bits, 8), values, dtype=torch.int64).to(torch.int32),
        "qzeros": torch.full((1, bits // 4), zeros, dtype=torch.int64).to(torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    assert layout is not None
    assert set(layout.weight(8, 32, tensors.get).dequantized(torch.float32).flatten().tolist()) == {0.5}


def test_without_sym_the_stored_zero_points_count() -> None:
    layout = read_gptq(Fields({"bits": 4, "group_size": 32}, "config.json")).layout
    assert not layout.symmetric


def test_layers_of_a_pattern_that_are_not_quantised_have_plain_weights():
    quantization = read_gptq(Fields({"bits": 4, "group_size": 32, "dynamic": {"-:.*down.*": {}}}, "config.json"))
    stored = {"model.layers.0.mlp.down_proj.weight": "BF16", "lm_head.weight": "BF16"}
    assert quantization.layer("model.layers.0.mlp.down_proj", stored.get) is None
    assert quantization.layer("model.layers.0.mlp.up_proj", stored.get) is not None
    assert quantization.layer("lm_head", stored.get) is None
    assert quantization.layer("lm_head", {"lm_head.qweight": "I32"}.get) is not None
