"""The cases of the self-test: their inputs, their uses, and what they notice."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from quire import kernels
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.moe import GELU, Routing
from quire.kernels.self_test.attention import MIXED, TOLERANCE, AttentionInputs, attention_cases
from quire.kernels.self_test.cases import (
    UNITS,
    KernelCase,
    WrongKernel,
    deviation,
    replace_kernels,
    replaced_mask,
    run_cases,
)
from quire.kernels.self_test.devices import all_reduce_case, graph_case
from quire.kernels.self_test.inputs import FULL, QUICK, CaseInputs
from quire.kernels.self_test.layers import block_cases, layer_cases
from quire.kernels.self_test.logits import PARAMETERS, draws, kept_mass, logits_cases
from quire.kernels.self_test.products import chosen, experts_cases, linear_cases, logits_case
from quire.kernels.self_test.registry import cases_of
from quire.kernels.self_test.rows import rotation_cases
from quire.kernels.uses import ExpertsUse, LinearUse
from quire.worker.device.cuda.graphs import record_on_cuda
from tests.kernels.self_test.conftest import ODD, PLAIN
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops
from tests.support.kernels.oracle import kept

# --- the deviation of a result, and the consequences of a failed case -------------------------------------------------

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


# --- random inputs are the same in every process, and weights have the values that they are compared with -------------


@pytest.mark.parametrize("kind", ["", "bfloat16", "float16", "int8", "int4", "uint4", "mxfp4", "fp8"])
def test_weights_of_each_kind_have_their_values(kind):
    ops = kernels.ReferenceOps()
    inputs = CaseInputs(ops, QUICK)
    weight, exact = inputs.weight(6, 70, kind, inputs.generator())
    assert exact.dtype is torch.float32
    assert 0.3 < exact.pow(2).mean().sqrt() * 70**0.5 < 3
    if isinstance(weight, torch.Tensor):
        assert torch.equal(weight.float(), exact)
        return
    if isinstance(weight, GroupedWeight):
        x = torch.randn(2, 70)
        torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), F.linear(x, exact))
    else:
        assert torch.equal(weight.dequantized(), exact)


# --- packed weights of every implementation say what they are ---------------------------------------------------------


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("kind", ["", "bfloat16", "int8", "int4", "uint4", "mxfp4", "fp8"])
def test_a_linear_layer_is_described(implementation, kind, monkeypatch):
    if implementation == "triton":
        if not HAS_TRITON:
            pytest.skip("Triton is not installed")
        ops = make_triton_ops(torch.float32, monkeypatch)
    else:
        ops = kernels.select_ops("cpu", torch.float32, implementation)
    inputs = CaseInputs(ops, QUICK)
    if (kind in ("int8", "int4") and not ops.quantized_bits) or (kind == "bfloat16" and len(ops.weight_dtypes) == 1):
        pytest.skip(f"the {implementation} kernels have no {kind} weights")
    weight, _ = inputs.weight(8, 64, kind, inputs.generator())
    found = LinearUse.of(ops.pack_linear(weight, torch.zeros(8)))
    # Plain torch keeps dequantised weights instead of codes.
    kept = "" if implementation == "reference" and kind in ("uint4", "mxfp4", "fp8") else kind
    assert found == LinearUse(64, 8, kept, has_bias=True)
    gated = LinearUse.of(ops.pack_gate_up(weight))
    assert (gated.has_bias, gated.kind) == (False, kept)
    assert gated.is_gate_up or implementation == "reference"  # which packs both alike


# --- cases of rows name what a model uses, and notice a token or a slot that is wrong ---------------------------------


def test_a_key_in_the_slot_of_another_token_is_noticed():
    class Shifted(kernels.ReferenceOps):
        def rope_and_cache(self, qkv, positions, cos_sin, slot_mapping, *rest):
            moved = slot_mapping.clone()
            moved[-2:] = slot_mapping[-2:].flip(0)
            return super().rope_and_cache(qkv, positions, cos_sin, moved, *rest)

    rotation, write = rotation_cases(CaseInputs(Shifted(), QUICK), [PLAIN], 16)
    assert max(map(deviation, rotation.run(), rotation.expected())) <= rotation.tolerance
    assert max(map(deviation, write.run(), write.expected())) > 10 * write.tolerance


# --- which linear layers the levels cover, and how large experts are cut ----------------------------------------------

USES = [LinearUse(64, 48), LinearUse(96, 64), LinearUse(96, 64, "fp8"), LinearUse(64, 128, is_gate_up=True)]


def test_the_quick_level_takes_the_longest_sum_of_each_kind():
    assert chosen(USES * 2, QUICK) == [USES[1], USES[2], USES[3]]
    assert chosen(USES * 2, FULL) == USES


def test_products_of_every_kind_pass_and_a_wrong_row_does_not():
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    kinds = [LinearUse(96, 64, kind, has_bias=True) for kind in ("", "int8", "int4", "uint4", "mxfp4", "fp8")]
    cases = [*linear_cases(inputs, kinds, "silu"), logits_case(inputs, LinearUse(96, 300))]
    assert len(cases) == 7
    for case in cases:
        found, exact = case.run(), case.expected()
        assert max(map(deviation, found, exact)) <= case.tolerance
        found[-1][-1] *= 1.01
        assert deviation(found[-1], exact[-1]) > case.tolerance


@pytest.mark.parametrize("gate", ["silu", GELU])
def test_gates_have_the_activation_of_the_model(gate):
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    case = [*linear_cases(inputs, USES, gate)][-1]
    assert case.kernel == ("silu_mul" if gate == "silu" else "gelu_mul")
    assert max(map(deviation, case.run(), case.expected())) <= case.tolerance


def test_experts_are_cut_to_the_budget_but_not_their_number():
    inputs = CaseInputs(kernels.ReferenceOps("cpu", torch.bfloat16), QUICK)
    large = ExpertsUse(2880, 2880, Routing(32, 4, normalised=True), has_biases=True)
    (case,) = experts_cases(inputs, [large])
    assert case.shape.startswith("4 of 32 experts of 64 -> 32, ")
    assert max(map(deviation, case.run(), case.expected())) <= case.tolerance
    small = replace(large, hidden=64, inner=16)
    (case,) = experts_cases(inputs, [small])
    assert case.shape.startswith("4 of 32 experts of 64 -> 16, ")


# --- draws of the self-test are those of the definition, and keep a distance from every edge --------------------------


@pytest.mark.parametrize("vocabulary", [1, 3, 300, 40_000])
def test_the_reference_draws_the_same_tokens_even_with_rounded_numbers(vocabulary):
    logits = torch.randn(len(PARAMETERS), vocabulary) * 4
    parameters, uniform, tokens = draws(logits)
    for factor in (0.9995, 1.0, 1.0005):
        assert torch.equal(kernels.ReferenceOps().sample(logits, *parameters, uniform * factor), tokens)
    assert vocabulary < 300 or tokens.any()


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_the_mass_is_that_of_the_definition(parameters):
    row = torch.randn(500) * 3
    mass = kept_mass(row, *parameters)
    torch.testing.assert_close(mass / mass.sum(), kept(row, *parameters), rtol=1e-9, atol=1e-12)


def test_small_vocabularies_have_all_cases():
    for vocabulary in (2, 5):
        for case in logits_cases(CaseInputs(kernels.ReferenceOps(), QUICK), vocabulary):
            assert len(case.run()) == len(case.expected())


# --- a layer with the heads of the model: its cases pass, and notice parts that do not fit together -------------------


def test_adapters_change_the_output(uses):
    plain, adapted = layer_cases(CaseInputs(kernels.ReferenceOps(), QUICK), replace(uses, attention=(ODD,)))
    assert deviation(adapted.run()[0], plain.run()[0]) > 0.3
    assert torch.equal(adapted.run()[0][0], plain.run()[0][0])  # the first sequence has no adapter


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm", "paged_attention", "linear_silu_mul"])
def test_a_part_that_is_left_out_is_noticed(uses, kernel):
    class Broken(kernels.ReferenceOps):
        pass

    def zeros(self, *arguments: object, **options: object) -> torch.Tensor:
        return getattr(kernels.ReferenceOps, kernel)(self, *arguments, **options) * 0

    setattr(Broken, kernel, zeros)
    case = next(iter(layer_cases(CaseInputs(Broken("cpu", torch.bfloat16), QUICK), uses)))
    assert deviation(case.run()[0], case.expected()[0]) > case.tolerance


def test_blocks_are_copied_to_the_host_and_back():
    for kv_dtype in (None, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        inputs = CaseInputs(kernels.ReferenceOps("cpu", torch.float32, kv_dtype), QUICK)
        (case,) = block_cases(inputs, ODD, 16)
        assert all(map(torch.equal, case.run(), case.expected()))


# --- the sequences of the cases of attention, and faults that are small on purpose ------------------------------------


def step(sequences, use=PLAIN, **types) -> AttentionInputs:
    return AttentionInputs(CaseInputs(kernels.ReferenceOps("cpu", **types), QUICK), use, 16, sequences)


def test_blocks_that_no_sequence_owns_hold_nan():
    inputs = step(MIXED)
    tables, lengths, starts = inputs.tables
    owned = torch.cat([row[: -(-int(n) // 16)] for row, n in zip(tables, lengths, strict=True)])
    assert len(owned.unique()) == len(owned) == inputs.num_blocks - 2
    spare = [block for block in range(inputs.num_blocks) if block not in owned]
    assert inputs.caches[0][spare].isnan().all()
    assert {int(row[-1]) for row in tables} <= {*spare}
    assert starts.tolist() == [0, 1, 2, 23, 93, 133]
    assert inputs.attend().isfinite().all()


@pytest.mark.parametrize("missing", [0, 350, 698])
def test_one_of_700_keys_left_out_deviates_more_than_any_rounding_in_bfloat16(missing):
    inputs = step([(700, 1)], dtype=torch.bfloat16)
    right = deviation(inputs.attend(), inputs.exact)
    assert right < 0.5 * TOLERANCE * UNITS[torch.bfloat16]
    block, offset = int(inputs.slots[missing]) // 16, int(inputs.slots[missing]) % 16
    inputs.caches[0][block, :, offset] = -100 * inputs.q.view(2, 2, 16).sum(dim=1)  # a key with no weight
    assert deviation(inputs.attend(), inputs.exact) > TOLERANCE * UNITS[torch.bfloat16]  # `exact` is kept


def names(use, level, longest):
    inputs = CaseInputs(kernels.ReferenceOps(), level)
    return [case.name for case in attention_cases(inputs, [use], 16, longest)]


def test_a_window_has_cases_beyond_it_if_contexts_reach_so_far():
    assert "window, rows" in names(ODD, QUICK, 120)
    assert "window, rows" not in names(ODD, QUICK, 119)
    assert "window, rows" not in names(PLAIN, QUICK, 4096)
    assert "long extend" in names(PLAIN, FULL, 4096)


def test_ends_of_keys_that_are_not_used_are_noticed():
    class Causal(kernels.ReferenceOps):
        def paged_attention(self, *arguments):
            return super().paged_attention(*arguments[:-1], None)

    assert "images" not in names(PLAIN, QUICK, 4096)
    use = replace(PLAIN, has_key_ends=True)
    for ops, is_right in ((kernels.ReferenceOps("cpu", torch.bfloat16), True), (Causal("cpu", torch.bfloat16), False)):
        (case,) = (c for c in attention_cases(CaseInputs(ops, QUICK), [use], 16, 4096) if c.name == "images")
        assert (max(map(deviation, case.run(), case.expected())) <= case.tolerance) == is_right


# --- a graph that keeps values of its recording, and ranks that do not add up, are noticed ----------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [stale, None, failing])
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
