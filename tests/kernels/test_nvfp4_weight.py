"""Weights of NVFP4: products are those of the dequantised weights, on every level."""

import pytest
import torch

from quire import kernels
from quire.kernels.grouped_weight import E2M1
from quire.kernels.nvfp4_weight import Nvfp4Weight, nvfp4_part, nvfp4_rows


def random_weight(n: int, k: int) -> Nvfp4Weight:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8)
    scales = (torch.rand(n, k // 16, generator=generator) * 448).to(torch.float8_e4m3fn)
    return Nvfp4Weight(codes, scales, torch.randn(n, generator=generator) / 4096)


@pytest.mark.parametrize(("k", "n"), [(16, 2), (48, 34), (64, 40), (352, 66)])
def test_products_are_those_of_the_dequantised_weights(level_ops, k, n):
    weight, dtype = random_weight(n, k), level_ops.dtype
    bias = torch.randn(n).to(dtype)
    plain = weight.dequantized(dtype)
    short, long = (level_ops.pack_linear(w, bias) for w in (weight, plain))
    gates = [level_ops.pack_gate_up(w, bias) for w in (weight, plain)]
    for rows in (1, 2, 5, 12, 13, 40):
        x = torch.randn(rows, k).to(dtype)
        assert torch.equal(level_ops.linear(x, short), level_ops.linear(x, long))
        assert torch.equal(level_ops.linear_logits(x, short), level_ops.linear_logits(x, long))
        assert torch.equal(level_ops.linear_silu_mul(x, gates[0]), level_ops.linear_silu_mul(x, gates[1]))
        assert torch.equal(level_ops.linear(x, short)[-1:], level_ops.linear(x[-1:].contiguous(), short))


def test_every_code_and_every_scale_has_its_value(level_ops):
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[(scales & 127) != 127]  # 127 and 255 are no numbers
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 1)
    of_rows = scales.view(torch.float8_e4m3fn)
    weight = Nvfp4Weight(codes, of_rows[:, None], torch.full((len(scales),), 0.75))
    found = level_ops.linear_logits(torch.eye(16, dtype=level_ops.dtype), level_ops.pack_linear(weight))
    expected = torch.outer(torch.tensor(E2M1), of_rows.float() * 0.75)  # exact: 7 significant bits
    assert torch.equal(found, expected)


def test_the_reference_has_the_same_products():
    weight, ops = random_weight(8, 48), kernels.ReferenceOps("cpu", torch.float32)
    x = torch.randn(3, 48)
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), x @ weight.dequantized().T)


def test_a_packed_weight_has_its_stored_bits_and_a_scale_per_channel(level_ops):
    assert level_ops.pack_linear(random_weight(64, 256)).nbytes == 64 * 256 * 4.5 / 8 + 64 * 4


def test_parts_and_rows_are_those_of_the_whole():
    weight = random_weight(6, 64)
    part = nvfp4_part(weight, (slice(2, 5), slice(16, 48)))
    assert part is not None
    assert torch.equal(part.dequantized(), weight.dequantized()[2:5, 16:48])
    assert nvfp4_part(weight, ()) is weight
    assert nvfp4_part(weight, (slice(None), slice(0, 24))) is None
    joined = nvfp4_rows([weight, random_weight(3, 64)])
    assert torch.equal(joined.dequantized(), torch.cat([weight.dequantized(), random_weight(3, 64).dequantized()]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codes": torch.zeros(2, 24, dtype=torch.uint8)}, "K a multiple of 16"),
        ({"codes": torch.full((2, 32), 16, dtype=torch.uint8)}, r"codes must be in 0..15"),
        ({"scales": torch.ones(2, 2)}, "scales is torch.float32"),
        ({"scales": torch.ones(2, 1).to(torch.float8_e4m3fn)}, r"scales has shape \(2, 1\), not \(2, 2\)"),
        ({"scales": torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn)}, "must be finite"),
        ({"channels": torch.full((2,), float("inf"))}, "must be finite"),
        ({"kind": "mxfp4"}, "kind is 'mxfp4'"),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(fields, message):
    whole = {
        "codes": torch.zeros(2, 32, dtype=torch.uint8),
        "scales": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "channels": torch.ones(2),
    }
    with pytest.raises((TypeError, ValueError), match=message):
        Nvfp4Weight(**(whole | fields))
