"""Packed weights of linear layers: layouts, and weights of 16 bits with float activations."""

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.kernels.quantization import QuantizedWeight, group_multipliers
from tests.support.kernels.implementations import make_ops

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[level.name for level in LEVELS[torch.float32]])
def float_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops("cpu", request.param, torch.float32, monkeypatch)


def test_weights_are_packed_in_panels_of_32_columns(cpu_ops):
    n, k, per_word = 40, 6, 4 // cpu_ops.dtype.itemsize
    weight = torch.arange(n * k).view(n, k).to(cpu_ops.dtype)
    packed = cpu_ops.pack_linear(weight, torch.arange(n).to(cpu_ops.dtype))
    panels = packed.weight.view(cpu_ops.dtype).view(2, k // per_word, 32, per_word)
    for row in (0, 31, 32, 39):
        assert torch.equal(panels[row // 32, :, row % 32].flatten(), weight[row])
    assert not panels[1, :, 8:].any()
    assert packed.bias.tolist() == [*range(n), *[0.0] * 24]
    assert packed.nbytes == packed.weight.nbytes + packed.bias.nbytes


def test_gates_and_ups_share_a_panel(cpu_ops):
    inner = 20
    bias = torch.arange(2 * inner).to(cpu_ops.dtype)
    packed = cpu_ops.pack_gate_up(torch.zeros(2 * inner, 4, dtype=cpu_ops.dtype), bias)
    gates, ups = list(range(inner)), list(range(inner, 2 * inner))
    rest = [0] * 12
    assert packed.bias.tolist() == [*gates[:16], *ups[:16], *gates[16:], *rest, *ups[16:], *rest]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (2, 33), (77, 40), (576, 200), (1531, 64)])
def test_weights_of_16_bits_have_the_products_of_the_same_floats(float_ops, dtype, k, n):
    weight, bias = torch.randn(2 * n, k).to(dtype), torch.randn(2 * n).to(dtype)
    short, long = (float_ops.pack_linear(w, b) for w, b in ((weight, bias), (weight.float(), bias.float())))
    gates = [float_ops.pack_gate_up(w, b) for w, b in ((weight, bias), (weight.float(), bias.float()))]
    assert short.weight.nbytes * k == long.weight.nbytes * ((k + 1) // 2)
    for rows in (1, 2, 3, 4, 7, 12, 13, 25, 70):
        x = torch.randn(rows, k)
        assert torch.equal(float_ops.linear(x, short), float_ops.linear(x, long))
        assert torch.equal(float_ops.linear_logits(x, short), float_ops.linear_logits(x, long))
        assert torch.equal(float_ops.linear_silu_mul(x, gates[0]), float_ops.linear_silu_mul(x, gates[1]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [1, 16, 47, 64])
def test_an_embedding_table_stays_in_16_bits(float_ops, dtype, width):
    table, ids = torch.randn(50, width).to(dtype), torch.tensor([3, 49, 0, 3])
    assert torch.equal(float_ops.embed(ids, table), table[ids].float())
    with pytest.raises(IndexError, match=r"token_ids\[1\]"):
        float_ops.embed(torch.tensor([1, 50]), table)


def test_extreme_values_of_16_bits_are_kept(float_ops):
    for dtype in HALVES:
        info = torch.finfo(dtype)
        values = torch.tensor([info.max, -info.max, info.tiny, info.smallest_normal / 2, -0.0, 1 + info.eps]).to(dtype)
        packed = float_ops.pack_linear(values[:, None].contiguous())
        assert torch.equal(float_ops.linear(torch.ones(1, 1), packed)[0], values.float())


def test_the_layout_of_8_bit_weights(float_ops):
    n, k = 40, 10
    values = (torch.arange(n * k).view(n, k) % 256 - 128).to(torch.int8)
    packed = float_ops.pack_linear(QuantizedWeight(values, torch.arange(n).float(), 8))
    panels = packed.weight.view(2, 3, 32, 4)
    for row in (0, 31, 32, 39):
        assert torch.equal(panels[row // 32, :, row % 32].flatten()[:k].short(), values[row].short() + 128)
    assert packed.scales.tolist() == [*range(n), *[0.0] * 24]


def test_the_layout_of_4_bit_weights(float_ops):
    n, k = 40, 70
    values = (torch.arange(n * k).view(n, k) % 16 - 8).to(torch.int8)
    scales = torch.arange(n * 3).view(n, 3).half()
    multipliers, columns = group_multipliers(scales)
    packed = float_ops.pack_linear(QuantizedWeight(values, scales, 4))
    groups = packed.weight.view(2, 3, 576)
    units = groups[:, :, 64:].reshape(2, 3, 4, 32, 4)
    for row in (0, 31, 32, 39):
        found = units[row // 32, :, :, row % 32]  # [groups, units, 4]
        unpacked = torch.stack([found % 16, found // 16], dim=2).flatten()[:k]
        assert torch.equal(unpacked.short(), values[row].short() + 8)
        found_multipliers = groups[row // 32, :, :64].contiguous().view(torch.int16)[:, row % 32]
        assert torch.equal(found_multipliers, multipliers[row])
    assert torch.equal(packed.scales[:n], columns)
