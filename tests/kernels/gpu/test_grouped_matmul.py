"""Products with codes: those of the dequantised weights, in Triton's interpreter or on a device."""

import pytest
import torch

from quire.kernels.grouped_weight import BITS, FP8, KINDS, MAX_ZEROS, GroupedWeight
from quire.kernels.moe import ExpertWeights, Routing
from tests.kernels.test_grouped_weight import random_weight
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
DTYPES = (torch.float32, torch.float16)  # the interpreter computes bfloat16 products wrongly


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 77, 34), (16, 64, 70), (70, 96, 130)])
def test_products_are_those_of_the_dequantised_weights(monkeypatch, dtype, kind, invariant, rows, k, n):
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=invariant)
    weight = random_weight(kind, n, k)
    if kind == FP8:  # float16 has no large products
        weight = GroupedWeight(weight.codes, weight.scales / 64, kind)
    bias, x = torch.randn(n).to(dtype).to(ops.device), torch.randn(rows, k).to(dtype).to(ops.device)
    plain = weight.dequantized(dtype).to(ops.device)
    exact = x.double() @ plain.double().T + bias.double()
    found = ops.linear_logits(x, ops.pack_linear(weight, bias))
    tolerance = 1e-5 * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=tolerance)
    out = torch.full((rows, n), float("nan"), dtype=dtype, device=ops.device)
    assert ops.linear(x, ops.pack_linear(weight, bias), out) is out
    torch.testing.assert_close(out.float(), found, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))
    gated = ops.linear_silu_mul(x, ops.pack_gate_up(weight, bias))
    torch.testing.assert_close(gated, ops.linear_silu_mul(x, ops.pack_gate_up(plain, bias)), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_its_value(ops, kind):
    codes = torch.arange(1 << BITS[kind], dtype=torch.uint8)
    codes = codes[(codes & 127) != 127] if kind == FP8 else codes
    zeros = torch.full((len(codes), 1), 16, dtype=torch.uint8) if kind in MAX_ZEROS else None
    weight = GroupedWeight(codes[:, None], torch.full((len(codes), 1), 0.5), kind, zeros)
    packed = ops.pack_linear(weight)
    assert (packed.out_features, packed.in_features) == weight.shape
    assert packed.nbytes == len(codes) * 4 * (1 + weight.bits)
    found = ops.linear_logits(torch.ones(1, 1, device=ops.device), packed)
    assert torch.equal(found[0].cpu(), weight.dequantized().flatten().cpu())


def test_experts_are_expanded_when_they_are_packed(ops):
    weights = [(random_weight("mxfp4", 128, 32), random_weight("mxfp4", 32, 64)) for _ in range(4)]
    router, routing = ops.pack_linear(torch.randn(4, 32, device=ops.device)), Routing(4, 2, normalised=True)
    codes = ops.pack_moe(routing, router, (ExpertWeights(*pair) for pair in weights))
    plain = ([one.dequantized().to(ops.device) for one in pair] for pair in weights)
    wide = ops.pack_moe(routing, router, (ExpertWeights(*pair) for pair in plain))
    x = torch.randn(5, 32, device=ops.device)
    assert torch.equal(ops.moe(x, codes), ops.moe(x, wide))
