"""The attention kernels and the kernels that plan their work, compiled for Hopper, against attention in float64.

NaN fills the pages that no sequence owns, the free slots of a partly filled page, and the output before the call.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.kernels.gpu import attention
from quire.kernels.gpu.decode_plan import MIN_CHUNK
from tests.kernels.ptx.emulator import Emulator
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


FAST = [Case(), Case(torch.float16, 2, 1, 64), Case(kv_dtype=FP8)]
MORE = [
    Case(heads=16, kv_heads=2),
    Case(heads=8, d=64),
    Case(heads=4, d=256),
    Case(torch.float16, 7, 1, 80),
    Case(window=100),
    Case(d=64, softcap=2.5),
    Case(torch.float16, 4, 1, 128, FP8),
]
CASES = [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


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
