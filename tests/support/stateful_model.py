"""A mock model with a recurrent state: it computes from the state in a slot, and checks it against the KV cache."""

from __future__ import annotations

from typing import Any

import torch

from quire.worker.engine.forward_batch import ForwardBatch
from tests.support.mock_model import START, UNWRITTEN, MockCache, MockModel, advance


class MockStates:
    """A slot holds the state of the mock model after some tokens. Freed slots keep their contents."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [UNWRITTEN] * num_slots

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]


class StatefulModel(MockModel):
    """A mock model whose state in a slot must be that of the tokens in the KV cache.

    num_continued: the number of chunks and decodes that began with a state.
    """

    state_bytes = 8

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_continued = 0

    def alloc_states(self, cache: MockCache, num_slots: int) -> MockCache:
        cache.states = MockStates(num_slots)  # type: ignore[attr-defined]
        return cache

    def _states(self, batch: ForwardBatch, cache: MockCache, rows: torch.Tensor) -> list[int]:
        assert batch.state_slots is not None
        assert batch.snapshots is not None
        starts, own = batch.query_start_loc.tolist(), batch.state_slots.tolist()
        pool = cache.states.slots  # type: ignore[attr-defined]
        wanted = {(index, count): slot for index, count, slot in batch.snapshots.tolist()}
        targets = [*own, *wanted.values()]
        assert len(set(targets)) == len(targets), "two states of a step share a slot"
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        afterwards = []
        for index, slot in enumerate(own):
            first, end = starts[index], starts[index + 1]
            is_fresh = positions[first] == 0
            self.num_continued += not is_fresh
            state = START if is_fresh else pool[slot]
            assert state != UNWRITTEN, "a slot without a state is used"
            for count, at in enumerate(range(first, end), 1):
                state = advance(state, tokens[at])
                if (index, count) in wanted:
                    pool[wanted.pop((index, count))] = state
            pool[slot] = state
            afterwards.append(state)
        assert not wanted, "a snapshot lies outside of its chunk"
        ends = torch.tensor([end - 1 for end in starts[1:]])
        found = super()._states(batch, cache, torch.cat([rows, ends]))
        assert found[len(rows) :] == afterwards, "the state is not that of the tokens in the KV cache"
        return found[: len(rows)]
