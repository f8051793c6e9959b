"""FP8 products with rounded activations: torch multiplies, and Triton's interpreter or a device rounds the rows."""

import pytest
import torch

from quire.kernels import fp8_rows
from quire.kernels.gpu.fp8_matmul import TritonFp8Linear, fp8_matmul, quantize_rows
from quire.kernels.gpu.grouped_matmul import TritonGroupedLinear
from quire.kernels.grouped_weight import GroupedWeight, to_fp8
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 1440, 4096])
def test_rows_are_rounded_as_the_definition_says(ops, dtype, width):
    x = (torch.randn(5, width) * torch.logspace(-3, 3, 5)[:, None]).to(dtype)
    x[3] = 0
    codes, scales = quantize_rows(x)
    expected, expected_scales = fp8_rows.quantize_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8) & 127, expected.view(torch.uint8) & 127)
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(quantize_rows(x[2:3])[0].view(torch.uint8), codes[2:3].view(torch.uint8))


def test_a_row_with_nan_stays_one(ops):
    x = torch.randn(3, 64)
    x[1, 5], x[2, 60] = float("nan"), float("inf")
    found = ops_product(x, to_fp8(torch.randn(32, 64)), None, torch.float32)
    assert bool(found[0].isfinite().all())
    assert bool(found[1:].isnan().all())


def ops_product(x, weight, bias, out_dtype):
    scales = fp8_rows.channel_scales(weight)
    one = torch.ones((), device=x.device)
    codes = weight.codes.view(torch.float8_e4m3fn)
    return fp8_matmul(x, TritonFp8Linear(codes, scales[None], one, bias, x.dtype), None, out_dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 48), (33, 160, 32)])
def test_products_are_those_of_the_rounded_rows(monkeypatch, dtype, rows, k, n, with_bias):
    ops = make_triton_ops(dtype, monkeypatch, fp8_activations=True)
    x, weight = torch.randn(rows, k).to(dtype), to_fp8(torch.randn(n, k) / k**0.5)
    bias = torch.randn(n).to(dtype) if with_bias else None
    packed = ops.pack_linear(weight, bias)
    assert isinstance(packed, TritonFp8Linear)
    assert (packed.in_features, packed.out_features) == (k, n)
    assert packed.nbytes == n * k + 4 * n + (0 if bias is None else bias.nbytes)
    exact = fp8_rows.fp8_linear(x, weight, bias)
    scale = float(exact.abs().max())
    torch.testing.assert_close(ops.linear_logits(x, packed), exact, rtol=1e-4, atol=1e-4 * scale)
    out = torch.full((rows, n), float("nan"), dtype=dtype)
    assert ops.linear(x, packed, out) is out
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 1e-5)
    torch.testing.assert_close(out.float(), exact, rtol=unit, atol=1e-4 * scale)
    assert torch.equal(ops.linear(x, packed), out)
    gates = ops.pack_gate_up(weight, bias)
    gate, up = exact.chunk(2, dim=-1)
    found = ops.linear_silu_mul(x, gates)
    torch.testing.assert_close(found.float(), torch.nn.functional.silu(gate) * up, rtol=4 * unit, atol=4 * unit)


def test_a_step_without_rows_has_no_launch(monkeypatch):
    ops = make_triton_ops(torch.bfloat16, monkeypatch, fp8_activations=True)
    packed = ops.pack_linear(to_fp8(torch.randn(32, 64)))
    assert ops.linear(torch.empty(0, 64, dtype=torch.bfloat16), packed).shape == (0, 32)
    out = torch.empty(0, 32)
    assert ops.linear_logits(torch.empty(0, 64, dtype=torch.bfloat16), packed, out) is out


def test_layers_are_weight_only_unless_asked_for_and_where_scales_or_shapes_differ(monkeypatch):
    weight = to_fp8(torch.randn(32, 64))
    assert isinstance(make_triton_ops(torch.float32, monkeypatch).pack_linear(weight), TritonGroupedLinear)
    ops = make_triton_ops(torch.float32, monkeypatch, fp8_activations=True)
    blocks = GroupedWeight(weight.codes, weight.scales * torch.tensor([1.0, 2.0]), weight.kind)
    for other in (blocks, to_fp8(torch.randn(30, 64)), to_fp8(torch.randn(32, 48))):
        packed = ops.pack_linear(other)
        assert isinstance(packed, TritonGroupedLinear)
        x = torch.randn(2, other.shape[1])
        torch.testing.assert_close(ops.linear(x, packed), x @ other.dequantized().T, rtol=1e-4, atol=1e-4)


def test_the_batch_invariant_mode_has_no_fp8_products(monkeypatch):
    with pytest.raises(ValueError, match="not batch-invariant"):
        make_triton_ops(torch.float32, monkeypatch, batch_invariant=True, fp8_activations=True)


def test_the_replacement_does_not_round_activations(monkeypatch):
    from quire.kernels.gpu import torch_kernels

    monkeypatch.setattr(torch_kernels, "COLUMNS_AT_ONCE", 20)
    ops = make_triton_ops(torch.float32, monkeypatch, fp8_activations=True)
    x, weight, bias = torch.randn(3, 64), to_fp8(torch.randn(32, 64)), torch.randn(32)
    packed = ops.pack_linear(weight, bias)
    rounded = ops.linear(x, packed)
    ops.replace_kernel("fp8_matmul")
    assert ops.can_capture
    exact = x @ weight.dequantized().T + bias
    torch.testing.assert_close(ops.linear(x, packed), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rounded, exact, rtol=1e-3, atol=1e-3)
