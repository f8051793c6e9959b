"""All layers of a step against the reference."""

from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.worker.models.native.decoder import Decoder
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels.implementations import LONG_WITHOUT_GPU, TRITON_DTYPES, make_triton_ops
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
from tests.worker.models.test_decoder import Stepper


@pytest.mark.slow
@pytest.mark.parametrize("extras", [True, False])
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


@LONG_WITHOUT_GPU
@pytest.mark.parametrize("num_shared", [2, 0])
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


@LONG_WITHOUT_GPU
def test_a_gemma_4_with_heads_of_512_deviates_from_float32_at_most_twice_as_far_as_in_torch(
    monkeypatch, tmp_path: Path
):
    if torch.bfloat16 not in TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    torch.set_default_device(None)
    path = make_checkpoint(tmp_path, "gemma4", global_head_dim=512)
    prompts = [torch.arange(3, 3 + length, dtype=torch.int32) for length in (1, 20)]

    def logits(one: kernels.Ops) -> torch.Tensor:
        model = Decoder.load(path, one, one.dtype, one.device)
        return torch.cat(Stepper(model, prompts).run([{s: len(prompt)} for s, prompt in enumerate(prompts)])).cpu()

    # In bfloat16 the layers of random weights magnify each rounding, in torch as well.
    exact, plain = (logits(kernels.ReferenceOps(ops.device, dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert (logits(ops) - exact).norm() < 2 * (plain - exact).norm() < 0.2 * exact.norm()


@pytest.mark.slow
def test_all_layers_add_up_over_ranks_in_both_products(gpu_ops):
    gpu_ops.replace_kernel("few_rows")  # layers of several ranks go through single operations
    alone, added_up = alone_and_added_up(gpu_ops)
    assert torch.equal(added_up, alone)
