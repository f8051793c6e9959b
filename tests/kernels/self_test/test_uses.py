"""Packed weights of every implementation say what they are."""

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.self_test.uses import AttentionUse, LinearUse
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("kind", ["", "bfloat16", "int8", "int4", "uint4", "mxfp4", "fp8"])
def test_a_linear_layer_is_described(implementation, kind, monkeypatch):
    if implementation == "triton":
        if not HAS_TRITON:
            pytest.skip("Triton is not installed")
        ops = make_triton_ops(torch.float32, monkeypatch)
    else:
        ops = kernels.select_ops("cpu", torch.float32, implementation)
    inputs = CaseInputs(ops, QUICK)
    if (kind in ("int8", "int4") and not ops.quantized_bits) or (kind == "bfloat16" and len(ops.weight_dtypes) == 1):
        pytest.skip(f"the {implementation} kernels have no {kind} weights")
    weight, _ = inputs.weight(8, 64, kind, inputs.generator())
    found = LinearUse.of(ops.pack_linear(weight, torch.zeros(8)))
    # Plain torch keeps dequantised weights instead of codes.
    kept = "" if implementation == "reference" and kind in ("uint4", "mxfp4", "fp8") else kind
    assert found == LinearUse(64, 8, kept, has_bias=True)
    gated = LinearUse.of(ops.pack_gate_up(weight))
    assert (gated.has_bias, gated.kind) == (False, kept)
    assert gated.is_gate_up or implementation == "reference"  # which packs both alike


def test_uses_are_named_for_the_log():
    assert str(AttentionUse(32, 8, 128, 0.1)) == "32/8 heads of 128"
    odd = AttentionUse(32, 8, 128, 0.1, 4096, 30.0, True, True)
    assert str(odd) == "32/8 heads of 128, window 4096, soft cap 30, sinks, norms"
    assert str(LinearUse(64, 8, "uint4", has_bias=True)) == "64 -> 8, uint4, bias"
