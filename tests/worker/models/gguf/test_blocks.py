"""Blocks are expanded to the same bits as by the published package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.ops.tools.k_quants import QUANTIZERS
from quire.shared.gguf.types import TENSOR_TYPES
from quire.worker.models.gguf.blocks import EXPANSIONS, int4_values

QUANTIZED = [one for one in TENSOR_TYPES.values() if one.is_quantized]


@pytest.mark.parametrize("kind", [one.name for one in QUANTIZED])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_any_bytes_are_expanded_as_by_the_published_package(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    raw = np.random.default_rng(0).integers(0, 256, (300, gguf.GGML_QUANT_SIZES[number][1]), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, number)
    found = EXPANSIONS[kind](torch.from_numpy(raw)).numpy()
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_simple_k_quants_of_the_tools_are_near_the_weights(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    raw = torch.from_numpy(QUANTIZERS[kind](values))
    blocks = raw.reshape(-1, next(one.nbytes for one in QUANTIZED if one.name == kind))
    error = float((EXPANSIONS[kind](blocks).reshape(4, 512) - torch.from_numpy(values)).square().mean().sqrt())
    assert error < {"Q2_K": 0.4, "Q3_K": 0.2, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.03}[kind]


def test_the_integers_of_q4_0_are_those_of_the_weights() -> None:
    values = np.random.default_rng(2).standard_normal((8, 32)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0))
    scales = raw[:, :2].contiguous().view(torch.float16).float()
    assert torch.equal(int4_values(raw) * scales, EXPANSIONS["Q4_0"](raw))
