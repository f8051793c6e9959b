"""The C++ conversion of stored weights gives torch's bits, for every 16-bit pattern, and finds values not finite."""

import pytest
import torch

from quire.kernels.cpu import library
from quire.kernels.cpu.convert import copy_finite

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = [
    (FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT16), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT32),
    (FLOAT32, BFLOAT16), (FLOAT16, BFLOAT16), (FLOAT32, FLOAT16), (BFLOAT16, FLOAT16),
]  # fmt: skip


@pytest.fixture(autouse=True)
def loaded() -> None:
    library.load()


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a 16-bit type, or many of float32: around each bfloat16 value and halfway to the next."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype is FLOAT32:
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
        values = (words[:, None] * 65536 + low).flatten().view(FLOAT32)
    else:
        values = words.to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
def test_finite_values_have_the_bits_of_torch(stored: torch.dtype, wanted: torch.dtype) -> None:
    values = patterns(stored)
    expected = values.to(wanted)
    values, expected = values[expected.isfinite()], expected[expected.isfinite()]
    out = torch.empty_like(expected)
    assert copy_finite(values, out)
    bits = torch.int32 if wanted is FLOAT32 else torch.int16
    assert torch.equal(out.view(bits), expected.view(bits))


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 99_999, 200_000])
def test_one_value_that_is_not_finite_is_found(stored: torch.dtype, wanted: torch.dtype, bad: float, at: int) -> None:
    values = torch.ones(200_001, dtype=stored)
    assert copy_finite(values, torch.empty_like(values, dtype=wanted))
    values[at] = bad
    assert not copy_finite(values, torch.empty_like(values, dtype=wanted))


@pytest.mark.parametrize(("stored", "wanted"), [(FLOAT32, BFLOAT16), (FLOAT32, FLOAT16), (BFLOAT16, FLOAT16)])
def test_a_value_that_overflows_the_new_type_is_found(stored: torch.dtype, wanted: torch.dtype) -> None:
    values = torch.tensor([1.0, 3.3999e38], dtype=FLOAT32)
    largest = values.to(stored)
    largest = largest.where(largest.isfinite(), torch.finfo(stored).max)
    assert not copy_finite(largest, torch.empty(2, dtype=wanted))


def test_every_nan_of_float32_is_found_after_rounding() -> None:
    for bits in (0x7F800001, 0x7FFFFFFF, 0x7F80FFFF, -1, -0x7FFFFF):  # the last ones have the sign bit
        values = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(FLOAT32)
        assert values.isnan().all()
        assert not copy_finite(values, torch.empty(1, dtype=BFLOAT16))


def test_other_types_and_strided_tensors_are_copied_by_torch() -> None:
    source = torch.arange(6.0).view(2, 3)
    out = torch.empty(3, 2, dtype=BFLOAT16)
    assert copy_finite(source.t(), out)
    assert torch.equal(out, source.t().bfloat16())
    wide = torch.empty(2, 3, dtype=torch.float64)
    assert copy_finite(source, wide)
    assert torch.equal(wide, source.double())
    assert copy_finite(torch.empty(0, 3), torch.empty(0, 3))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"source is \[2\], and out is \[3\]"):
        copy_finite(torch.zeros(2), torch.zeros(3))
