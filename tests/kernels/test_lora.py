"""Layers with low-rank adapters compute what merged weights compute, for each row with its own adapter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire import kernels
from quire.kernels.lora import LINEARS, NO_ADAPTER, AdapterBatch
from quire.kernels.reference import ReferenceLinear, ReferenceOps
from tests.support.kernels.stacks import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    QUERIES,
    make_caches,
    make_factors,
    merged,
    prompts,
    random,
    stack_arguments,
)

REST = HEADS, KV_HEADS, 1e-5, 0.2


def repack(ops, layers, factors=None):
    """Pack layers of the reference for `ops`, with factors added to their weights."""
    packed = []
    for number, layer in enumerate(layers):
        fields = vars(layer).copy()
        for name in LINEARS:
            linear: ReferenceLinear = fields[name]
            weight = linear.weight if factors is None else merged(linear.weight, factors[number].get(name, []))
            pack = ops.pack_gate_up if name == "gate_up" else ops.pack_linear
            fields[name] = pack(weight, linear.bias)
        packed.append(SimpleNamespace(**fields))
    return packed


def adapter_batch(adapters, tokens, rows):
    index = np.array(tokens, dtype=np.int32)
    return AdapterBatch(adapters, index, index[rows.numpy()])


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("names", [LINEARS, ("qkv",), ("gate_up", "down")], ids=str)
def test_each_row_equals_that_of_weights_merged_with_its_adapter(implementation, names):
    torch.manual_seed(1)
    reference = ReferenceOps()
    ops = reference if implementation == "reference" else kernels.select_ops("cpu", torch.float32, "cpu")
    layers, norm, _, cos_sin = stack_arguments(reference, [0, 20], norms=True, biases=True)
    residual, arguments = random(sum(QUERIES), HIDDEN, dtype=torch.float32), prompts()
    rows = torch.tensor([0, 1, 5, 6, 35])
    factors = [make_factors(2, 8, names=names), make_factors(2, 5, torch.bfloat16, names)]
    packed = [ops.pack_adapter(one, INNER) for one in factors]
    # Each sequence has one adapter: its tokens see each other's keys.
    tokens = [1] * QUERIES[0] + [NO_ADAPTER] * QUERIES[1] + [0] * QUERIES[2]
    stack = ops.stack_layers(repack(ops, layers), norm, make_caches(ops, 2), cos_sin, *REST)
    actual = ops.decoder_layers(
        residual.clone(), stack, **arguments, rows=rows, adapters=adapter_batch(packed, tokens, rows)
    )
    for number, one in [(NO_ADAPTER, None), (0, factors[0]), (1, factors[1])]:
        stack = reference.stack_layers(repack(reference, layers, one), norm, make_caches(reference, 2), cos_sin, *REST)
        expected = reference.decoder_layers(residual.clone(), stack, **arguments, rows=rows)
        mine = [at for at, row in enumerate(rows.tolist()) if tokens[row] == number]
        assert mine
        torch.testing.assert_close(actual[mine], expected[mine], rtol=2e-4, atol=2e-4)
