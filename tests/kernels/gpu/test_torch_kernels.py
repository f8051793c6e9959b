"""Kernels of torch give the results of the kernels of Triton that they replace."""

import pytest
import torch

from quire import kernels
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops
from tests.support.kernels.oracle import assert_close
from tests.support.kernels.paged import Paged
from tests.support.kernels.stacks import make_stack

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture
def replaced(monkeypatch) -> "kernels.Ops":
    """The operations with torch in place of every kernel that has a function."""
    from quire.kernels.gpu.kernel_table import ATTENTION, GRAPH, REPLACEMENTS

    ops = make_triton_ops(torch.float32, monkeypatch)
    for kernel in REPLACEMENTS.keys() - {*ATTENTION, GRAPH}:
        ops.replace_kernel(kernel)
    return ops


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


@pytest.mark.parametrize("window", [0, 20])
def test_long_prompts_with_images_are_computed_in_parts(replaced, window, monkeypatch):
    from quire.kernels.gpu import torch_attention

    monkeypatch.setattr(torch_attention, "MOST_SCORES", 13 * 90 * 2)
    for kernel in ("decode", "prefill"):
        replaced.replace_kernel(kernel)
    paged = Paged(replaced, [90, 7], [80, 1], 2, 1, 32, window=window, images={0: [(14, 40), (41, 43), (77, 90)]})
    for s, rows in enumerate(paged.attend()):
        assert_close(rows, paged.exact(s))


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
