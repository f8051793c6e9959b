"""Kernels that a machine cannot run raise KernelsUnavailable with the remedy."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.kernels.unavailable import KernelsUnavailable


def test_a_type_that_no_level_computes_is_refused_with_the_remedy() -> None:
    with pytest.raises(KernelsUnavailable, match=r"float16.*torch\.float32"):
        kernels.select_ops("cpu", torch.float16, "cpu")
