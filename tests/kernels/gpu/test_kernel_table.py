"""Which kernels can be replaced, and by what."""

from dataclasses import fields

import pytest
import torch

from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_every_kernel_of_the_table_has_a_replacement(ops):
    from quire.kernels.gpu.kernel_table import ATTENTION, GRAPH, REPLACEMENTS, KernelTable

    names = {field.name for field in fields(KernelTable)}
    assert names | {*ATTENTION, GRAPH} == set(REPLACEMENTS)
    for name in names:
        function = getattr(KernelTable().with_torch(name), name)
        assert function.__module__ in (
            "quire.kernels.gpu.torch_kernels",
            "quire.kernels.reference",
            "quire.kernels.lora",
        )
        assert sum(getattr(KernelTable().with_torch(name), one) != getattr(KernelTable(), one) for one in names) == 1


def test_graphs_are_captured_unless_a_replacement_reads_values_on_the_host(ops):
    assert ops.can_capture
    for kernel in ("rms_norm", "sample", "fresh"):
        ops.replace_kernel(kernel)
    assert ops.can_capture
    assert ops.replaced == {"rms_norm", "sample", "fresh"}
    ops.replace_kernel("prefill")
    assert not ops.can_capture


def test_the_batch_invariant_mode_replaces_nothing(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch, batch_invariant=True)
    assert ops.replacement("rms_norm") == ""
    with pytest.raises(AssertionError, match="nothing can replace the kernel rms_norm"):
        ops.replace_kernel("rms_norm")
