"""Dequantised weights, and those that the kernels can hold exactly."""

from __future__ import annotations

import pytest
import torch

from quire.worker.models.quantized import weight as weight_module
from quire.worker.models.quantized.weight import ScaledWeight, joined, part_of


def integers(low: int, high: int, n: int = 6, k: int = 64) -> torch.Tensor:
    return torch.randint(low, high + 1, (n, k), generator=torch.Generator().manual_seed(1)).to(torch.int8)


def scales(n: int, groups: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.rand(n, groups, generator=torch.Generator().manual_seed(2)).add(0.01).to(dtype)


def test_every_weight_has_the_scale_and_the_zero_of_its_block(monkeypatch):
    monkeypatch.setattr(weight_module, "CHUNK", 128)  # two rows at a time
    zeros = torch.arange(8, dtype=torch.int16).view(2, 4)
    made = ScaledWeight(integers(-8, 7), scales(2, 4), (3, 16), zeros)
    found = made.dequantized(torch.float32)
    for n in range(6):
        for k in range(64):
            block = n // 3, k // 16
            assert found[n, k] == (float(made.values[n, k]) - float(zeros[block])) * made.scales[block].float()


def test_groups_say_which_input_features_belong_together():
    groups = torch.arange(64) % 4
    made = ScaledWeight(integers(-8, 7), scales(6, 4), (1, 16), groups=groups)
    expected = made.values.float() * made.scales.float()[:, groups]
    assert torch.equal(made.dequantized(torch.float32), expected)
    assert made.exact(4) is None


@pytest.mark.parametrize("rows", [1, 6])
def test_8_bits_per_channel_or_tensor_fit(rows):
    made = ScaledWeight(integers(-128, 127), scales(6 // rows, 1, torch.bfloat16), (rows, 64))
    exact = made.exact(8)
    assert exact is not None
    assert exact.bits == 8
    assert torch.equal(exact.dequantized(), made.dequantized(torch.float32))
    assert made.exact(4) is None


@pytest.mark.parametrize("size", [32, 64])
def test_4_bits_in_groups_of_multiples_of_32_fit(size):
    made = ScaledWeight(
        integers(-8, 7), scales(6, 64 // size), (1, size), torch.zeros(6, 64 // size, dtype=torch.int16)
    )
    exact = made.exact(4)
    assert exact is not None
    assert exact.scales.shape == (6, 2)
    assert torch.equal(exact.dequantized(), made.dequantized(torch.float32))


def test_a_channel_that_is_no_multiple_of_a_group_fits():
    made = ScaledWeight(integers(-8, 7, k=40), scales(6, 1), (1, 40))
    exact = made.exact(4)
    assert exact is not None
    assert torch.equal(exact.dequantized(), made.dequantized(torch.float32))


@pytest.mark.parametrize(
    "made",
    [
        ScaledWeight(integers(-8, 7), scales(6, 4), (1, 16)),
        ScaledWeight(integers(-8, 7), scales(6, 2), (1, 32), torch.ones(6, 2, dtype=torch.int16)),
        ScaledWeight(integers(-8, 7), torch.full((6, 2), 1e-9), (1, 32)),
        ScaledWeight(integers(-8, 7), torch.full((6, 2), 1e9), (1, 32)),
        ScaledWeight(integers(-8, 7).float(), scales(6, 2), (1, 32)),
        ScaledWeight(integers(-9, 7), scales(6, 2), (1, 32)),
    ],
    ids=["groups of 16", "zero points", "small scales", "large scales", "floats", "more than 4 bits"],
)
def test_what_does_not_fit_is_not_rounded(made):
    assert made.exact(4) is None
    assert made.exact(8) is None


def test_a_part_is_that_of_the_dequantised_weights():
    for bits, k in ((8, 1), (4, 2)):
        whole = ScaledWeight(integers(-8, 7), scales(6, k), (1, 64 // k)).exact(bits)
        assert whole is not None
        for part in ((slice(2, 4), slice(None)), (slice(None), slice(32, 64))):
            cut = part_of(whole, part)
            assert cut is not None
            assert torch.equal(cut.dequantized(), whole.dequantized()[part])
    assert whole is not None
    assert part_of(whole, (slice(None), slice(16, 48))) is None
    assert part_of(whole, ()) is whole


def test_joined_layers_are_side_by_side():
    parts = [ScaledWeight(integers(-8, 7, n), scales(n, 2), (1, 32)).exact(4) for n in (2, 5)]
    whole = joined([part for part in parts if part is not None])
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts if part is not None]))
