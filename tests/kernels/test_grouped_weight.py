"""Weights of codes with a scale per group: products are those of the dequantised weights, on every level."""

import pytest
import torch

from quire.kernels.grouped_weight import (
    BITS,
    FP4,
    FP8,
    KINDS,
    MAX_ZEROS,
    MXFP4,
    NF4,
    SINT8,
    UINT4,
    UINT8,
    GroupedWeight,
    grouped_part,
    grouped_rows,
    packed_words,
    to_fp8,
    unpacked_words,
)


def random_weight(kind: str, n: int, k: int) -> GroupedWeight:
    """Return weights in host memory, where a checkpoint's are when they are packed."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(n + k)
        groups = -(-k // 32)
        codes = torch.randint(0, 1 << BITS[kind], (n, k), generator=generator).to(torch.uint8)
        if kind == FP8:
            codes = torch.where((codes & 127) == 127, 0, codes)
        scales = torch.randn(n, groups, generator=generator) / 64
        zeros = None
        if kind in MAX_ZEROS:
            zeros = torch.randint(0, MAX_ZEROS[kind] + 1, (n, groups), generator=generator).to(torch.uint8)
            scales = scales.half().float()
        if kind == MXFP4:
            scales = torch.randint(-8, 4, (n, groups), generator=generator).float().exp2()
        return GroupedWeight(codes, scales, kind, zeros)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "n"), [(1, 2), (15, 34), (64, 40), (77, 66), (352, 32)])
def test_products_are_those_of_the_dequantised_weights(level_ops, kind, k, n):
    weight, dtype = random_weight(kind, n, k), level_ops.dtype
    bias = torch.randn(n).to(dtype)
    plain = weight.dequantized(dtype)
    short, long = (level_ops.pack_linear(w, bias) for w in (weight, plain))
    gates = [level_ops.pack_gate_up(w, bias) for w in (weight, plain)]
    for rows in (1, 2, 5, 12, 13, 40, 70):
        x = torch.randn(rows, k).to(dtype)
        assert torch.equal(level_ops.linear(x, short), level_ops.linear(x, long))
        assert torch.equal(level_ops.linear_logits(x, short), level_ops.linear_logits(x, long))
        assert torch.equal(level_ops.linear_silu_mul(x, gates[0]), level_ops.linear_silu_mul(x, gates[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_its_value(level_ops, kind):
    codes = torch.arange(1 << BITS[kind], dtype=torch.uint8)
    if kind == FP8:
        codes = codes[(codes & 127) != 127]
    scales = torch.ones(len(codes), 1)
    zeros = torch.full((len(codes), 1), 3, dtype=torch.uint8) if kind in MAX_ZEROS else None
    weight = GroupedWeight(codes[:, None], scales, kind, zeros)
    found = level_ops.linear_logits(torch.ones(1, 1, dtype=level_ops.dtype), level_ops.pack_linear(weight))
    assert torch.equal(found[0], weight.dequantized(level_ops.dtype).float().flatten())


def test_the_memory_of_packed_weights(level_ops):
    for kind, bits in ((UINT4, 5), (MXFP4, 5), (NF4, 5), (FP4, 5), (FP8, 9), (UINT8, 9), (SINT8, 9)):
        assert level_ops.pack_linear(random_weight(kind, 64, 96)).nbytes == 64 * 96 * bits // 8


@pytest.mark.parametrize("kind", [UINT4, UINT8])
def test_an_order_of_input_features_is_that_of_the_activations(level_ops, kind):
    k = 77
    order, plain = torch.randperm(k).int(), random_weight(kind, 66, k)
    ordered = GroupedWeight(plain.codes, plain.scales, kind, plain.zeros, order)
    assert torch.equal(ordered.dequantized()[:, order], plain.dequantized())
    packed = [level_ops.pack_linear(weight) for weight in (ordered, plain)]
    assert packed[0].nbytes == packed[1].nbytes + 4 * k
    gates = [level_ops.pack_gate_up(weight) for weight in (ordered, plain)]
    for rows in (1, 12, 40):
        x = torch.randn(rows, k).to(level_ops.dtype)
        assert torch.equal(level_ops.linear(x, packed[0]), level_ops.linear(x[:, order].contiguous(), packed[1]))
        expected = level_ops.linear_silu_mul(x[:, order].contiguous(), gates[1])
        assert torch.equal(level_ops.linear_silu_mul(x, gates[0]), expected)
        assert torch.equal(level_ops.linear(x, packed[0])[-1:], level_ops.linear(x[-1:].contiguous(), packed[0]))


def test_rows_and_parts_keep_the_order():
    plain, order = random_weight(UINT4, 6, 64), torch.randperm(64).int()
    ordered = GroupedWeight(plain.codes, plain.scales, UINT4, plain.zeros, order)
    rows = grouped_part(ordered, (slice(2, 5),))
    assert rows is not None
    assert torch.equal(rows.dequantized(), ordered.dequantized()[2:5])
    assert grouped_part(ordered, (slice(None), slice(0, 32))) is None
    joined = grouped_rows([ordered, rows])
    assert joined is not None
    assert torch.equal(joined.dequantized(), torch.cat([ordered.dequantized(), rows.dequantized()]))
    assert grouped_rows([ordered, plain]) is None
    assert grouped_rows([plain, random_weight(UINT8, 6, 64)]) is None


def test_rounding_to_fp8_is_within_the_precision_of_the_format():
    weight = torch.randn(40, 77)
    weight[3] = 0
    rounded = to_fp8(weight).dequantized()
    largest = weight.abs().amax(1, keepdim=True)
    assert bool(((weight - rounded).abs() <= (weight.abs() / 16).clamp_min(1e-4 * largest)).all())
    assert torch.equal(rounded.abs().amax(1, keepdim=True), largest)
    assert not rounded[3].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "int3"}, "kind is 'int3'"),
        ({"kind": FP8}, "zeros are for uint4 and uint8 alone"),
        ({"zeros": None}, "which need them"),
        ({"codes": torch.zeros(2, 33, dtype=torch.int8)}, "codes is torch.int8"),
        ({"codes": torch.full((2, 33), 16, dtype=torch.uint8)}, "codes of 4 bits must be in 0..15"),
        ({"codes": torch.zeros(2, 0, dtype=torch.uint8)}, r"not \[N, K\]"),
        ({"scales": torch.ones(2, 1)}, r"scales has shape \(2, 1\), not \(2, 2\)"),
        ({"scales": torch.full((2, 2), float("nan"))}, "scales must be finite"),
        ({"scales": torch.full((2, 2), 0.1)}, "zeros in their lowest 8 bits"),
        ({"zeros": torch.full((2, 2), 17, dtype=torch.uint8)}, r"zeros must be in 0..16"),
        ({"order": torch.zeros(33, dtype=torch.int32)}, r"order must have each of 0..32 once"),
        ({"order": torch.arange(33)}, "order is torch.int64"),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(fields, message):
    whole = {
        "codes": torch.zeros(2, 33, dtype=torch.uint8),
        "scales": torch.ones(2, 2),
        "kind": UINT4,
        "zeros": torch.zeros(2, 2, dtype=torch.uint8),
    }
    with pytest.raises((TypeError, ValueError), match=message):
        GroupedWeight(**(whole | fields))


def test_codes_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="codes must be numbers"):
        GroupedWeight(torch.full((1, 1), 255, dtype=torch.uint8), torch.ones(1, 1), FP8)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_words_can_be_unpacked(kind):
    weight = random_weight(kind, 5, 77)
    found = unpacked_words(packed_words(weight), kind, 77)
    assert torch.equal(found.codes, weight.codes)
    assert torch.equal(found.scales, weight.scales)
    assert (found.zeros is None) == (weight.zeros is None)
    assert found.zeros is None or torch.equal(found.zeros, weight.zeros)
