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


def test_layers_of_a_pattern_that_are_not_quantised_have_plain_weights():
    quantization = read_gptq(Fields({"bits": 4, "group_size": 32, "dynamic": {"-:.*down.*": {}}}, "config.json"))
    stored = {"model.layers.0.mlp.down_proj.weight": "BF16", "lm_head.weight": "BF16"}
    assert quantization.layer("model.layers.0.mlp.down_proj", stored.get) is None
    assert quantization.layer("model.layers.0.mlp.up_proj", stored.get) is not None
    assert quantization.layer("lm_head", stored.get) is None
    assert quantization.layer("lm_head", {"lm_head.qweight": "I32"}.get) is not None
