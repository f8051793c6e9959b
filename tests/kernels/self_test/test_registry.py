"""All cases pass with right kernels, and each wrong kernel is noticed and replaced."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.cases import WrongKernel, run_cases
from quire.kernels.self_test.inputs import FULL, QUICK
from quire.kernels.self_test.registry import cases_of
from quire.kernels.uses import KernelUses, LinearUse
from tests.kernels.self_test.conftest import PLAIN
from tests.support.kernels.implementations import HAS_TRITON, LONG_WITHOUT_GPU, TRITON_DTYPES, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_right_kernels_pass_on_the_cpu(ops: kernels.Ops, uses: KernelUses):
    """Every implementation, at every level and in every dtype; those of Triton in the next test."""
    uses = replace(uses, embedding_dtype=ops.dtype)
    report = run_cases(ops, cases_of(ops, uses, QUICK))
    # The Triton kernels have further cases: the pattern `fold`, and new prompts.
    assert report.num_cases == (41 if ops.name == "triton" else 35)
    assert not report.faults


def test_right_kernels_pass_at_the_full_level(cpu_ops: kernels.Ops, uses: KernelUses):
    uses = replace(uses, embedding_dtype=cpu_ops.dtype, max_model_len=4096)
    assert run_cases(cpu_ops, cases_of(cpu_ops, uses, FULL)).faults == []


def test_right_kernels_pass_with_narrow_caches(narrow_ops: kernels.Ops, uses: KernelUses):
    assert (
        run_cases(narrow_ops, cases_of(narrow_ops, replace(uses, embedding_dtype=narrow_ops.dtype), QUICK)).faults == []
    )


@LONG_WITHOUT_GPU
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_right_kernels_of_triton_pass(monkeypatch, uses: KernelUses, dtype, invariant, fp8):
    """CI runs the cases of a model in tests/worker/device/test_self_test.py, where one kernel is wrong."""
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=invariant, kv_dtype=torch.float8_e4m3fn if fp8 else None)
    ops.check_ids = False
    report = run_cases(ops, cases_of(ops, replace(uses, embedding_dtype=dtype), QUICK))
    assert report.num_cases > 40
    assert report.faults == []


def scaled(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a kernel whose results are 3 % too large."""

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        return real(*arguments, **options).mul_(1.03)

    return wrong


def next_token(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a kernel that chooses the token after the right one in one of four rows."""

    def wrong(*arguments: object) -> torch.Tensor:
        found = real(*arguments)
        found[-1] += 1
        return found

    return wrong


def last_row_again(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a kernel that computes the last row like the row before."""

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        found = real(*arguments, **options)
        found[-1] = found[-2]
        return found

    return wrong


def adds_once_more(real: Callable[..., None]) -> Callable[..., None]:
    def wrong(logits: torch.Tensor, *rest: torch.Tensor) -> None:
        real(logits, *rest)
        real(logits, *rest)

    return wrong


def moves_nothing(real: type) -> type:
    return type("Idle", (real,), {"copy": lambda self, src, dst: None})


WRONG: dict[str, Callable] = {
    "embed": last_row_again,
    "rms_norm": scaled,
    "silu_mul": scaled,
    "gelu_mul": scaled,
    "rope_and_cache": last_row_again,
    "grouped_matmul": scaled,
    "moe": scaled,
    "argmax": next_token,
    "sample": next_token,
    "penalise": adds_once_more,
    "best_ids": next_token,
    "logprobs_of": scaled,
    "block_mover": moves_nothing,
}


FP8_LINEARS = (LinearUse(96, 64, "fp8-dynamic", has_bias=True), LinearUse(64, 128, "fp8-dynamic", is_gate_up=True))


@pytest.fixture
def fp8_uses(uses: KernelUses) -> KernelUses:
    """A model with layers whose activations are rounded, and one with scales of groups, whose are not."""
    linears = (*FP8_LINEARS, LinearUse(64, 64, "fp8"))
    return replace(uses, attention=(), experts=(), linears=linears, head=LinearUse(64, 300, "fp8-dynamic"))


@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
@pytest.mark.parametrize("level", [QUICK, FULL])
def test_right_fp8_products_pass(fp8_uses: KernelUses, monkeypatch, dtype, level):
    ops = make_triton_ops(dtype, monkeypatch, fp8_activations=True)
    fp8_uses = replace(fp8_uses, embedding_dtype=dtype)
    cases = [*cases_of(ops, fp8_uses, level)]
    names = [(case.name, case.kernel) for case in cases if case.kernel == "fp8_matmul"]
    assert names == [("product", "fp8_matmul")] * 2 + [("logits", "fp8_matmul")]
    assert run_cases(ops, cases).faults == []


def not_supported(*_: object) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def without_scales_of_rows(x: torch.Tensor, packed: object, *rest: object) -> torch.Tensor:
    """Compute as if each row had the scale of the first."""
    from quire.kernels.gpu.fp8_matmul import fp8_matmul

    factors = x.float().abs().amax(dim=1, keepdim=True)
    return fp8_matmul((x * (factors[0] / factors)).to(x.dtype), packed, *rest)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [scaled, lambda _: not_supported, lambda _: without_scales_of_rows])
def test_wrong_fp8_products_are_replaced_by_those_that_do_not_round(wrong, fp8_uses: KernelUses, monkeypatch, caplog):
    ops = make_triton_ops(torch.float32, monkeypatch, fp8_activations=True)
    ops.kernels = replace(ops.kernels, fp8_matmul=wrong(ops.kernels.fp8_matmul))
    report = run_cases(ops, cases_of(ops, fp8_uses, FULL))
    assert [fault.kernel for fault in report.faults] == ["fp8_matmul"]
    assert ops.can_capture
    (line,) = caplog.messages
    assert line.endswith("torch with activations that are not rounded instead of the kernel fp8_matmul")
    assert run_cases(ops, cases_of(ops, fp8_uses, FULL)).faults == []


def test_every_kernel_of_the_table_is_tested(uses: KernelUses, triton: kernels.Ops):
    from quire.kernels.gpu.kernel_table import GRAPH, REPLACEMENTS

    covered = {case.kernel for case in cases_of(triton, uses, QUICK)}
    covered |= {case.kernel for case in cases_of(triton, replace(uses, gate="gelu_tanh"), QUICK)}
    covered |= {case.kernel for case in cases_of(triton, replace(uses, linears=FP8_LINEARS), QUICK)}
    triton.launch_options = replace(triton.launch_options, hopper_prefill=True)
    covered |= {case.kernel for case in cases_of(triton, uses, QUICK)}
    assert set(REPLACEMENTS) - {GRAPH} <= covered  # the graph has its test in test_devices.py


@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_noticed_and_replaced(kernel: str, uses: KernelUses, triton: kernels.Ops):
    right = getattr(triton.kernels, kernel)
    triton.kernels = replace(triton.kernels, **{kernel: WRONG[kernel](right)})
    check_replaced(triton, uses, kernel)


def check_replaced(triton: kernels.Ops, uses: KernelUses, kernel: str) -> None:
    """Check that the cases of a kernel notice that it is wrong, and pass with the replacement."""
    uses = replace(uses, attention=(PLAIN,), gate="gelu_tanh" if kernel == "gelu_mul" else uses.gate)
    cases = [case for case in cases_of(triton, uses, QUICK) if case.kernel == kernel]
    report = run_cases(triton, cases)
    assert [fault.kernel for fault in report.faults] == [kernel]
    assert triton.replaced == {kernel}
    assert run_cases(triton, cases).faults == []


def one_key_short(real: Callable[..., object]) -> Callable[..., object]:
    """Return a planner whose rows miss their last key."""

    def wrong(seq_lens: torch.Tensor, *rest: object, **options: object) -> object:
        return real((seq_lens - 1).clamp_min(1), *rest, **options)

    return wrong


def wrong_last_query(wanted: int) -> Callable:
    """Return a kernel of prompts, cached ones or new ones, whose last row is that before."""

    def wrapped(real: Callable[..., None]) -> Callable[..., None]:
        def wrong(*arguments: object, **options: object) -> None:
            real(*arguments, **options)
            kind, out = arguments[7], arguments[8]
            if kind == wanted:
                out[-1] = out[-2]

        return wrong

    return wrapped


@pytest.mark.slow
def test_wrong_attention_is_noticed_and_replaced(uses: KernelUses, triton: kernels.Ops, monkeypatch):
    from quire.kernels.gpu import attention
    from quire.kernels.gpu.prefill_plan import CACHED, FRESH

    for kernel, name, wrong in (
        ("decode", "plan_decode", one_key_short),
        ("prefill", "prefill", wrong_last_query(CACHED)),
        ("fresh", "prefill", wrong_last_query(FRESH)),
    ):
        ops = make_triton_ops(torch.float32, monkeypatch)
        ops.check_ids = False
        with monkeypatch.context() as patch:
            patch.setattr(attention, name, wrong(getattr(attention, name)))
            check_replaced(ops, uses, kernel)


def test_the_kernel_for_hopper_is_replaced_by_the_one_for_new_prompts(uses: KernelUses, monkeypatch):
    """Here a stand-in of the kernel writes zeros. tests/kernels/ptx/test_hopper_prefill.py runs the kernel itself."""
    from quire.kernels.gpu import hopper_prefill

    calls = []

    def wrong(*arguments: object) -> None:
        calls.append(arguments)
        arguments[5].zero_()

    monkeypatch.setattr(hopper_prefill, "hopper_prefill", wrong)
    monkeypatch.setattr(hopper_prefill, "supports", lambda *_: True)
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.launch_options = replace(ops.launch_options, hopper_prefill=True)
    ops.check_ids = False
    check_replaced(ops, uses, "hopper")
    assert len(calls) == 1


def test_wrong_kernels_are_refused_in_the_batch_invariant_mode(uses: KernelUses, monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch, batch_invariant=True)
    ops.kernels = replace(ops.kernels, rms_norm=scaled(ops.kernels.rms_norm))
    with pytest.raises(WrongKernel, match=r"norm \(64 features, float32\) is wrong here"):
        run_cases(ops, (case for case in cases_of(ops, uses, QUICK) if case.kernel == "rms_norm"))


def test_a_wrong_product_is_refused(uses: KernelUses, triton: kernels.Ops, monkeypatch):
    """Nothing can replace cuBLAS."""
    from quire.kernels.gpu import linear

    right = torch.nn.functional.linear
    monkeypatch.setattr(linear, "F", SimpleNamespace(linear=lambda *given: right(*given) * 1.01))
    with pytest.raises(WrongKernel, match=r"product \(64 -> 48, float32\) is wrong here"):
        run_cases(triton, (case for case in cases_of(triton, uses, FULL) if case.kernel == "linear"))


def test_equal_implementations_have_equal_digests(uses: KernelUses):
    first, again = (run_cases(kernels.ReferenceOps(), cases_of(kernels.ReferenceOps(), uses, QUICK)) for _ in range(2))
    assert first.digest == again.digest
