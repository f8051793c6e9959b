"""Norms, the gated activation and the embedding in Triton."""

import pytest
import torch

from tests.support.kernels import oracle
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.stacks import (
    random,
)


def test_a_norm_adds_to_the_residual_first(gpu_ops):
    x, residual, weight = (random(*s, dtype=gpu_ops.dtype) for s in [(3, 1100), (3, 1100), (1100,)])
    assert_close(gpu_ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), rounds=2)
    expected = residual + x
    actual = gpu_ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert_close(actual, oracle.rms_norm(expected, weight, 1e-5), rounds=2)


def test_the_activation_takes_the_largest_values(gpu_ops):
    values = torch.tensor([-300.0, -100.0, -1.0, 0.0, 2.0, 250.0]).to(gpu_ops.dtype)
    gate, up = values.repeat(200), torch.randn(1200).to(gpu_ops.dtype)
    x = torch.eye(1).to(gpu_ops.dtype)
    out = gpu_ops.linear_silu_mul(x, gpu_ops.pack_gate_up(torch.cat([gate, up])[:, None]))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert_close(out[0], exact, slack(gpu_ops.dtype, 300) * (1 + gate.double().abs()), rounds=2)


def test_an_embedding_of_an_id_that_does_not_exist_is_nan(gpu_ops):
    table, ids = random(9, 1100, dtype=gpu_ops.dtype), torch.tensor([8, 0, 9, -1])
    with pytest.raises(IndexError, match=r"token_ids\[2\] is 9"):
        gpu_ops.embed(ids, table)
    gpu_ops.check_ids = False  # as a server runs
    found = gpu_ops.embed(ids, table)
    assert torch.equal(found[:2], table[[8, 0]])
    assert found[2:].isnan().all()
