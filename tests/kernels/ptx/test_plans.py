"""The kernels that plan attention, compiled for Hopper."""

import pytest

from quire import kernels
from tests.kernels.gpu import test_decode_plan, test_prefill_plan
from tests.kernels.ptx.emulator import Emulator


@pytest.mark.parametrize(
    ("lengths", "chunks"), [([1024], 16), ([1024] * 256, 256), ([32 * 1024] + [1024] * 63, None)], ids=str
)
def test_keys_are_cut_so_that_every_program_has_work(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, lengths: list[int], chunks: int | None
) -> None:
    test_decode_plan.test_keys_are_cut_so_that_every_program_has_work_and_no_more(monkeypatch, lengths, chunks)
    assert emulator.sources.keys() == {"plan_rows_kernel", "plan_items_kernel"}


@pytest.mark.parametrize("window", [0, 20])
def test_every_query_of_a_prompt_is_in_one_tile(emulator: Emulator, wide_ops: kernels.Ops, window: int) -> None:
    test_prefill_plan.test_every_query_of_a_prompt_is_in_one_tile(wide_ops, window)
    assert emulator.sources.keys() == {"plan_sequences_kernel", "plan_tiles_kernel"}


@pytest.mark.parametrize("seed", range(3))
def test_every_key_of_a_tile_is_in_one_chunk(
    emulator: Emulator, wide_ops: kernels.Ops, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    test_prefill_plan.test_every_key_of_a_tile_is_in_one_chunk(wide_ops, monkeypatch, seed)
    assert {"plan_chunks_kernel", "plan_chunk_items_kernel"} <= emulator.sources.keys()


def test_new_prompts_have_a_list_of_their_own(wide_ops: kernels.Ops) -> None:
    test_prefill_plan.test_new_prompts_have_a_list_of_their_own(wide_ops)
