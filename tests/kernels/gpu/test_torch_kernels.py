"""Kernels of torch give the results of the kernels of Triton that they replace."""

from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.grouped_weight import KINDS
from quire.kernels.moe import CLAMPED, Routing
from tests.kernels.test_grouped_weight import random_weight
from tests.kernels.test_moe import HIDDEN, make_moe
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops
from tests.support.kernels.paged import Paged
from tests.support.kernels.stacks import make_cache_stack, make_stack

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture
def replaced(monkeypatch) -> "kernels.Ops":
    """The operations with torch in place of every kernel that has a function."""
    from quire.kernels.gpu.kernel_table import ATTENTION, GRAPH, REPLACEMENTS

    ops = make_triton_ops(torch.float32, monkeypatch)
    for kernel in REPLACEMENTS.keys() - {*ATTENTION, GRAPH}:
        ops.replace_kernel(kernel)
    return ops


def test_rows_are_alike(ops, replaced):
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    table, ids = torch.randn(9, 48), torch.tensor([0, 8, 3])
    torch.testing.assert_close(replaced.embed(ids, table), ops.embed(ids, table))
    torch.testing.assert_close(replaced.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
    sums = residual.clone(), residual.clone()
    torch.testing.assert_close(
        replaced.add_rms_norm(x, sums[0], weight, 1e-5), ops.add_rms_norm(x, sums[1], weight, 1e-5)
    )
    torch.testing.assert_close(*sums)
    for name in ("linear_silu_mul", "linear_gelu_mul"):
        packed = ops.pack_gate_up(torch.randn(26, 48))
        torch.testing.assert_close(getattr(replaced, name)(x, packed), getattr(ops, name)(x, packed))


@pytest.mark.parametrize("has_v_norm", [False, True], ids=["", "values"])
@pytest.mark.parametrize("keep_k", [False, True])
def test_rotations_and_caches_are_alike(ops, replaced, keep_k, has_v_norm):
    found = []
    for one in (ops, replaced):
        torch.manual_seed(1)
        qkv, caches = torch.randn(6, (4 + 2 * 2) * 32), one.alloc_kv_cache(3, 2, 16, 32)
        at, slots = torch.tensor([0, 1, 2, 30, 31, 7]).int(), torch.tensor([16, 17, 18, 46, 47, -1])
        norms = torch.randn(32), torch.randn(32)
        v_norm = torch.randn(32) if has_v_norm else None
        rest = slots, *caches, 4, 2, *norms, 1e-5, keep_k, v_norm
        q = one.kernels.rope_and_cache(qkv, at, torch.rand(40, 32), *rest)
        found.append([q, qkv, *caches])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["", "act-order"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_codes_are_alike(ops, replaced, kind, is_ordered):
    weight = random_weight(kind, 34, 77)
    if is_ordered:
        weight = replace(weight, order=torch.randperm(77, device="cpu").int())
    packed, x = ops.pack_linear(weight, torch.randn(34)), torch.randn(3, 77)
    torch.testing.assert_close(replaced.linear(x, packed), ops.linear(x, packed), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(replaced.linear_logits(x, packed), ops.linear_logits(x, packed), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("routing", [Routing(4, 2, True), Routing(3, 1, False, CLAMPED)], ids=str)
def test_experts_are_alike(ops, replaced, routing):
    packed, x = make_moe(ops, routing), torch.randn(9, HIDDEN)
    torch.testing.assert_close(replaced.moe(x, packed), ops.moe(x, packed))


def test_tokens_and_their_probabilities_are_alike(ops, replaced):
    logits, rows = torch.randn(4, 300) * 3, 4
    drawn = (
        torch.full((rows,), 0.8), torch.tensor([0, 5, 0, 40]).int(), torch.tensor([1, 1, 0.7, 0.9]),
        torch.tensor([0, 0, 0, 0.05]), torch.tensor([0.1, 0.5, 0.3, 0.9], dtype=torch.float64),
    )  # fmt: skip
    assert torch.equal(replaced.sample(logits, *drawn), ops.sample(logits, *drawn))
    assert torch.equal(replaced.argmax(logits), ops.argmax(logits))
    for actual, expected in zip(replaced.top_logprobs(logits, 7), ops.top_logprobs(logits, 7), strict=True):
        torch.testing.assert_close(actual, expected)
    seen = (
        torch.tensor([0, 2, 2, 3, 5]).int(), torch.tensor([3, 7, 299, 0, 1]).int(), torch.tensor([1, 0, 2, 1, 1]).int(),
        *(torch.full((rows,), value) for value in (1.3, 0.5, 0.25)),
    )  # fmt: skip
    penalised = logits.clone(), logits.clone()
    replaced.penalise(penalised[0], *seen)
    ops.penalise(penalised[1], *seen)
    torch.testing.assert_close(*penalised)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_blocks_move_alike(monkeypatch, fp8):
    found = []
    for is_replaced in (False, True):
        ops = make_triton_ops(torch.float32, monkeypatch, kv_dtype=torch.float8_e4m3fn if fp8 else None)
        if is_replaced:
            ops.replace_kernel("block_mover")
        stack, caches = make_cache_stack(ops, 2)
        host = ops.alloc_host_blocks(stack, 3)
        host.view(torch.uint8).fill_(7)
        ids = [torch.tensor(one, device="cpu") for one in ([3, 4], [0, 1], [2, 0], [9, 11])]
        ops.copy_blocks(stack, ids[0], ids[1])
        ops.swap_out(stack, host, ids[1], ids[2])
        ops.swap_in(stack, host, ids[2], ids[3])
        found.append([cache.view(torch.uint8) for cache in (*(cache for pair in caches for cache in pair), host)])
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.skipif(ON_CUDA, reason="launches of the interpreter are refused")
def test_no_kernel_of_triton_is_launched_when_all_are_replaced(replaced, monkeypatch):
    """Tests would otherwise compare the kernels of Triton with themselves."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", None)
    for kernel in ("decode", "prefill"):
        replaced.replace_kernel(kernel)
    stack, _ = make_stack(replaced, [0])
    from tests.support.kernels.stacks import QUERIES, step

    out = replaced.decoder_layers(torch.randn(sum(QUERIES), 72), stack, **step(), rows=torch.tensor([0, 5]))
    assert out.isfinite().all()
    assert not Paged(replaced, [3], [1], 2, 2, 32).attend()[0].isnan().any()
    assert replaced.argmax(torch.eye(3)).tolist() == [0, 1, 2]
