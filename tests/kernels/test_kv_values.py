"""The stored bytes of a key or a value, and the values that are read back."""

import pytest
import torch

from quire.kernels import kv_values

INT8, FP8 = torch.int8, torch.float8_e4m3fn


def round_trip(rows: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    return kv_values.decode(kv_values.encode(rows, kv_dtype), torch.float64)


def test_int8_values_are_off_by_half_a_step_at_most():
    rows = torch.randn(50, 3, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    assert ((round_trip(rows, INT8) - rows).abs() <= 0.501 * step).all()


def test_the_scale_of_an_int8_row_follows_its_integers():
    stored = kv_values.encode(torch.tensor([[127.0, -63.5, 0.0, 2.5, 3.5]]), INT8)
    assert stored[0, :5].tolist() == [127, -64, 0, 2, 4]  # ties go to even
    assert stored[0, 5:].clone().view(torch.float32).tolist() == [1.0]


def test_int8_rows_without_a_scale_are_zero():
    assert not kv_values.encode(torch.zeros(2, 16), INT8).any()


def test_nan_does_not_hide_the_other_values_of_an_int8_row():
    rows = torch.tensor([[float("nan"), 1.0, -2.0, 0.5]])
    assert round_trip(rows, INT8)[0, 1:].tolist() == pytest.approx([1.0, -2.0, 0.5], abs=0.01)


def test_fp8_saturates():
    rows = torch.tensor([1e9, 449.0, 448.0, 0.3, -1e-9, -float("inf")])
    assert round_trip(rows, FP8).tolist() == [448.0, 448.0, 448.0, 0.3125, -0.0, -448.0]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_rounded(kv_dtype):
    rows = torch.randn(4, 16)
    assert torch.equal(kv_values.decode(kv_values.encode(rows, kv_dtype), torch.float32), rows.to(kv_dtype).float())
