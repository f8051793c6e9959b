"""The pattern that old assemblers compile wrongly, and prompts that bring their keys along."""

import itertools
from dataclasses import replace

import pytest
import torch

from quire.kernels.self_test.cases import KernelCase, run_cases
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.uses import AttentionUse
from tests.kernels.self_test.conftest import ODD, PLAIN
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_if_the_pattern_is_wrong_torch_computes_prompts(triton, monkeypatch):
    """Some rows get the sum of another tile, as if ptxas had mixed up registers."""
    from quire.kernels.gpu import attention
    from quire.kernels.self_test import triton_cases

    right = triton_cases.attend_whole_tiles

    def wrong(q, k, v, tiles, scale):
        found = right(q, k, v, tiles, scale)
        found[8:16] = right(q, k[tiles.keys :], v[tiles.keys :], tiles, scale)[8:16]
        return found

    monkeypatch.setattr(triton_cases, "attend_whole_tiles", wrong)
    report = run_cases(triton, triton_cases.fold_cases(CaseInputs(triton, QUICK), [PLAIN]))
    assert [fault.kernel for fault in report.faults] == ["prefill"]
    assert report.faults[0].line.startswith("fold (64 x 32 tiles of 16")
    assert not triton.launch_options.may_split
    monkeypatch.setattr(attention, "prefill", None)
    assert run_cases(triton, triton_cases.fresh_cases(CaseInputs(triton, QUICK), [PLAIN], 16, 60)).faults == []


@pytest.mark.soak
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["", "fp8"])
def test_all_cases_of_attention_with_heads_of_512(monkeypatch, kv_dtype):
    """Gemma 4, layers without a window."""
    ops = make_triton_ops(torch.bfloat16, monkeypatch, kv_dtype=kv_dtype)
    from quire.kernels.self_test.attention import attention_cases
    from quire.kernels.self_test.triton_cases import fold_cases, fresh_cases

    ops.check_ids = False
    use = AttentionUse(8, 1, 512, 1.0, has_norms=True, has_v_norm=True)
    inputs = CaseInputs(ops, QUICK)
    of_steps = (cases(inputs, [use], 16, 300) for cases in (attention_cases, fresh_cases))
    cases = [*fold_cases(inputs, [use]), *itertools.chain(*of_steps), *split_extend(ops, monkeypatch, use)]
    assert {"fold", "decode", "extend", "new prompts", "split extend"} <= {case.name for case in cases}
    assert run_cases(ops, cases).faults == []


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_all_cases_of_attention_with_the_tiles_of_less_shared_memory(monkeypatch, invariant):
    ops = make_triton_ops(torch.float16, monkeypatch, batch_invariant=invariant)
    from quire.kernels.gpu import attention
    from quire.kernels.self_test.attention import attention_cases
    from quire.kernels.self_test.triton_cases import fold_cases, fresh_cases

    ops.check_ids = False
    ops.launch_options = replace(ops.launch_options, large_shared_memory=False)
    chosen = []
    name = "invariant_tiles" if invariant else "prefill_tiles"
    choose = getattr(attention, name)
    monkeypatch.setattr(attention, name, lambda *given: (chosen.append(choose(*given)), chosen[-1])[1])
    uses, inputs = [PLAIN, AttentionUse(4, 2, 128, 0.09)], CaseInputs(ops, QUICK)
    of_steps = (cases(inputs, uses, 16, 160) for cases in (attention_cases, fresh_cases))
    assert run_cases(ops, [*fold_cases(inputs, uses), *itertools.chain(*of_steps)]).faults == []
    tiles = {size[1] if invariant else size for size in chosen}
    assert {(size.rows, size.keys) for size in tiles} == {(128, 64), (128, 32)}


def split_extend(ops, monkeypatch, use=PLAIN) -> list[KernelCase]:
    """The case of shared keys, with smaller chunks for the interpreter, and as many multiprocessors as a GPU has."""
    from quire.kernels.gpu import prefill_plan
    from quire.kernels.self_test import triton_cases

    monkeypatch.setattr(prefill_plan, "MIN_SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_cases, "SPLIT_EXTENDING", [(190, 17), (200, 3), (90, 21), (40, 1)])
    ops.launch_options = replace(ops.launch_options, multiprocessors=132)
    return [*triton_cases.split_extend_cases(CaseInputs(ops, QUICK), [use], 16, 4096)]


@pytest.mark.slow
@pytest.mark.parametrize("use", [PLAIN, replace(ODD, window=170)], ids=["", "odd"])
def test_programs_share_the_keys_of_a_case(triton, monkeypatch, use):
    from quire.kernels.gpu import prefill

    right, summed = prefill.sum_chunks, []
    monkeypatch.setattr(prefill, "sum_chunks", lambda rows, *rest: (summed.append(rows[:, 6]), right(rows, *rest)))
    assert run_cases(triton, split_extend(triton, monkeypatch, use)).faults == []
    assert {int(count) for count in summed[0]} == ({0, 2, 3} if use is PLAIN else {0, 2})


@pytest.mark.slow
def test_a_chunk_that_is_left_out_of_the_sum_is_noticed(triton, monkeypatch):
    from quire.kernels.gpu import prefill

    right = prefill.sum_chunks

    def wrong(rows, *rest):
        rows[:, 6] -= (rows[:, 6] > 2).int()
        right(rows, *rest)

    monkeypatch.setattr(prefill, "sum_chunks", wrong)
    report = run_cases(triton, cases := split_extend(triton, monkeypatch))
    assert [fault.kernel for fault in report.faults] == ["prefill"]
    assert report.faults[0].line.startswith("split extend (4/2 heads of 16")
    assert run_cases(triton, cases).faults == []


def test_a_prompt_does_not_read_the_blocks_of_its_own_keys(triton):
    from quire.kernels.gpu.attention import FRESH_KERNEL
    from quire.kernels.self_test.attention import NEW, AttentionInputs
    from quire.kernels.self_test.triton_cases import _of_fresh

    step = AttentionInputs(CaseInputs(triton, QUICK), PLAIN, 16, NEW)
    expected = step.exact
    for cache in step.caches:
        cache.fill_(float("nan"))
    with torch.inference_mode():
        (found,) = _of_fresh("new prompts", step, FRESH_KERNEL).run()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
