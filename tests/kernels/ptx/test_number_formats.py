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
        ("0f3F800000", "f32", 1.0),
        ("0dC000000000000000", "f64", -2.0),
        ("-1", "pred", True),
    ],
)
def test_literals(text: str, kind: str, value: float) -> None:
    assert immediate(text, DTYPES[kind]) == value
