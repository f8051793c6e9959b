"""The kernel for new prompts whose warps have roles, compiled for Hopper, against attention in float64.

The tests also leave out, or change, each kind of instruction by which the roles wait for each other.
"""

import re
from dataclasses import replace

import pytest
import torch

from quire.kernels.gpu.attention import HOPPER_KERNEL
from quire.kernels.gpu.hopper_prefill import ROWS, hopper_prefill, supports
from quire.kernels.gpu.online_softmax import LOG2_E
from quire.kernels.gpu.prefill_plan import plan_prefill
from quire.kernels.self_test.cases import run_cases
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.uses import AttentionUse
from tests.kernels.gpu import test_attention as interpreted
from tests.kernels.ptx.emulator import Emulator
from tests.kernels.ptx.program import PtxFault
from tests.support.kernels import oracle
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import Paged

KERNEL = "hopper_prefill_kernel"


def attend(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, kv_heads: int, d: int, lengths: list[int],
    programs: int,
) -> None:  # fmt: skip
    """Compute new prompts, and compare them with float64.

    The values of the third prompt are NaN, and so are the tokens after the last prompt, and results before the call.
    """
    make_triton_ops(dtype, monkeypatch)
    tokens = sum(lengths)
    qkv = torch.randn(tokens + 5, heads + 2 * kv_heads, d).to(dtype)
    qkv[tokens:] = float("nan")
    prompts = list(qkv[:tokens].split(lengths))
    for broken in prompts[2:3]:
        broken[:, -kv_heads:] = float("nan")
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    q, out = q.contiguous(), torch.full_like(q, float("nan")).contiguous()
    assert supports(q, (k, v), ROWS)
    starts, seq_lens = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    plan = plan_prefill(seq_lens, starts, tokens + 5, 4096, 0, 1, ROWS // (heads // kv_heads), split=True)
    hopper_prefill(q, k, v, starts, plan, out, d**-0.5 * LOG2_E, programs)
    assert out[tokens:].isnan().all()
    for s, rows in enumerate(out[:tokens].split(lengths)):
        if s == 2 or lengths[s] == 1:  # prompts of one token are rows of `decode`
            assert rows.isnan().all()
        else:
            exact = oracle.attention(*prompts[s].split([heads, kv_heads, kv_heads], dim=1), d**-0.5)
            assert_close(rows.flatten(1), exact, slack(dtype, 2000))


CASES = {
    "a group of 4": (torch.bfloat16, 4, 1, 128, [300, 40, 20, 128], 1),
    "heads of 64": (torch.bfloat16, 4, 2, 64, [257, 2, 3], 3),
    "float16": (torch.float16, 1, 1, 128, [130, 129], 2),
    "a group of 128": (torch.bfloat16, 128, 1, 64, [3], 2),
    "nothing to do": (torch.bfloat16, 2, 1, 64, [1, 1, 1], 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_new_prompts(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: tuple) -> None:
    attend(monkeypatch, *case)
    assert KERNEL in emulator.sources


@pytest.mark.parametrize("window", [0, 50])
def test_a_mixed_step_takes_the_kernel_if_it_knows_the_mask(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    real = interpreted.make

    def make(*arguments: object) -> Paged:
        paged = real(*arguments)
        paged.ops.launch_options = replace(paged.ops.launch_options, hopper_prefill=True)
        return paged

    monkeypatch.setattr(interpreted, "make", make)
    case = interpreted.Case(torch.bfloat16, 4, 1, 128, 16, window=window)
    interpreted.test_new_prompts_are_computed_from_their_own_keys(case, monkeypatch)
    assert (KERNEL in emulator.sources) != bool(window)


def test_the_case_of_the_self_test_passes(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    from quire.kernels.self_test import triton_cases  # after the interpreter is chosen: it has kernels of its own

    ops.check_ids = False
    ops.launch_options = replace(ops.launch_options, hopper_prefill=True)
    cases = triton_cases.fresh_cases(CaseInputs(ops, QUICK), [AttentionUse(1, 1, 64, 0.125)], 16, 700)
    report = run_cases(ops, [case for case in cases if case.kernel == HOPPER_KERNEL])
    assert (report.num_cases, report.faults) == (1, [])
    assert KERNEL in emulator.sources


# --- seeded faults ----------------------------------------------------------------------------------------------------

TRY_WAIT = re.compile(r"mbarrier\.try_wait\.parity\S* complete, \[(%r\d+)\], (%r\d+);")
EXPECT = re.compile(r"(mbarrier\.arrive\.expect_tx\S* _, \[%r\d+\], )(\d+);")
# Wrong PTX: a pattern, and its replacement.
FAULTS = {
    "no wait for an mbarrier": (TRY_WAIT, "mov.pred complete, -1;"),
    "the wrong phase": (TRY_WAIT, r"xor.b32 \2, \2, 1; mbarrier.try_wait.parity.shared::cta.b64 complete, [\1], \2;"),
    "no arrival": (re.compile(r"@%p\d+ mbarrier\.arrive\.shared\S* _, \[%r\d+\];"), ""),
    "too few bytes": (EXPECT, r"\g<1>16384;"),
    "too many bytes": (EXPECT, r"\g<1>32784;"),
    "no bytes": (EXPECT, ""),
    "a count of one": (re.compile(r"(mbarrier\.init\S* \[%r\d+\], )2;"), r"\g<1>1;"),
    "a count of two": (re.compile(r"(mbarrier\.init\S* \[%r\d+\], )1;"), r"\g<1>2;"),
    "no fence of the proxy": (re.compile(r"fence\.proxy\.async\S*;"), ""),
    "no barrier of a warpgroup": (re.compile(r"bar\.sync\s+\d+, 128;"), ""),
    "no barrier before the roles are read": (re.compile(r"barrier\.sync\s+1;(?=\s*ld\.shared\.b8)"), ""),
    "no wait for products": (re.compile(r"wgmma\.wait_group\S*\s+\d+;"), ""),
    "a wait for too few products": (re.compile(r"(wgmma\.wait_group\S*\s+)0;"), r"\g<1>1;"),
    "no group of products": (re.compile(r"wgmma\.commit_group\S*;"), ""),
    "no fence of products": (re.compile(r"wgmma\.fence\S*;"), ""),
    "too few registers": (re.compile(r"setmaxnreg\.dec\S*\s+24;"), "setmaxnreg.dec.sync.aligned.u32 120;"),
}
# Places that no execution in the emulator needs: the second warpgroup learns of tiles through its turn, Triton sets
# barriers before waits for mbarriers and between reads and writes of one thread, and a fence follows a fence.
REDUNDANT = {"no wait for an mbarrier": 2, "no barrier of a warpgroup": 22, "no fence of products": 4}
SMALL = (torch.bfloat16, 1, 1, 128, [300, 20], 1)  # three tiles of queries, one, and partial tiles of keys


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_all_places_is_noticed(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    pattern, instead = FAULTS[fault]
    emulator.edit = lambda name, ptx: pattern.sub(instead, ptx) if name == KERNEL else ptx
    with pytest.raises((PtxFault, AssertionError)):
        attend(monkeypatch, *SMALL)
    (ptx,) = emulator.sources[KERNEL]
    assert pattern.search(ptx)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_one_place_is_noticed(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Except for those of REDUNDANT."""
    pattern, instead = FAULTS[fault]
    attend(monkeypatch, *SMALL)
    (ptx,) = emulator.sources[KERNEL]
    unnoticed = 0
    for place in pattern.finditer(ptx):
        changed = ptx[: place.start()] + place.expand(instead) + ptx[place.end() :]
        emulator.edit = lambda name, text, changed=changed: changed if name == KERNEL else text
        try:
            attend(monkeypatch, *SMALL)
        except (PtxFault, AssertionError):
            continue
        unnoticed += 1
    assert unnoticed == REDUNDANT.get(fault, 0)
