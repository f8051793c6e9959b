"""The deviation of a result, and the consequences of a failed case."""

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.cases import (
    KernelCase,
    WrongKernel,
    deviation,
    replace_kernels,
    replaced_mask,
    run_cases,
)

EXACT = torch.linspace(-2, 3, 40).view(2, 20)


class Replaceable:
    """Operations of one kernel, `good` after it was replaced."""

    replaceable = ("other", "double", "third")

    def __init__(self, is_wrong: bool = True, replacement: str = "torch") -> None:
        self.replaced = frozenset()
        self.is_wrong, self.how = is_wrong, replacement

    def replacement(self, kernel: str) -> str:
        return self.how

    def replace_kernel(self, kernel: str) -> None:
        self.replaced |= {kernel}

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.1 if self.is_wrong and "double" not in self.replaced else 2)


def case(ops: Replaceable, **fields: object) -> KernelCase:
    whole = {
        "name": "doubling",
        "kernel": "double",
        "shape": "2 x 20",
        "run": lambda: [ops.double(EXACT)],
        "expected": lambda: [EXACT * 2],
        "tolerance": 1e-3,
    }
    return KernelCase(**(whole | fields))


def test_equal_values_do_not_deviate():
    assert deviation(EXACT, EXACT) == 0
    assert deviation(EXACT.bfloat16(), EXACT) < 2**-8
    assert deviation(torch.zeros(3, 0), torch.zeros(3, 0)) == 0
    assert deviation(torch.zeros(4), torch.zeros(4)) == 0


def test_a_small_difference_of_a_whole_row_counts_fully():
    found = EXACT.clone()
    found[1] *= 1.01
    assert deviation(found, EXACT) == pytest.approx(0.01, rel=1e-3)


def test_a_single_wrong_value_counts_too():
    wide = torch.ones(1, 10_000)
    found = wide.clone()
    found[0, 77] = 3.0
    assert deviation(found, wide) == pytest.approx(0.125, rel=1e-2)


def test_a_row_that_is_nearly_zero_does_not_count_relative_to_itself():
    exact = torch.cat([EXACT, torch.full((1, 20), 1e-9)])
    assert deviation(exact + 1e-6, exact) < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_infinitely_far(value):
    found = EXACT.clone()
    found[0, 3] = value
    assert deviation(found, EXACT) == float("inf")


def test_of_integers_the_share_that_differs_counts():
    assert deviation(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25


def test_another_shape_is_infinitely_far():
    assert deviation(EXACT[:1], EXACT) == float("inf")


def test_a_right_kernel_is_kept():
    ops = Replaceable(is_wrong=False)
    report = run_cases(ops, [case(ops), case(ops, expected=lambda: [EXACT.double() * 2])])
    assert (report.num_cases, report.faults, ops.replaced) == (2, [], frozenset())


def test_a_wrong_kernel_is_replaced_and_the_line_names_kernel_shape_and_deviation(caplog):
    ops = Replaceable()
    report = run_cases(ops, [case(ops), case(ops)])
    assert ops.replaced == {"double"}
    assert [(fault.kernel, fault.replacement) for fault in report.faults] == [("double", "torch")]
    expected = (
        "self-test: doubling (2 x 20) is wrong here: it deviates by 0.05 from float32, and at most 0.001 is right; "
        "torch instead of the kernel double"
    )
    assert caplog.messages == [expected]


def test_a_wrong_kernel_without_replacement_is_refused():
    ops = Replaceable(replacement="")
    with pytest.raises(WrongKernel, match=r"doubling \(2 x 20\) is wrong here: it deviates by 0.05"):
        run_cases(ops, [case(ops)])
    with pytest.raises(WrongKernel, match="100% of its values differ from torch's, and none may"):
        run_cases(
            object(),
            [case(ops, run=lambda: [torch.ones(3).int()], expected=lambda: [torch.zeros(3).int()], tolerance=0.0)],
        )


def test_a_replacement_that_is_wrong_too_is_refused():
    ops = Replaceable()
    with pytest.raises(WrongKernel, match=r"and torch instead: it deviates by 0\.33"):
        run_cases(ops, [case(ops, expected=lambda: [EXACT * 3])])


def test_a_kernel_that_cannot_be_compiled_is_replaced(monkeypatch):
    """An error of Triton leaves the device as it was."""

    def failing() -> list[torch.Tensor]:
        if "double" in ops.replaced:
            return [EXACT * 2]
        raise OutOfShared("out of resource: shared memory")

    class OutOfShared(Exception):
        __module__ = "triton.runtime.errors"

    ops = Replaceable()
    report = run_cases(ops, [case(ops, run=failing)])
    assert "OutOfShared: out of resource: shared memory" in report.faults[0].line
    assert "\n" not in report.faults[0].line


def test_an_error_of_the_device_is_refused_because_all_later_calls_fail():
    def failing() -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    with pytest.raises(
        WrongKernel, match=r"doubling \(2 x 20\) failed: CUDA error: an illegal memory access"
    ) as refused:
        run_cases(Replaceable(), [case(Replaceable(), run=failing)])
    assert "\n" not in str(refused.value)


def test_other_errors_and_a_lack_of_memory_are_passed_on():
    for error in (torch.OutOfMemoryError("no memory"), ValueError("a defect")):

        def failing(error: Exception = error) -> list[torch.Tensor]:
            raise error

        with pytest.raises(type(error)):
            run_cases(Replaceable(), [case(Replaceable(), run=failing)])


def test_the_digest_tells_results_apart():
    ops = Replaceable(is_wrong=False)
    first, again = (run_cases(ops, [case(ops)]).digest for _ in range(2))
    assert first == again
    assert len(first) == 8
    nearly = case(ops, run=lambda: [EXACT * (2 + 1e-6)])
    assert run_cases(ops, [nearly]).digest != first
    assert run_cases(ops, [case(ops, is_comparable=False)]).digest != first


def test_replaced_kernels_of_another_rank_are_bits():
    one, other = Replaceable(), Replaceable()
    one.replace_kernel("double")
    other.replace_kernel("third")
    assert (replaced_mask(one), replaced_mask(other)) == (0b010, 0b100)
    assert replace_kernels(one, 0b110) == [("third", "torch")]
    assert one.replaced == {"double", "third"}
    assert replace_kernels(one, 0b110) == []


def test_operations_whose_kernels_cannot_be_replaced_have_no_bits():
    assert replaced_mask(kernels.ReferenceOps()) == 0
    assert replace_kernels(kernels.ReferenceOps(), 0) == []
