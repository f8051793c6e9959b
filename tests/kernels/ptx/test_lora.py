"""The grouped products of adapters, compiled for Hopper."""

import numpy as np
import pytest
import torch

from quire import kernels
from quire.kernels.gpu import lora
from quire.kernels.lora import LINEARS, NO_ADAPTER, LoraPart
from tests.kernels.gpu.test_lora import assert_near, both
from tests.kernels.ptx.emulator import Emulator
from tests.support.kernels.adapters import make_factors


@pytest.mark.parametrize("name", LINEARS)
def test_rows_get_the_updates_of_their_adapters(emulator: Emulator, emulated_ops: kernels.Ops, name: str) -> None:
    adapters = [make_factors(2, 8, torch.bfloat16), make_factors(2, 80), make_factors(2, 3, torch.bfloat16)]
    index = [1, NO_ADAPTER, 0, 0, 2, 1] + [2] * 20
    found, expected = both(emulated_ops, adapters, index, name, layer=1)
    assert_near(found, expected)
    assert emulator.sources.keys() == {"shrink_kernel", "expand_kernel"}


def test_input_features_of_several_tiles(emulator: Emulator, emulated_ops: kernels.Ops) -> None:
    """Addresses of rows of 1,024 features are multiples of 16 bytes, so that copies are asynchronous."""
    a, b = (torch.randn(*shape).bfloat16() / 32 for shape in ((16, 1024), (96, 16)))
    x, y = torch.randn(3, 1024).to(emulated_ops.dtype), torch.randn(3, 96).to(emulated_ops.dtype)
    adapter = emulated_ops.pack_adapter([{"o": [LoraPart(a, b, 2.0)]}], 0)
    expected = y.float() + 2 * x.float() @ a.float().T @ b.float().T
    lora.TritonAdaptedRows([adapter], np.zeros(3, dtype=np.int32), x.device).apply(0, "o", x, y)
    assert_near(y, expected)
    assert emulator.sources.keys() == {"shrink_kernel", "expand_kernel"}
