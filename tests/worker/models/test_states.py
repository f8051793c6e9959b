"""A pool keeps the states of each slot apart, whatever their shapes and types."""

from __future__ import annotations

import torch

from quire.worker.models.states import ALIGNMENT, StateKey, StateLayout, StatePool

CONV, SCAN = StateKey(0, "conv", 0), StateKey(3, "recurrent", 0)
LAYOUT = StateLayout({CONV: ((3, 5), torch.bfloat16), SCAN: ((2, 7), torch.float32)})


def filled() -> StatePool:
    """A pool of three slots; slot s has the value s in all its states."""
    pool = StatePool(LAYOUT, 3, "cpu")
    for states in pool.states.values():
        states.copy_(torch.arange(3).view(3, *[1] * (states.dim() - 1)))
    return pool


def test_states_have_their_shapes_and_begin_on_whole_vectors() -> None:
    pool = StatePool(LAYOUT, 3, "cpu")
    assert [(one.shape, one.dtype) for one in pool.states.values()] == [
        ((3, 3, 5), torch.bfloat16),
        ((3, 2, 7), torch.float32),
    ]
    assert LAYOUT.nbytes == 2 * ALIGNMENT, "30 and 56 bytes"
    assert all(one.storage_offset() * one.element_size() % ALIGNMENT == 0 for one in pool.states.values())
    assert not any(one.any() for one in pool.states.values())


def test_a_copy_has_all_states_of_a_slot_and_changes_no_other_slot() -> None:
    pool = filled()
    pool.copy(2, 0)
    for states in pool.states.values():
        assert [one.unique().tolist() for one in states] == [[2], [1], [2]]


def test_single_states_can_be_copied() -> None:
    pool = filled()
    pool.copy_states({SCAN}, 1, 0)
    assert pool.states[SCAN][0].unique().tolist() == [1]
    assert pool.states[CONV][0].unique().tolist() == [0]
