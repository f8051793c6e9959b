"""Every implementation has the operations of the contract, with the same arguments."""

import inspect

import pytest
import torch

from quire import kernels
from tests.support.kernels.implementations import HAS_TRITON

OPERATIONS = [name for name, member in vars(kernels.Ops).items() if inspect.isfunction(member) and name[0] != "_"]


def implementation_types() -> list[type]:
    found: list[type] = [kernels.ReferenceOps, kernels.CpuOps]
    if HAS_TRITON:
        from quire.kernels.gpu.ops import TritonOps

        found.append(TritonOps)
    return found


def test_implementations_meet_the_contract():
    assert isinstance(kernels.ReferenceOps(), kernels.Ops)
    assert isinstance(kernels.select_ops("cpu", torch.float32), kernels.Ops)


@pytest.mark.parametrize("kind", implementation_types(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_the_arguments_of_the_contract(kind, operation):
    expected, found = (inspect.signature(getattr(one, operation)).parameters for one in (kernels.Ops, kind))
    assert [(one.name, one.default) for one in found.values()] == [(one.name, one.default) for one in expected.values()]
