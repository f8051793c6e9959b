"""All layers of a step against the reference."""

import pytest
import torch

from quire import kernels
from tests.support.kernels.implementations import TRITON_DTYPES, make_triton_ops
from tests.support.kernels.stacks import (
    BLOCK,
    BLOCKS,
    HEADS,
    HIDDEN,
    INPUT_WIDTH,
    KV_HEADS,
    add_extras,
    alone_and_added_up,
    gemma4_arguments,
    random,
    stack_arguments,
    step,
)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("windows", [[0, 20]], ids=str)
def test_all_layers_of_a_mixed_step_are_those_of_the_reference(monkeypatch, windows, extras):
    """A decode row, a chunk on cached pages and a prompt of its own, with norms and biases.

    extras: with experts, sinks and soft caps, too.
    """
    if torch.float32 not in TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    reference = kernels.ReferenceOps(ops.device)
    lengths, queries, rows = [40, 6, 70], [1, 6, 9], torch.tensor([0, 6, 15])
    positions = [torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)]
    tables = torch.randperm(BLOCKS)[:15].view(3, 5)
    slots = [tables[s, at // BLOCK] * BLOCK + at % BLOCK for s, at in enumerate(positions)]
    step = (
        torch.cat(positions).int(),
        torch.cat(slots),
        tables.int(),
        torch.tensor(lengths).int(),
        torch.tensor([0, *queries]).cumsum(0).int(),
        rows,
    )
    residual = random(sum(queries), HIDDEN, dtype=torch.float32)
    results = []
    for one in (ops, reference):
        torch.manual_seed(3)
        made, final_norm, caches, cos_sin = stack_arguments(one, windows, norms=True, biases=True)
        if extras:
            add_extras(one, made)
        rest = HEADS, KV_HEADS, 1e-5, 0.2, None, 3.0 if extras else 0.0
        stack = one.stack_layers(made, final_norm, caches, cos_sin, *rest)
        results.append((one.decoder_layers(residual.clone(), stack, *step), caches))
    (actual, caches), (expected, wanted) = results
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(caches, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_layers_of_several_shapes_are_those_of_the_reference(monkeypatch, num_shared):
    """A decode row, and a prompt whose keys a later layer reads from the step or from the cache."""
    if torch.float32 not in TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    arguments = step() | {"rows": torch.tensor([0, 5, 35])}
    arguments["layer_inputs"] = random(36, 6, INPUT_WIDTH, dtype=torch.float32) * 4
    residual = random(36, HIDDEN, dtype=torch.float32)
    results = []
    for one in (ops, kernels.ReferenceOps(ops.device)):
        torch.manual_seed(3)
        made, final_norm, caches, cos_sin = gemma4_arguments(one, num_shared)
        stack = one.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
        results.append((one.decoder_layers(residual.clone(), stack, **arguments), caches))
    (actual, caches), (expected, wanted) = results
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(caches, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_all_layers_add_up_over_ranks_in_both_products(gpu_ops):
    alone, added_up = alone_and_added_up(gpu_ops)
    assert torch.equal(added_up, alone)
