"""The products of the batch-invariant mode and of grouped weights, compiled for Hopper."""

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import invariant_matmul, tile_sizes
from quire.kernels.grouped_weight import BITS, FP8, KINDS, MAX_ZEROS, GroupedWeight
from tests.kernels.ptx.conftest import BOTH_DTYPES
from tests.kernels.ptx.emulator import Emulator
from tests.kernels.test_grouped_weight import random_weight
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.stacks import random

# Every size of tiles that `matmul_tiles` gives to 16-bit types.
SIZES = [(64, 32, 64, 4, 8), (64, 64, 64, 4, 6), (128, 64, 64, 8, 4), (128, 128, 64, 8, 4)]


@pytest.mark.parametrize("dtype", BOTH_DTYPES)
@pytest.mark.parametrize("depth", [200, 448])
def test_a_row_has_the_same_bits_in_tiles_of_any_size(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, depth: int
) -> None:
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=True)
    weight, bias, x = (random(*s, dtype=dtype) for s in [(136, depth), (136,), (130, depth)])
    packed = ops.pack_linear(weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    together = ops.linear_logits(x, packed)
    assert_close(together, exact, 20)
    assert_close(ops.linear(x, packed), exact, 20 * slack(dtype, 300))
    assert torch.equal(ops.linear_logits(x[:1], packed), together[:1])
    for size in SIZES:
        tiles = tile_sizes.MatmulTiles(*size)
        monkeypatch.setattr(invariant_matmul, "matmul_tiles", lambda *_, tiles=tiles: tiles)
        assert torch.equal(ops.linear_logits(x, packed), together)
    assert emulator.sources.keys() == {"matmul_kernel"}


@pytest.mark.parametrize("dtype", BOTH_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 77, 34), (16, 64, 70), (70, 96, 130)])
def test_products_with_codes_are_those_of_the_dequantised_weights(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, rows: int, k: int, n: int
) -> None:
    ops = make_triton_ops(dtype, monkeypatch)
    weight = random_weight(kind, n, k)
    if kind == FP8:  # float16 has no large products
        weight = GroupedWeight(weight.codes, weight.scales / 64, kind)
    bias, x = torch.randn(n).to(dtype), torch.randn(rows, k).to(dtype)
    exact = x.double() @ weight.dequantized(dtype).double().T + bias.double()
    found = ops.linear_logits(x, ops.pack_linear(weight, bias))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    assert emulator.sources.keys() == {"grouped_matmul_kernel"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_its_value(emulated_ops: kernels.Ops, kind: str) -> None:
    codes = torch.arange(1 << BITS[kind], dtype=torch.uint8)
    codes = codes[(codes & 127) != 127] if kind == FP8 else codes  # these two are NaN
    zeros = torch.full((len(codes), 1), 16, dtype=torch.uint8) if kind in MAX_ZEROS else None
    weight = GroupedWeight(codes[:, None], torch.full((len(codes), 1), 0.5), kind, zeros)
    found = emulated_ops.linear_logits(torch.ones(1, 1, dtype=emulated_ops.dtype), emulated_ops.pack_linear(weight))
    assert torch.equal(found[0], weight.dequantized().flatten())
