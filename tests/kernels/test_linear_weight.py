"""Weights that are read while they are packed have the panels of the same weights, packed at once."""

import pytest
import torch

from quire.kernels.cpu import linear
from quire.kernels.grouped_weight import UINT4, UINT8, GroupedWeight, grouped_rows, to_fp8
from quire.kernels.k_quant_weight import K_QUANT6, k_quant_part, k_quant_rows
from quire.kernels.linear_weight import LinearWeight, Ranges, RowsDiffer, WeightRows, whole
from quire.kernels.quantization import QuantizedWeight, quantize
from tests.kernels.test_grouped_weight import random_weight
from tests.kernels.test_k_quant_weight import random_weight as random_k_quant

K = 256


def rows_of(weight: LinearWeight) -> WeightRows:
    """Return a weight as rows that are read."""

    def read(ranges: Ranges) -> LinearWeight:
        index = torch.cat([torch.arange(first, last) for first, last in ranges])
        if isinstance(weight, torch.Tensor):
            return weight[index]
        if isinstance(weight, QuantizedWeight):
            return QuantizedWeight(weight.values[index], weight.scales[index], weight.bits)
        if isinstance(weight, GroupedWeight):
            zeros = None if weight.zeros is None else weight.zeros[index]
            return GroupedWeight(weight.codes[index], weight.scales[index], weight.kind, zeros, weight.order)
        parts = [k_quant_part(weight, (slice(first, last),)) for first, last in ranges]
        return k_quant_rows([part for part in parts if part is not None])

    return WeightRows(weight.shape, read)


def weights(n: int, has_integers: bool) -> list[LinearWeight]:
    wide = torch.randn(n, K)
    ordered = random_weight(UINT4, n, K)
    order = torch.randperm(K).int()
    found: list[LinearWeight] = [
        random_weight(UINT8, n, K),
        GroupedWeight(ordered.codes, ordered.scales, UINT4, ordered.zeros, order),
        random_k_quant(K_QUANT6, n, K),
        to_fp8(wide),
        wide if has_integers else wide.bfloat16(),
    ]
    return [*found, quantize(wide, 8), quantize(wide, 4), wide.half()] if has_integers else found


@pytest.mark.parametrize("n", [34, 130, 200])
def test_the_panels_are_those_of_the_whole(cpu_ops, n, monkeypatch):
    monkeypatch.setattr(linear, "_CHUNK", 2 * 32 * K)  # two panels
    for weight in weights(n, cpu_ops.dtype is torch.float32):
        bias = torch.randn(n).to(cpu_ops.dtype)
        for pack in (cpu_ops.pack_linear, cpu_ops.pack_gate_up):
            once, read = pack(weight, bias), pack(rows_of(weight), bias)
            assert read.format is once.format
            assert torch.equal(read.weight, once.weight)
            assert torch.equal(read.bias, once.bias)
            assert (read.scales is None) == (once.scales is None)
            assert read.scales is None or torch.equal(read.scales, once.scales)
            assert read.order is once.order


def test_rows_of_several_kinds_are_refused(cpu_ops, monkeypatch):
    monkeypatch.setattr(linear, "_CHUNK", 1)
    kinds = {0: random_weight(UINT4, 32, K), 32: random_weight(UINT8, 32, K)}
    with pytest.raises(RowsDiffer, match="differ in their type, kind or order"):
        cpu_ops.pack_linear(WeightRows(torch.Size((64, K)), lambda ranges: kinds[ranges[0][0]]))


def test_the_whole_of_a_weight():
    plain = torch.randn(5, 3)
    assert whole(plain) is plain
    assert torch.equal(whole(rows_of(plain)), plain)
    joined = grouped_rows([random_weight(UINT4, 2, 32)])
    assert joined is not None
    assert whole(joined) is joined
