"""The attention kernels and the kernels that plan their work, compiled for Hopper, against attention in float64.

NaN fills the pages that no sequence owns, the free slots of a partly filled page, and the output before the call.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.kernels.gpu.decode_plan import MIN_CHUNK
from tests.kernels.gpu import test_attention as interpreted
from tests.kernels.ptx.emulator import Emulator
from tests.kernels.ptx.program import PtxFault
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import Paged

LONG = 2 * MIN_CHUNK + 60  # keys of a row that the kernel always splits
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A shape of heads and cache."""

    dtype: torch.dtype = torch.bfloat16
    heads: int = 4
    kv_heads: int = 1
    d: int = 128
    kv_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0  # a case with a cap has sinks, too

    def __str__(self) -> str:
        names = [str(one).removeprefix("torch.") for one in (self.dtype, self.kv_dtype) if one]
        extra = [f"window{self.window}"] * (self.window > 0) + ["cap-and-sinks"] * (self.softcap > 0)
        return "-".join([*names, f"{self.heads}of{self.kv_heads}", f"d{self.d}", *extra])


CASES = [
    Case(),
    Case(torch.float16, 2, 1, 64),
    Case(torch.float32, 2, 1, 64),
    Case(kv_dtype=FP8),
    Case(d=512),
    Case(heads=16, kv_heads=2),
    Case(heads=8, d=64),
    Case(heads=4, d=256),
    Case(torch.float16, 7, 1, 80),
    Case(window=100),
    Case(d=64, softcap=2.5),
    Case(torch.float16, 4, 1, 128, FP8),
    Case(torch.float32, 8, 2, 128),
    Case(torch.float32, 2, 1, 256),
    Case(d=512, kv_dtype=FP8),
    Case(torch.float16, 4, 1, 272, window=100),
]


def make(case: Case, monkeypatch: pytest.MonkeyPatch, lengths: list[int], queries: list[int], **options: Any) -> Paged:
    ops = make_triton_ops(case.dtype, monkeypatch, kv_dtype=case.kv_dtype, **options)
    ops.check_ids = False
    sinks = torch.linspace(-4, 8, case.heads) if case.softcap else None
    return Paged(ops, lengths, queries, case.heads, case.kv_heads, case.d, 16, case.window, sinks, case.softcap)


def check(paged: Paged, rows: list[torch.Tensor]) -> None:
    for s, found in enumerate(rows):
        assert_close(found, paged.exact(s), slack(paged.ops.dtype, 2000))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_with_rows_of_one_chunk_and_of_several(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    paged = make(case, monkeypatch, [1, LONG, 129], [1, 1, 1])
    check(paged, paged.attend())
    assert {"plan_rows_kernel", "plan_items_kernel", "decode_kernel", "reduce_kernel"} <= emulator.sources.keys()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_on_cached_pages_together_with_decode_rows(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    paged = make(case, monkeypatch, [300, 40, 1, 170], [1, 40, 1, 33])
    check(paged, paged.attend())
    assert {"plan_sequences_kernel", "plan_tiles_kernel", "prefill_kernel"} <= emulator.sources.keys()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_share_the_keys_of_few_queries_behind_a_long_context(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    paged = make(case, monkeypatch, [1, LONG, 140], [1, 9, 33])
    summed = interpreted.share_keys(paged, monkeypatch)
    check(paged, paged.attend())
    assert (summed[0][:, 6] > 1).any()
    assert {
        "plan_chunks_kernel",
        "plan_chunk_items_kernel",
        "prefill_kernel",
        "reduce_kernel",
    } <= emulator.sources.keys()


@pytest.mark.parametrize(
    "case",
    [
        interpreted.Case(torch.bfloat16, 4, 1, 128, 16),
        interpreted.Case(torch.float16, 8, 2, 64, 32, window=50),
        interpreted.Case(torch.bfloat16, 8, 2, 256, 16),
        interpreted.Case(torch.float32, 2, 1, 256, 32),
        interpreted.Case(torch.bfloat16, 2, 1, 64, 16, softcap=2.5),
    ],
    ids=str,
)
def test_new_prompts_are_computed_from_their_own_keys(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: interpreted.Case
) -> None:
    interpreted.test_new_prompts_are_computed_from_their_own_keys(case, monkeypatch)
    assert "prefill_kernel" in emulator.sources


@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "d", "window", "softcap"),
    [
        (torch.bfloat16, 64, 0, 0.0),
        *(
            (dtype, d, window, softcap)
            for dtype, d in ((torch.float16, 128), (torch.bfloat16, 256), (torch.bfloat16, 512))
            for window, softcap in ((0, 0.0), (50, 0.0), (0, 2.5))
        ),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch_and_chunk_in_batch_invariant_mode(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, d: int, window: int, softcap: float
) -> None:
    emulator.renames = {"decode_kernel"}  # see the next test
    interpreted.test_a_row_has_the_same_bits_in_any_batch_and_chunk_in_batch_invariant_mode(
        monkeypatch, dtype, window, softcap, d
    )
    assert "prefill_kernel" in emulator.sources


def test_decode_copies_accumulators_before_their_wait_in_batch_invariant_mode(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known defect of the PTX of Triton 3.7.1: LLVM copies accumulators before the wait for them.

    The copies are at the end of the loop over whole tiles. PTX leaves the value of such a copy undefined. ptxas 12.8
    removes the copies: it gives both names one register. If this test fails, Triton places the copies after the wait,
    and the test and `Emulator.renames` can be deleted.
    """
    paged = make(Case(d=64), monkeypatch, [300], [1], batch_invariant=True)
    with pytest.raises(PtxFault, match=r"touches a register of a product under way: mov\.b32"):
        paged.attend()
    emulator.renames = {"decode_kernel"}
    check(paged, paged.attend())
