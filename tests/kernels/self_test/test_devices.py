"""A graph that keeps values of its recording, and ranks that do not add up, are noticed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.cases import deviation, run_cases
from quire.kernels.self_test.devices import all_reduce_case, graph_case
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.self_test.registry import cases_of
from quire.worker.device.graphs import record_on_cuda
from tests.kernels.self_test.conftest import PLAIN
from tests.support.kernels.implementations import ON_CUDA


class Ranks:
    """Two ranks, of which the other has the values of rank 1."""

    rank, size = 0, 2

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values.mul_(self.factor)


@pytest.mark.parametrize(("factor", "is_right"), [(3, True), (2, False)])
def test_sums_over_ranks_are_exact(factor, is_right):
    case = all_reduce_case(CaseInputs(kernels.ReferenceOps("cpu", torch.bfloat16), QUICK), 64, Ranks(factor))
    worst = max(map(deviation, case.run(), case.expected()))
    assert (worst == 0) == is_right
    assert (worst <= case.tolerance) == is_right


def test_the_registry_has_graphs_and_ranks_if_the_model_has_some(uses):
    ops = kernels.ReferenceOps()
    plain = [case.kernel for case in cases_of(ops, uses, QUICK)]
    whole = [case.kernel for case in cases_of(ops, uses, QUICK, lambda launch, pool: None, Ranks(3))]
    assert whole == [*plain, "graph", "all_reduce"]


def recorder():
    if ON_CUDA:
        return record_on_cuda
    from tests.support.kernels.recording import record

    return record


def stale(launch, pool):
    """Record a graph whose replay does nothing, so that the step that was recorded remains."""
    return SimpleNamespace(replay=lambda: None), pool


def failing(launch, pool):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("wrong", [None, stale, failing])
def test_a_graph_is_replayed_with_other_sequences_than_were_recorded(uses, triton, wrong):
    case = graph_case(CaseInputs(triton, QUICK), replace(uses, attention=(PLAIN,)), wrong or recorder())
    report = run_cases(triton, [case])
    assert [fault.kernel for fault in report.faults] == (["graph"] if wrong else [])
    assert triton.can_capture == (wrong is None)


def test_no_graph_is_recorded_after_a_kernel_was_replaced_that_graphs_need(uses, triton):
    triton.replace_kernel("decode")
    assert (
        run_cases(triton, [graph_case(CaseInputs(triton, QUICK), replace(uses, attention=(PLAIN,)), failing)]).faults
        == []
    )
