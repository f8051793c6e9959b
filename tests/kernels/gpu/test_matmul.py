"""Products of dense, batch-invariant, grouped and fp8 weights, and of adapters."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire import kernels
from quire.kernels import fp8_rows
from quire.kernels.gpu import invariant_matmul, linear, lora, tile_sizes
from quire.kernels.gpu.fp8_matmul import TritonFp8Linear, fp8_matmul, quantize_rows
from quire.kernels.gpu.grouped_matmul import KINDS, TritonGroupedLinear
from quire.kernels.gpu.linear import TritonLinear
from quire.kernels.grouped_weight import BITS, FP8, MAX_ZEROS, GroupedWeight, to_fp8
from quire.kernels.lora import LINEARS, NO_ADAPTER, AdaptedRows, LoraPart, pack_adapter
from quire.kernels.moe import ExpertWeights, Routing
from tests.kernels.test_grouped_weight import random_weight
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.support.kernels.interpreter import make_dot_row_invariant
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.stacks import HIDDEN, PROJECTIONS, make_ends, make_factors, random, with_gains

# --- linear layers with the weights of torch: bias, `out`, and float32 results ----------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_out_is_filled_and_the_bias_added(ops, with_bias, invariant):
    x, weight = torch.randn(5, 24), torch.randn(40, 24)
    packed = TritonLinear(weight, torch.randn(40) if with_bias else None)
    out = torch.full((5, 40), float("nan"))
    assert linear.linear(x, packed, out, invariant) is out
    torch.testing.assert_close(out, F.linear(x, weight, packed.bias), rtol=1e-4, atol=1e-5)
    assert torch.equal(linear.linear(x, packed, None, invariant), out)


@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_results_are_not_rounded_in_between(ops, with_bias):
    x, weight = torch.randn(5, 24).bfloat16(), torch.randn(40, 24).bfloat16()
    bias = torch.randn(40).bfloat16() if with_bias else None
    found = linear.linear_float32(x, TritonLinear(weight, bias))
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


# --- the matmul of the batch-invariant mode ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_a_product_has_the_same_bits_for_a_row_alone_and_among_others_in_batch_invariant_mode(monkeypatch, dtype):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=True)
    assert ops.row_invariant
    n, k = (12800, 2000) if ON_CUDA else (70, 200)  # on a device as many as for the largest tiles
    weight, bias, x = (random(*s, dtype=dtype) for s in [(n, k), (n,), (130, k)])
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for method, pack, expected in (
        ("linear", ops.pack_linear(weight, bias), exact),
        ("linear_logits", ops.pack_linear(weight, bias), exact),
    ):
        product = getattr(ops, method)
        together = product(x, pack)
        assert_close(together, expected, 20 * slack(dtype, 300))
        for first, end in ((0, 1), (129, 130), (30, 67)):
            assert torch.equal(product(x[first:end], pack), together[first:end])
    # Those of more columns, too. Products in float32 have tiles of one size.
    sizes = ((64, 64, 64, 4, 6), (128, 128, 64, 8, 4)) if dtype.itemsize == 2 else ()
    for size in (tile_sizes.MatmulTiles(*one) for one in sizes):
        monkeypatch.setattr(invariant_matmul, "matmul_tiles", lambda *_, size=size: size)
        assert torch.equal(ops.linear_logits(x, pack), together)


# --- products with codes: those of the dequantised weights, in Triton's interpreter or on a device --------------------

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


# --- fP8 products with rounded activations: torch multiplies, and Triton's interpreter or a device rounds the rows ----

ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
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
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
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


# --- the grouped products of adapters in Triton, in shapes for the interpreter ----------------------------------------

WIDTHS = {name: sum(width for _, width, _ in parts) for name, parts in PROJECTIONS.items()}


def both(ops: kernels.Ops, adapters: list, index: list[int], name: str, layer: int = 0) -> tuple[torch.Tensor, ...]:
    """Return random outputs with the updates of the kernels, and with those of the definition in float32."""
    numbers = np.array(index, dtype=np.int32)
    x = torch.randn(len(index), PROJECTIONS[name][0][2]).to(ops.dtype)
    y = torch.randn(len(index), WIDTHS[name]).to(ops.dtype)
    found, expected = y.clone(), y.float()
    lora.TritonAdaptedRows([ops.pack_adapter(one, 0) for one in adapters], numbers, x.device).apply(
        layer, name, x, found
    )
    plain = [pack_adapter(one, x.device) for one in adapters]
    AdaptedRows(plain, numbers, x.device).apply(layer, name, x.float(), expected)
    return found, expected


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    unit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[found.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=unit, atol=unit * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_the_updates_of_their_adapters(monkeypatch, dtype, name):
    ops = make_triton_ops(dtype, monkeypatch)
    # Ranks below and above a tile, and types of their own.
    adapters = [make_factors(2, 8), make_factors(2, 80), make_factors(2, 3, torch.bfloat16)]
    index = [1, NO_ADAPTER, 0, 0, 2, 1] + [2] * 20
    found, expected = both(ops, adapters, index, name, layer=1)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_get_the_gains_of_their_adapters(monkeypatch, dtype):
    ops = make_triton_ops(dtype, monkeypatch)
    adapters = [with_gains(make_factors(1, 8)), make_factors(1, 4), with_gains(make_factors(1, 3, torch.bfloat16))]
    found, expected = both(ops, adapters, [1, NO_ADAPTER, 0, 0, 2, 1, 0], "gate_up")
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_and_logits_get_the_updates_of_their_adapters(monkeypatch, dtype):
    ops, vocabulary = make_triton_ops(dtype, monkeypatch), 83
    layers = [[{}, make_ends(8, vocabulary)], [{}, make_ends(5, vocabulary, torch.bfloat16)], make_factors(1, 4)]
    index = np.array([0, NO_ADAPTER, 1, 1, 0, 2, 0], dtype=np.int32)
    ids, hidden = torch.randint(vocabulary, (7,), dtype=torch.int32), torch.randn(7, HIDDEN).to(dtype)
    embeddings, logits = torch.randn(7, HIDDEN).to(dtype), torch.randn(7, vocabulary)
    found, expected = (embeddings.clone(), logits.clone()), (embeddings.float(), logits.clone())
    rows = lora.TritonAdaptedRows([ops.pack_adapter(one, 0) for one in layers], index, ids.device)
    plain = AdaptedRows([pack_adapter(one, ids.device) for one in layers], index, ids.device)
    for one, (table, scores), x in ((rows, found, hidden), (plain, expected, hidden.float())):
        one.embed(ids, table)
        one.head(x, scores)
    assert_near(found[0], expected[0])
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found[1], expected[1], rtol=near, atol=near)


@pytest.mark.slow
def test_adapters_change_other_layers_or_none(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch)
    adapters = [make_factors(1, 8, names=("qkv",)), make_factors(1, 4, names=("down",)), [{}]]
    for name in LINEARS:
        found, expected = both(ops, adapters, [0, 1, 2, NO_ADAPTER], name)
        assert_near(found, expected)


def test_a_projection_alone_has_the_columns_of_its_own(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch)
    (whole,) = make_factors(1, 4, names=("qkv",))
    adapters = [[{"qkv": [whole["qkv"][2]]}], [{"qkv": whole["qkv"][:1]}]]
    found, expected = both(ops, adapters, [0, 1, 1, 0], "qkv")
    assert_near(found, expected)


def test_factors_of_several_types_become_float32(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch)
    part = make_factors(1, 8, names=("o",))[0]["o"][0]
    mixed = [{"o": [LoraPart(part.a, part.b.bfloat16(), part.scale, part.offset)]}]
    assert ops.pack_adapter(mixed, 0).dtype is torch.float32
    found, expected = both(ops, [mixed], [0, 0], "o")
    assert_near(found, expected)


@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_the_batch(monkeypatch):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    ops = make_triton_ops(torch.float32, monkeypatch)
    adapters = [ops.pack_adapter(make_factors(1, 8), 0), ops.pack_adapter(make_factors(1, 8), 0)]
    x, y = torch.randn(40, PROJECTIONS["down"][0][2]), torch.randn(40, WIDTHS["down"])
    index = np.array([at % 3 - 1 for at in range(40)], dtype=np.int32)
    together = y.clone()
    lora.TritonAdaptedRows(adapters, index, x.device).apply(0, "down", x, together)
    for first, end in ((0, 2), (5, 23)):
        part = y[first:end].clone()
        rows = lora.TritonAdaptedRows(adapters, index[first:end], x.device)
        rows.apply(0, "down", x[first:end].contiguous(), part)
        assert torch.equal(part, together[first:end])


def test_a_batch_of_rows_without_adapters_launches_nothing(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch)
    monkeypatch.setattr(lora, "shrink_kernel", None)
    adapters = [ops.pack_adapter(make_factors(1, 8), 0), ops.pack_adapter([{}], 0)]
    y = torch.randn(3, WIDTHS["o"])
    rows = lora.TritonAdaptedRows(adapters, np.array([NO_ADAPTER, 1, NO_ADAPTER], dtype=np.int32), y.device)
    rows.apply(0, "o", torch.randn(3, PROJECTIONS["o"][0][2]), y)
