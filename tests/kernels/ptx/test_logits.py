"""The kernels over logits, compiled for Hopper: argmax, draws, penalties and log-probabilities."""

import pytest

from quire import kernels
from tests.kernels.gpu import test_logits, test_logprobs, test_penalties, test_sampling
from tests.kernels.ptx.emulator import Emulator


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logits.test_argmax_takes_the_lowest_of_equals(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"argmax_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [3, 300, 4099])
def test_every_row_is_drawn_by_its_own_settings(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_sampling.test_every_row_is_drawn_by_its_own_settings(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"sample_kernel"}


@pytest.mark.slow
def test_draws_follow_the_uniform_numbers(wide_ops: kernels.Ops) -> None:
    test_sampling.test_draws_follow_the_uniform_numbers_through_what_is_kept(wide_ops)


def test_ties_and_broken_rows(wide_ops: kernels.Ops) -> None:
    test_sampling.test_ties_and_broken_rows(wide_ops)


def test_penalties_change_what_was_seen(emulator: Emulator, wide_ops: kernels.Ops) -> None:
    test_penalties.test_penalties_change_what_was_seen_and_nothing_else(wide_ops)
    assert emulator.sources.keys() == {"penalties_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_log_probabilities(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logprobs.test_log_probabilities_are_exact_and_ordered(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"keys_kernel", "normaliser_kernel", "pick_kernel"}
