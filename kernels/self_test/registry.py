"""The registry of the self-test: all cases of the kernels that a model uses."""

from __future__ import annotations

from collections.abc import Iterator

from quire.kernels.ops import AllReduceGroup, Ops
from quire.kernels.self_test.attention import attention_cases
from quire.kernels.self_test.cases import KernelCase, SelfTestReport, run_cases
from quire.kernels.self_test.devices import RecordGraph, all_reduce_case, graph_case
from quire.kernels.self_test.inputs import CaseInputs
from quire.kernels.self_test.layers import block_cases, layer_cases
from quire.kernels.self_test.logits import logits_cases
from quire.kernels.self_test.products import experts_cases, linear_cases, logits_case
from quire.kernels.self_test.rows import rotation_cases, row_cases
from quire.kernels.uses import KernelUses


def run_self_test(
    ops: Ops, uses: KernelUses, level: str, record: RecordGraph | None = None, ranks: AllReduceGroup | None = None
) -> SelfTestReport:
    """Test the kernels that a model uses, and replace those with wrong results. Arguments of `cases_of`.

    Raises WrongKernel.
    """
    return run_cases(ops, cases_of(ops, uses, level, record, ranks))


def cases_of(
    ops: Ops,
    uses: KernelUses,
    level: str,
    record: RecordGraph | None = None,
    ranks: AllReduceGroup | None = None,
) -> Iterator[KernelCase]:
    """Yield all cases, a kernel before those that need its results. Inputs are made when a case is reached.

    level: QUICK or FULL. record: records CUDA graphs; None if steps are launched kernel by kernel. ranks: of
    this process; all of them run the same cases.
    """
    inputs, attention, block_size = CaseInputs(ops, level), list(dict.fromkeys(uses.attention)), uses.block_size
    is_triton = ops.name == "triton"
    if is_triton:
        from quire.kernels.self_test import triton_cases

        yield from triton_cases.fold_cases(inputs, attention)
    yield from row_cases(inputs, uses.hidden, uses.embedding_dtype, uses.has_norms)
    yield from rotation_cases(inputs, attention, block_size)
    yield from attention_cases(inputs, attention, block_size, uses.max_model_len)
    if is_triton:
        yield from triton_cases.split_extend_cases(inputs, attention, block_size, uses.max_model_len)
        yield from triton_cases.fresh_cases(inputs, attention, block_size, uses.max_model_len)
    yield from linear_cases(inputs, uses.linears, uses.gate)
    if uses.head is not None:
        yield logits_case(inputs, uses.head)
    yield from experts_cases(inputs, uses.experts)
    yield from logits_cases(inputs, uses.vocab_size)
    if attention:
        yield from block_cases(inputs, attention[0], block_size)
    if attention and uses.is_stack:
        yield from layer_cases(inputs, uses)
    if is_triton:
        yield from triton_cases.few_rows_cases(inputs, uses)
    if attention and uses.is_stack and record is not None:
        yield graph_case(inputs, uses, record)
    if ranks is not None:
        yield all_reduce_case(inputs, uses.hidden, ranks)
