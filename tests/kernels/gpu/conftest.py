"""The Triton kernels in float32, for tests that the dtype of activations does not affect."""

import pytest
import torch

from quire import kernels
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    return make_triton_ops(torch.float32, monkeypatch)
