"""Rounding of activations to FP8 with a scale per row, and the weights that are multiplied with them."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.fp8_rows import channel_scales, fp8_linear, quantize_rows
from quire.kernels.grouped_weight import FP8, GroupedWeight, to_fp8
from tests.kernels.test_grouped_weight import random_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_value_of_a_row_is_kept_and_the_rest_is_within_half_a_step(dtype):
    x = torch.randn(40, 300).to(dtype) * torch.logspace(-4, 3, 40)[:, None].to(dtype)
    codes, scales = quantize_rows(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (40, 1))
    largest = x.float().abs().amax(dim=1)
    assert torch.equal(codes.float().abs().amax(dim=1), torch.full((40,), 448.0))
    torch.testing.assert_close(scales[:, 0] * 448, largest)
    # e4m3 has 3 bits after the first; below 2^-6 its steps are 2^-9.
    error = (codes.float() * scales - x.float()).abs()
    assert bool((error <= x.float().abs() / 16 + scales * 2.0**-10 + largest[:, None] * 1e-6).all())


def test_rows_of_zeros_and_of_tiny_values_have_finite_scales_and_nan_stays():
    x = torch.zeros(4, 64)
    x[1, 3] = 1e-44
    x[2, 5] = float("nan")
    x[3, 7] = float("inf")
    codes, scales = quantize_rows(x)
    assert bool((codes[:2].float() == 0).all())
    assert bool((scales[:2] > 0).all())
    assert bool(codes.float().isnan().any(dim=1)[2:].all())


def test_the_product_is_that_of_the_rounded_rows():
    x, weight, bias = torch.randn(5, 96), to_fp8(torch.randn(32, 96)), torch.randn(32)
    codes, scales = quantize_rows(x)
    exact = (codes.double() * scales.double()) @ weight.dequantized().double().T + bias.double()
    torch.testing.assert_close(fp8_linear(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-5)
    unrounded = x @ weight.dequantized().T + bias
    assert float((exact - unrounded).abs().max()) > 1e-3


def test_only_weights_with_a_scale_per_channel_or_tensor_have_channel_scales():
    weight = to_fp8(torch.randn(32, 96))
    scales = channel_scales(weight)
    assert scales is not None
    assert torch.equal(scales, weight.scales[:, 1])
    of_tensor = replace(weight, scales=torch.full_like(weight.scales, 0.5))
    found = channel_scales(of_tensor)
    assert found is not None
    assert torch.equal(found, torch.full((32,), 0.5))
    blocks = weight.scales.clone()
    blocks[3, 2] *= 2
    assert channel_scales(replace(weight, scales=blocks)) is None
    for n, k in ((30, 96), (32, 72), (32, 48)):  # shapes that the product of torch does not take, or a short sum
        assert channel_scales(to_fp8(torch.randn(n, k))) is None
    order = torch.arange(95, -1, -1, dtype=torch.int32)
    assert channel_scales(replace(weight, order=order)) is None
    assert channel_scales(random_weight("uint8", 32, 96)) is None
    assert channel_scales(GroupedWeight(weight.codes, weight.scales, FP8)) is not None
