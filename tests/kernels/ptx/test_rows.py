"""Kernels that compute each row independently, compiled for Hopper."""

import pytest
import torch

from tests.kernels.ptx.emulator import Emulator
from tests.support.kernels import oracle
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 1024, 1440])
def test_norms(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int) -> None:
    ops = make_triton_ops(dtype, monkeypatch)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
    exact = oracle.rms_norm(x, weight, 1e-6)
    assert_close(ops.rms_norm(x, weight, 1e-6), exact, slack(dtype, 2000), rounds=2)
    total = (x.float() + residual.float()).to(dtype)
    found = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_close(found, oracle.rms_norm(total, weight, 1e-6), slack(dtype, 2000), rounds=2)
    assert emulator.instructions > 0
