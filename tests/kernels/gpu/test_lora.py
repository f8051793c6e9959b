"""The grouped products of adapters in Triton, in shapes for the interpreter."""

import numpy as np
import pytest
import torch

from quire import kernels
from quire.kernels.gpu import lora
from quire.kernels.lora import LINEARS, NO_ADAPTER, AdaptedRows, LoraPart, pack_adapter
from tests.support.kernels.adapters import PROJECTIONS, make_factors
from tests.support.kernels.implementations import ON_CUDA, make_triton_ops
from tests.support.kernels.interpreter import make_dot_row_invariant

WIDTHS = {name: sum(width for _, width, _ in parts) for name, parts in PROJECTIONS.items()}
DTYPES = [torch.float32, torch.float16]  # the interpreter is wrong with products in bfloat16


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
