"""Fixtures of the self-test: small uses of the kernels, for Triton's interpreter."""

import pytest
import torch

from quire import kernels
from quire.kernels.moe import Routing
from quire.kernels.uses import AttentionUse, ExpertsUse, KernelUses, LinearUse
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

PLAIN = AttentionUse(4, 2, 16, 0.25)
ODD = AttentionUse(3, 1, 32, 0.2, window=50, softcap=20.0, has_sinks=True, has_norms=True)


@pytest.fixture
def uses() -> KernelUses:
    """A model with two kinds of layers and three kinds of weights."""
    return KernelUses(
        hidden=64,
        vocab_size=300,
        max_model_len=160,
        block_size=16,
        attention=(PLAIN, ODD),
        linears=(
            LinearUse(64, 48),
            LinearUse(96, 64, "uint4", has_bias=True),
            LinearUse(64, 64, "fp8"),
            LinearUse(64, 128, is_gate_up=True),
        ),
        head=LinearUse(64, 300),
        experts=(ExpertsUse(64, 32, Routing(4, 2, normalised=True), has_biases=True),),
        embedding_dtype=torch.float32,
        has_adapters=True,
    )


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.check_ids = False  # as in a worker
    return ops
