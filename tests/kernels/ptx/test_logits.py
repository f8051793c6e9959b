"""The kernels over logits, compiled for Hopper: argmax, draws, penalties and log-probabilities."""

import pytest

from quire import kernels
from tests.kernels.gpu import test_logits, test_logprobs, test_penalties, test_sampling
from tests.kernels.ptx.emulator import Emulator

SAMPLERS = {"parts_kernel", "count_kernel", "mass_kernel", "kept_kernel", "draw_kernel"}


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logits.test_argmax_takes_the_lowest_of_equals(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"best_of_segment_kernel", "argmax_kernel"}


@pytest.mark.parametrize("vocabulary", [300, 3, 4099])
def test_every_row_is_drawn_by_its_own_settings(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_sampling.test_every_row_is_drawn_by_its_own_settings(wide_ops, vocabulary)
    assert emulator.sources.keys() == SAMPLERS


@pytest.mark.soak
def test_draws_follow_the_uniform_numbers(wide_ops: kernels.Ops) -> None:
    test_sampling.test_draws_follow_the_uniform_numbers_through_what_is_kept(wide_ops)


@pytest.mark.soak
def test_ties_and_broken_rows(wide_ops: kernels.Ops) -> None:
    test_sampling.test_ties_and_broken_rows(wide_ops)


@pytest.mark.parametrize("rank", [1, 1500])
def test_thresholds_of_rows_of_several_programs(emulator: Emulator, wide_ops: kernels.Ops, rank: int) -> None:
    test_sampling.test_top_k_keeps_as_many_ids_as_it_says_in_rows_of_several_programs(wide_ops, "adjacent", rank)
    test_sampling.test_top_p_ends_at_the_id_that_reaches_the_share(wide_ops, "adjacent", rank, 0)


@pytest.mark.soak
def test_the_least_mass_counts(wide_ops: kernels.Ops) -> None:
    test_sampling.test_the_least_mass_counts_for_a_uniform_number_of_zero(wide_ops)


def test_penalties_change_what_was_seen(emulator: Emulator, wide_ops: kernels.Ops) -> None:
    test_penalties.test_penalties_change_what_was_seen_and_nothing_else(wide_ops)
    assert emulator.sources.keys() == {"penalties_kernel"}


@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_log_probabilities(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logprobs.test_log_probabilities_are_exact_and_ordered(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"keys_kernel", "normaliser_kernel", "pick_kernel"}
