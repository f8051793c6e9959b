"""Cases of the self-test: a call of a kernel, the same in float32, and how far both may be apart."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.gpu.triton_support import triton_failure

log = logging.getLogger(__name__)

DIGEST_BYTES = 4
# The relative difference of two neighbouring numbers of a type; of float32 with three products of tf32.
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}

# The mean square of a row counts as at least this part of that of all rows.
SMALL = 1e-4
# The part with which a single value counts: roundings of single values are larger than those of rows.
SINGLE = 0.125


@dataclass(frozen=True)
class KernelCase:
    """A call of one kernel.

    name: of the case, in the log. kernel: by which `ReplaceableKernels` replaces it. shape: of the call, in the log.
    run: calls the kernel. expected: computes the same in float32, or integers. tolerance: the largest `deviation`.
    is_comparable: equal devices give equal bits, so the result is part of the digest. survives_errors: the device works
    on after a RuntimeError of `run`.
    """

    name: str
    kernel: str
    shape: str
    run: Callable[[], Sequence[Tensor]]
    expected: Callable[[], Sequence[Tensor]]
    tolerance: float
    is_comparable: bool = True
    survives_errors: bool = False


class KernelFault(NamedTuple):
    """A kernel that failed a case, and what computes in its place."""

    kernel: str
    replacement: str
    line: str  # for the log


class WrongKernel(RuntimeError):
    """A kernel gives wrong results, and nothing can replace it. The message has case, shape and cause in one line."""


@runtime_checkable
class ReplaceableKernels(Protocol):
    """Operations whose kernels can be replaced one by one."""

    replaceable: tuple[str, ...]  # names, in the same order in all processes
    replaced: frozenset[str]

    def replacement(self, kernel: str) -> str:
        """Return what can replace a kernel; "" if nothing can."""

    def replace_kernel(self, kernel: str) -> None:
        """Compute without this kernel from now on."""


@dataclass
class SelfTestReport:
    """The result of a self-test. digest: of all results, equal on equal devices."""

    num_cases: int = 0
    faults: list[KernelFault] = field(default_factory=list)
    digest: str = ""


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of a result from the expected values.

    Floats [..., N]: for each row, the root mean square of the difference relative to that of the expected values; the
    largest of all rows counts. So a missing key counts, which changes all values of a row a little. A single value
    counts with a part of its own relative difference. NaN is infinitely far. Integers: the share of values that differ.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    if not actual.is_floating_point():
        return (actual != expected).double().mean().item()
    exact = expected.double()
    difference = (actual.double() - exact).view(-1, exact.shape[-1])
    exact = exact.view(difference.shape)
    whole = exact.pow(2).mean()
    sizes = (exact.pow(2).mean(dim=-1, keepdim=True) + SMALL * whole).sqrt() + torch.finfo(torch.float32).tiny
    rows = difference.pow(2).mean(dim=-1, keepdim=True).sqrt() / sizes
    values = SINGLE * difference.abs() / (exact.abs() + sizes)
    worst = torch.maximum(rows, values).max().item()
    return worst if worst == worst else float("inf")


def run_cases(ops: object, cases: Iterable[KernelCase]) -> SelfTestReport:
    """Run cases in order, and replace each kernel that fails one. Later cases run with the replacement.

    Raises WrongKernel if nothing can replace a kernel, or if its replacement fails the case too.
    """
    report, digest = SelfTestReport(), hashlib.blake2b(digest_size=DIGEST_BYTES)
    with torch.inference_mode():
        for case in cases:
            report.num_cases += 1
            results, why = _examine(case)
            if why:
                results = _replace(ops, case, why, report)
            if case.is_comparable:
                for tensor in results:
                    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    report.digest = digest.hexdigest()
    return report


def _examine(case: KernelCase) -> tuple[Sequence[Tensor], str]:
    """Run a case. Returns its results, and why it failed; "" if it has passed."""
    try:
        results = case.run()
        worst = max(deviation(result, exact) for result, exact in zip(results, case.expected(), strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if failure := triton_failure(error):
            return (), str(failure)
        if isinstance(error, RuntimeError):  # such as one of the CUDA driver, after which all calls fail
            said = " ".join(str(error).split())[:200]
            if case.survives_errors:
                return (), f"it fails ({said})"
            raise WrongKernel(f"{case.name} ({case.shape}) failed: {said}") from error
        raise
    if worst <= case.tolerance:
        return results, ""
    allowed = f"at most {case.tolerance:.2g} is right" if case.tolerance else "none may"
    if results[0].is_floating_point():
        return results, f"it deviates by {worst:.2g} from float32, and {allowed}"
    return results, f"{worst:.0%} of its values differ from torch's, and {allowed}"


def _replace(ops: object, case: KernelCase, why: str, report: SelfTestReport) -> Sequence[Tensor]:
    """Replace the kernel of a failed case, and run the case again. Returns its results. Raises WrongKernel."""
    what = f"{case.name} ({case.shape}) is wrong here: {why}"
    how = ops.replacement(case.kernel) if isinstance(ops, ReplaceableKernels) else ""
    if not how:
        raise WrongKernel(what)
    assert isinstance(ops, ReplaceableKernels)
    ops.replace_kernel(case.kernel)
    results, still = _examine(case)
    if still:
        raise WrongKernel(f"{what}; and {how} instead: {still}")
    line = f"{what}; {how} instead of the kernel {case.kernel}"
    log.error("self-test: %s", line)
    report.faults.append(KernelFault(case.kernel, how, line))
    return results


def replaced_mask(ops: object) -> int:
    """Return the kernels of operations that are replaced, as bits: bit i stands for the name i of `replaceable`."""
    if not isinstance(ops, ReplaceableKernels):
        return 0
    return sum(1 << number for number, kernel in enumerate(ops.replaceable) if kernel in ops.replaced)


def replace_kernels(ops: object, mask: int) -> list[tuple[str, str]]:
    """Replace the kernels of a `replaced_mask`. Returns those that were not replaced before, and their replacements."""
    if not isinstance(ops, ReplaceableKernels):
        return []
    missing = [kernel for number, kernel in enumerate(ops.replaceable) if mask >> number & 1]
    missing = [kernel for kernel in missing if kernel not in ops.replaced]
    for kernel in missing:
        ops.replace_kernel(kernel)
    return [(kernel, ops.replacement(kernel)) for kernel in missing]
