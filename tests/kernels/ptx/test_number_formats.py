"""The conversions of the emulator against torch's."""

import numpy as np
import pytest
import torch

from tests.kernels.ptx import number_formats
from tests.kernels.ptx.number_formats import DTYPES, immediate

VALUES = torch.cat([torch.randn(4096) * 10.0**e for e in range(-8, 4)] + [torch.tensor([0.0, -0.0, 448.0, -500.0])])


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    expected = VALUES.bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(number_formats.to_bf16(VALUES.numpy()), expected)
    assert np.array_equal(number_formats.from_bf16(expected), VALUES.bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1.0 + 2.0**-11, 1.0 + 2.0**-10),  # a tie
        (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),  # a tie above an odd value
        (-1.0 - 2.0**-11, -1.0 - 2.0**-10),
        (1.0 + 2.0**-11 - 2.0**-23, 1.0),
        (2.0 - 2.0**-12, 2.0),
        (3 * 2.0**-137, 2.0**-135),  # subnormal
        (-np.inf, -np.inf),
        (np.nan, np.nan),
    ],
)
def test_tf32_is_rounded_to_the_nearest_and_ties_away_from_zero(value: float, expected: float) -> None:
    bits = number_formats.to_tf32(np.float32([value]))
    assert np.array_equal(bits.view(np.float32), np.float32([expected]), equal_nan=True) or np.isnan(value)
    assert np.array_equal(number_formats.from_tf32(bits), np.float32([expected]), equal_nan=True)


def test_a_product_ignores_the_bits_below_tf32() -> None:
    bits = np.float32([1.0 + 2.0**-10 + 2.0**-11, -1.0 - 2.0**-23]).view(np.uint32)
    assert number_formats.elements(bits, "tf32")[0].tolist() == [1.0 + 2.0**-10, -1.0]


def test_a_register_has_two_elements_of_16_bits() -> None:
    low, high = number_formats.elements(np.array([0x40003F80], np.uint32), "bf16")
    assert (low.tolist(), high.tolist()) == ([1.0], [2.0])


def test_e4m3_is_rounded_as_torch_rounds_it() -> None:
    expected = VALUES.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(number_formats.to_e4m3(VALUES.numpy()), expected.view(torch.uint8).numpy())
    every = torch.arange(256, dtype=torch.uint8)
    of_torch = every.view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(number_formats.E4M3, of_torch, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", "s32", 5),
        ("-1", "b32", 2**32 - 1),
        ("-1", "s64", -1),
        ("0x10", "u16", 16),
        ("0x10U", "b32", 16),
        ("0f3F800000", "f32", 1.0),
        ("0dC000000000000000", "f64", -2.0),
        ("-1", "pred", True),
    ],
)
def test_literals(text: str, kind: str, value: float) -> None:
    assert immediate(text, DTYPES[kind]) == value
