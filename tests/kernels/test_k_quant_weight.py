"""Weights of K-quants: products are those of the dequantised weights, on every level."""

import pytest
import torch

from quire import kernels
from quire.kernels.k_quant_weight import K_QUANT4, K_QUANT6, K_QUANTS, KQuantWeight, k_quant_part, k_quant_rows


def random_weight(kind: str, n: int, k: int) -> KQuantWeight:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 1 << K_QUANTS[kind], (n, k), generator=generator).to(torch.uint8)
    scales, minimums = (torch.randn(n, k // 256, generator=generator).half().float() / 4096 for _ in range(2))
    factors, offsets = (torch.randint(-128, 128, (n, k // 16), generator=generator).to(torch.int8) for _ in range(2))
    return KQuantWeight(codes, scales, minimums, factors, offsets, kind)


@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize(("k", "n"), [(256, 2), (512, 66)])
def test_products_are_those_of_the_dequantised_weights(level_ops, kind, k, n):
    weight, dtype = random_weight(kind, n, k), level_ops.dtype
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


@pytest.mark.parametrize("kind", K_QUANTS)
def test_every_code_and_place_has_its_value(level_ops, kind):
    codes = (torch.arange(256) % (1 << K_QUANTS[kind])).to(torch.uint8)[None]
    factors, offsets = torch.arange(-8, 8, dtype=torch.int8)[None], torch.arange(112, 128, dtype=torch.int8)[None]
    weight = KQuantWeight(codes, torch.ones(1, 1), torch.full((1, 1), -0.5), factors, offsets, kind)
    packed = level_ops.pack_linear(weight)
    found = level_ops.linear_logits(torch.eye(256, dtype=level_ops.dtype), packed)
    expected = codes[0].float() * factors[0].repeat_interleave(16) + 0.5 * offsets[0].repeat_interleave(16)
    assert torch.equal(found[:, 0], expected.to(level_ops.dtype).float())


def test_the_reference_has_the_same_products():
    weight, ops = random_weight(K_QUANT6, 8, 256), kernels.ReferenceOps("cpu", torch.float32)
    x = torch.randn(3, 256)
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), x @ weight.dequantized().T)


def test_the_memory_of_packed_weights(level_ops):
    for kind, bits in ((K_QUANT4, 5.25), (K_QUANT6, 7.25)):
        assert level_ops.pack_linear(random_weight(kind, 64, 512)).nbytes == 64 * 512 * bits / 8


def test_parts_and_rows_are_those_of_the_whole():
    weight = random_weight(K_QUANT4, 6, 512)
    part = k_quant_part(weight, (slice(2, 5), slice(256, 512)))
    assert part is not None
    assert torch.equal(part.dequantized(), weight.dequantized()[2:5, 256:])
    assert k_quant_part(weight, ()) is weight
    assert k_quant_part(weight, (slice(None), slice(0, 128))) is None
    other = random_weight(K_QUANT6, 3, 512)
    joined = k_quant_rows([weight, other])
    assert joined.kind == K_QUANT6
    assert torch.equal(joined.dequantized(), torch.cat([weight.dequantized(), other.dequantized()]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "k_quant5"}, "kind is 'k_quant5'"),
        ({"codes": torch.zeros(2, 255, dtype=torch.uint8)}, "K a multiple of 256"),
        ({"codes": torch.full((2, 256), 16, dtype=torch.uint8)}, "codes of 4 bits must be in 0..15"),
        ({"scales": torch.ones(2, 2)}, r"scales has shape \(2, 2\), not \(2, 1\)"),
        ({"minimums": torch.full((2, 1), float("inf"))}, "must be finite"),
        ({"factors": torch.zeros(2, 16)}, "factors is torch.float32"),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(fields, message):
    whole = {
        "codes": torch.zeros(2, 256, dtype=torch.uint8),
        "scales": torch.ones(2, 1),
        "minimums": torch.ones(2, 1),
        "factors": torch.zeros(2, 16, dtype=torch.int8),
        "offsets": torch.zeros(2, 16, dtype=torch.int8),
        "kind": K_QUANT4,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        KQuantWeight(**(whole | fields))
