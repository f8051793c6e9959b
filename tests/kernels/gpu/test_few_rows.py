"""The kernels for steps of a few rows, against single operations and float64."""

from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.moe import GELU
from tests.support.kernels.implementations import ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.support.kernels.stacks import BLOCK, BLOCKS, HEADS, HIDDEN, KV_HEADS, random, stack_arguments

if TRITON_DTYPES:
    from quire.kernels.gpu.few_rows import layers, products

pytestmark = pytest.mark.skipif(not TRITON_DTYPES, reason="Triton is not installed, or does not interpret kernels")


def make_ops(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    """Make kernels that are launched dependently, also in the interpreter."""
    ops = make_triton_ops(dtype, monkeypatch)
    if not ON_CUDA:
        ops.launch_options = replace(ops.launch_options, dependent_launch=True)
    return ops


def decode_step(count: int) -> tuple[torch.Tensor, ...]:
    """Return positions, slots, tables, lengths, starts and rows of a step that decodes `count` sequences."""
    lengths = torch.tensor([40, 17, 75, 1, 16, 33, 20, 15][:count])
    needed = [-(-length // BLOCK) for length in lengths.tolist()]
    tables = torch.zeros(count, max(needed), dtype=torch.int64)
    for s, blocks in enumerate(torch.randperm(BLOCKS)[: sum(needed)].split(needed)):
        tables[s, : len(blocks)] = blocks
    at = lengths - 1
    slots = tables[torch.arange(count), at // BLOCK] * BLOCK + at % BLOCK
    return at.int(), slots, tables.int(), lengths.int(), torch.arange(count + 1).int(), torch.arange(count)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("parts", ["plain", "norms, biases, gelu, window"])
def test_all_layers_are_those_of_the_reference(monkeypatch, count: int, parts: str):
    ops, has_parts = make_ops(torch.float32, monkeypatch), parts != "plain"
    step, residual = decode_step(count), random(count, HIDDEN, dtype=torch.float32)
    calls: list[int] = []
    run = layers.run_few_rows
    monkeypatch.setattr("quire.kernels.gpu.ops.run_few_rows", lambda *given: (calls.append(1), run(*given))[1])
    results = []
    for one in (ops, kernels.ReferenceOps(ops.device)):
        torch.manual_seed(3)
        windows = [20, 0] if has_parts else [0]
        made, final_norm, caches, cos_sin = stack_arguments(one, windows, norms=has_parts, biases=has_parts)
        for layer in made if has_parts else ():
            layer.gate = GELU
        stack = one.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
        results.append((one.decoder_layers(residual.clone(), stack, *step), caches))
    (actual, caches), (expected, wanted) = results
    assert calls, "the step went through single operations"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(caches, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 64), (1, 40, 1500), (1, 20, 2100), (5, 100, 200), (16, 33, 72)])
@pytest.mark.parametrize("gate", [products.PLAIN, products.SILU_MUL, products.GELU_MUL] if TRITON_DTYPES else [])
def test_products_round_where_single_operations_round(monkeypatch, dtype, rows: int, n: int, k: int, gate: int):
    """One bit of the activations is the most that another order of sums may change."""
    ops = make_ops(dtype, monkeypatch)
    halves = 1 if gate == products.PLAIN else 2
    x, norm = random(rows, k, dtype=dtype) * 9, random(k, dtype=dtype) + 1
    residual = random(rows, n, dtype=dtype) if gate == products.PLAIN else None
    weight, bias = random(halves * n, k, dtype=dtype), random(halves * n, dtype=dtype)
    pack = ops.pack_linear if gate == products.PLAIN else ops.pack_gate_up
    packed, normed = pack(weight, bias), ops.rms_norm(x, norm, 1e-6)
    single = {
        products.PLAIN: ops.linear,
        products.SILU_MUL: ops.linear_silu_mul,
        products.GELU_MUL: ops.linear_gelu_mul,
    }[gate]
    expected = single(normed, packed)
    if residual is not None:
        expected = (expected.float() + residual.float()).to(dtype)
    found = products.product(x, weight, bias, 3, ops.launch_options.dependent_launch, norm, 1e-6, gate, residual)
    unit = torch.finfo(dtype).eps
    if dtype == torch.float32:  # sums in another order differ by more than the last bit
        torch.testing.assert_close(found, expected, rtol=20 * unit, atol=20 * unit * float(expected.abs().max()))
    else:
        torch.testing.assert_close(found.float(), expected.float(), rtol=2 * unit, atol=4 * unit)
        assert (found == expected).float().mean() > 0.8


def test_a_kernel_that_reads_a_result_before_its_wait_is_noticed(monkeypatch):
    if ON_CUDA:
        pytest.skip("a card does not record accesses")
    from quire.kernels.gpu.few_rows import dependent_launch

    make_ops(torch.float32, monkeypatch)
    x, weight = random(1, 64, dtype=torch.float32), random(16 * 64, 64, dtype=torch.float32)
    result = products.product(x, weight, None, 3, pdl=True)
    copy = result.view(16, 64).clone()  # now: later it could get memory that a refused kernel has freed
    with pytest.raises(AssertionError, match="one_row_kernel: a program reads a result before it waits for it"):
        products.product(x, result.view(16, 64), None, 3, pdl=True)
    products.product(x, copy, None, 3, pdl=True)
    monkeypatch.setattr(dependent_launch, "gdc_wait", lambda: None)
    with pytest.raises(AssertionError, match="before"):
        products.product(x, weight, None, 3, pdl=True)
