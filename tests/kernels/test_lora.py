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
    make_ends,
    make_factors,
    make_norms,
    merged,
    prompts,
    random,
    stack_arguments,
    with_gains,
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
            fields[name] = pack(weight.to(ops.dtype), linear.bias.to(ops.dtype))
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


def available(implementation, dtype):
    """Return operations on CPUs, or skip if this machine lacks them."""
    try:
        return ReferenceOps(dtype=dtype) if implementation == "reference" else kernels.select_ops("cpu", dtype, "cpu")
    except kernels.KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gains_and_norms_of_adapters_are_those_of_the_definition(dtype):
    torch.manual_seed(2)
    reference, ops = ReferenceOps(), available("cpu", dtype)
    layers, norm, _, cos_sin = stack_arguments(reference, [0, 20], norms=True, biases=True)
    residual, arguments = random(sum(QUERIES), HIDDEN, dtype=torch.float32), prompts()
    factors = [with_gains(make_factors(2, 8)), with_gains(make_factors(2, 5, torch.bfloat16)), [{}, {}]]
    norms = [make_norms(2, torch.float32), (), make_norms(2, torch.float32)]
    tokens = [1] * QUERIES[0] + [NO_ADAPTER] * 2 + [2] * 3 + [0] * QUERIES[2]
    rows = torch.tensor([0, 1, 4, 5, 6, 35])
    outputs = []
    for one in (reference, ops):
        packed = [one.pack_adapter(of, INNER, cast(own, one.dtype)) for of, own in zip(factors, norms, strict=True)]
        stack = one.stack_layers(
            cast_norms(repack(one, layers), one.dtype), norm.to(one.dtype), make_caches(one, 2), cos_sin, *REST
        )
        batch = adapter_batch(packed, tokens, rows)
        outputs.append(
            one.decoder_layers(residual.to(one.dtype, copy=True), stack, **arguments, rows=rows, adapters=batch).float()
        )
        plain = one.decoder_layers(residual.to(one.dtype, copy=True), stack, **arguments, rows=rows).float()
        changed = (outputs[-1] - plain).abs().amax(dim=1) > 0.1
        assert changed.tolist() == [tokens[row] != NO_ADAPTER for row in rows.tolist()]
    near = 2e-4 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(outputs[1], outputs[0], rtol=near, atol=near * float(outputs[0].abs().max()))


def cast(norms, dtype):
    return [{name: weight.to(dtype) for name, weight in layer.items()} for layer in norms]


def cast_norms(layers, dtype):
    for layer in layers:
        for name, value in vars(layer).items():
            if name.endswith("_norm") and value is not None:
                setattr(layer, name, value.to(dtype))
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_and_logits_are_those_of_the_definition_in_any_batch(dtype):
    torch.manual_seed(3)
    vocabulary, index = 83, [0, NO_ADAPTER, 1, 1, 0, 2, 0, 0, 0, 1]
    reference, ops = ReferenceOps(), available("cpu", dtype)
    ends = [make_ends(8, vocabulary), make_ends(5, vocabulary, torch.bfloat16)]
    ids = torch.randint(vocabulary, (len(index),), dtype=torch.int32)
    hidden, embeddings = random(len(index), HIDDEN, dtype=dtype), random(len(index), HIDDEN, dtype=dtype)
    logits = torch.randn(len(index), vocabulary)

    def compute(one, rows):
        layers = [[{}, end] for end in ends]
        packed = [one.pack_adapter(layer, INNER) for layer in [*layers, [{}]]]
        found = embeddings[rows].to(one.dtype), logits[rows].clone()
        batch = adapter_batch(packed, [index[row] for row in rows], torch.arange(len(rows)))
        one.adapt_embeddings(found[0], ids[rows], batch)
        one.adapt_logits(found[1], hidden[rows].to(one.dtype), batch)
        return found

    together, expected = compute(ops, list(range(len(index)))), compute(reference, list(range(len(index))))
    for found, exact, start in zip(together, expected, (embeddings, logits), strict=True):
        near = 1e-5 if found.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found.float(), exact, rtol=near, atol=near)
        assert (found != start).any(dim=1).tolist() == [0 <= number < 2 for number in index]
    for row in (0, 2, 3, 6):
        alone = compute(ops, [row])
        assert all(torch.equal(one[0], of[row]) for one, of in zip(alone, together, strict=True))
