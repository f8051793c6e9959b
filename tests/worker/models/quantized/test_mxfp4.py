"""MXFP4: numbers of 4 bits with a power of two per 32."""

from __future__ import annotations

import pytest
import torch

from quire.worker.models.quantized.mxfp4 import dequantize_mxfp4


def test_every_number_and_scale():
    blocks = torch.arange(16, dtype=torch.uint8).repeat(1, 1) * 17  # both nibbles alike
    scales = torch.tensor([127, 130, 0], dtype=torch.uint8)
    found = dequantize_mxfp4(blocks.expand(3, 16).contiguous(), scales, torch.float32)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor([value for value in (*numbers, *(-at for at in numbers)) for _ in range(2)])
    assert torch.equal(found.view(3, 32), torch.stack([expected, expected * 8, expected * 2.0**-127]))


def test_the_lower_bits_are_the_first_number():
    blocks = torch.full((1, 16), 0x21, dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, torch.tensor([127], dtype=torch.uint8), torch.bfloat16)
    assert found[:2].tolist() == [0.5, 1.0]


def test_experts_keep_their_dimensions_and_equal_transformers():
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator).to(torch.uint8)
    found = dequantize_mxfp4(blocks, scales, torch.bfloat16)
    assert found.shape == (2, 6, 96)
    theirs = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(found.transpose(1, 2), theirs)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(2, 16), torch.zeros(2, dtype=torch.uint8), "blocks has the type torch.float32"),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), r"expected \[2, 16\]"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.full((2,), 255, dtype=torch.uint8), "no number"),
    ],
)
def test_what_is_malformed_is_refused(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        dequantize_mxfp4(blocks, scales, torch.float32)
