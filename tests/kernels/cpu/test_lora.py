"""Low-rank adapters in C++: rows do not affect each other, and rows without an adapter keep their bits."""

import numpy as np
import pytest
import torch

from quire.kernels.cpu.lora import UNIT_ROWS, CpuAdapter, units
from quire.kernels.lora import NO_ADAPTER, AdapterBatch
from tests.support.kernels.adapters import make_factors, prompts
from tests.support.kernels.stacks import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    QUERIES,
    make_caches,
    random,
    stack_arguments,
)


def test_units_have_the_rows_of_one_adapter():
    index = np.array([1, 0, -1, 1, 1, 0, 1, 1, 2, -1], dtype=np.int32)
    rows, starts, adapters = units(index)
    assert rows.tolist() == [1, 5, 0, 3, 4, 6, 7, 8]
    assert starts.tolist() == [0, 2, 6, 7, 8]
    assert adapters.tolist() == [0, 1, 1, 2]
    assert UNIT_ROWS == 4


@pytest.mark.parametrize("index", [[], [NO_ADAPTER] * 3], ids=["none", "without"])
def test_no_rows_make_no_units(index):
    rows, starts, adapters = units(np.array(index, dtype=np.int32))
    assert (rows.tolist(), starts.tolist(), adapters.tolist()) == ([], [0], [])


@pytest.fixture
def compute(cpu_ops):
    """Compute a step with an adapter index per token, or None for no adapters at all."""
    torch.manual_seed(4)
    layers, norm, _, cos_sin = stack_arguments(cpu_ops, [0, 20], norms=True, biases=True)
    residual, arguments = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype), prompts()
    adapters = [cpu_ops.pack_adapter(make_factors(2, rank, dtype), INNER)
                for rank, dtype in ((8, torch.float32), (5, torch.bfloat16), (64, torch.float32))]  # fmt: skip

    def run(index, rows=None):
        wanted = torch.arange(36) if rows is None else torch.tensor(rows)
        stack = cpu_ops.stack_layers(layers, norm, make_caches(cpu_ops, 2), cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
        batch = None
        if index is not None:
            index = np.array(index, dtype=np.int32)
            batch = AdapterBatch(adapters, index, index[wanted.numpy()])
        return cpu_ops.decoder_layers(residual.clone(), stack, **arguments, rows=wanted, adapters=batch)

    return run


def test_a_row_does_not_depend_on_the_adapters_of_other_sequences(compute):
    plain = compute(None)
    mixed = compute([2] + [NO_ADAPTER] * 5 + [1] * 30)
    other = compute([0] + [1] * 5 + [1] * 30)
    assert torch.equal(plain[1:6], mixed[1:6])
    assert torch.equal(other[6:], mixed[6:])
    assert not torch.equal(plain[0], mixed[0])
    assert not torch.equal(plain[6:], mixed[6:])


def test_the_wanted_rows_alone_have_the_same_bits(compute):
    index = [2] + [0] * 5 + [1] * 30
    assert torch.equal(compute(index, [35, 0, 3]), compute(index)[[35, 0, 3]])


def test_packed_factors_count_their_padding():
    adapter = CpuAdapter(make_factors(1, 8, names=("o",)), INNER)
    assert adapter.nbytes == 4 * 8 * (192 + 80)
