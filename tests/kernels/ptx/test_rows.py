"""Kernels that compute each row independently, compiled for Hopper."""

import pytest
import torch

from quire import kernels
from tests.kernels.gpu import test_fp8_matmul, test_rows
from tests.kernels.ptx.emulator import Emulator
from tests.support.kernels import oracle
from tests.support.kernels.oracle import assert_close, slack


@pytest.mark.parametrize("width", [64, 1024, 1440])
def test_norms(emulator: Emulator, emulated_ops: kernels.Ops, width: int) -> None:
    dtype = emulated_ops.dtype
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
    exact = oracle.rms_norm(x, weight, 1e-6)
    assert_close(emulated_ops.rms_norm(x, weight, 1e-6), exact, slack(dtype, 2000), rounds=2)
    total = (x.float() + residual.float()).to(dtype)
    found = emulated_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_close(found, oracle.rms_norm(total, weight, 1e-6), slack(dtype, 2000), rounds=2)
    assert emulator.sources.keys() == {"rms_norm_kernel"}


def test_the_activation_takes_the_largest_values(emulator: Emulator, emulated_ops: kernels.Ops) -> None:
    test_rows.test_the_activation_takes_the_largest_values(emulated_ops)
    assert emulator.sources.keys() == {"silu_mul_kernel"}


@pytest.mark.parametrize("width", [64, 1440])
def test_rows_are_rounded_to_fp8(emulator: Emulator, emulated_ops: kernels.Ops, width: int) -> None:
    test_fp8_matmul.test_rows_are_rounded_as_the_definition_says(emulated_ops, emulated_ops.dtype, width)
    test_fp8_matmul.test_a_row_with_nan_stays_one(emulated_ops)
    assert emulator.sources.keys() == {"quantize_rows_kernel"}


def test_an_embedding_of_an_id_that_does_not_exist_is_nan(emulator: Emulator, emulated_ops: kernels.Ops) -> None:
    test_rows.test_an_embedding_of_an_id_that_does_not_exist_is_nan(emulated_ops)
    assert emulator.sources.keys() == {"embed_kernel"}
