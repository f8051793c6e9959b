"""The states of a step: each sequence continues its own, in chunks, alone or next to others, with copies on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.worker.models import transformers_states as states
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.states import StateKey, StateLayout, StatePool
from quire.worker.models.transformers_states import StateProbe, StateStep

WIDTH = 3


class Memory(nn.Module):
    """A layer with a state of the last inputs and one of the sum of all. It returns both sums for each token."""

    def forward(self, hidden_states: torch.Tensor, cache_params: Any, scale: tuple[torch.Tensor, float]) -> Any:
        tokens = hidden_states.shape[1]
        before = cache_params.get_recurrent_state(4, state_idx=0)
        full = cache_params.update_conv_state(hidden_states.transpose(1, 2), 4, conv_kernel_size=WIDTH)
        padded = nn.functional.pad(full, (WIDTH - 1, 0))[..., -tokens - WIDTH + 1 :]
        windows = padded.unfold(-1, WIDTH, 1).sum(-1).transpose(1, 2)
        total = hidden_states.cumsum(1) + (0 if before is None else before[:, None])
        cache_params.update_recurrent_state(total[:, -1], 4)
        return windows + 100 * total * scale[0] * scale[1], None


def expected(values: list[float]) -> list[float]:
    return [sum(values[max(0, at - 2) : at + 1]) + 100 * sum(values[: at + 1]) for at in range(len(values))]


def probed(model: nn.Module) -> StateLayout:
    probe = StateProbe(model)
    with probe.watching():
        model(torch.ones(1, 2, 1), probe, (torch.ones(1, 2, 1), 1.0))
    assert list(probe.modules) == [model]
    return StateLayout(probe.shapes)


def compute(
    layer: nn.Module,
    pool: StatePool,
    chunks: list[tuple[int, int, list[float]]],
    snapshots: list[list[int]] | None = None,
    one_by_one: bool = False,
) -> list[list[float]]:
    """Run chunks (slot, first position, values). Returns the results of each."""
    lengths = [len(values) for _, _, values in chunks]
    none = torch.zeros(0, dtype=torch.int32)
    batch = ForwardBatch(
        token_ids=torch.zeros(sum(lengths), dtype=torch.int32),
        positions=torch.cat([torch.arange(first, first + len(values)) for _, first, values in chunks]),
        slot_mapping=none,
        block_tables=none,
        seq_lens=none,
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        logits_rows=none,
        state_slots=torch.tensor([slot for slot, _, _ in chunks]),
        snapshots=torch.tensor(snapshots or [], dtype=torch.int64).view(-1, 3),
    )
    step = StateStep(batch, pool, one_by_one)
    inputs = torch.tensor([value for _, _, values in chunks for value in values])[None, :, None]
    with states.running(step):
        found, nothing = layer(inputs, cache_params=step, scale=(torch.ones_like(inputs), 1.0))
    assert nothing is None
    return [part.flatten().tolist() for part in found.split(lengths, dim=1)]


def wrapped(num_slots: int = 6) -> tuple[nn.Module, StatePool]:
    layer = Memory()
    pool = StatePool(probed(layer), num_slots, "cpu")
    states.wrap(layer)
    return layer, pool


def test_a_probe_finds_the_modules_and_the_shapes_of_their_states() -> None:
    assert probed(Memory()).shapes == {
        StateKey(4, "conv", 0): ((1, WIDTH), torch.float32),
        StateKey(4, "recurrent", 0): ((1,), torch.float32),
    }


def test_chunks_and_decodes_of_several_sequences_continue_their_own_states() -> None:
    layer, pool = wrapped()
    pool.states[StateKey(4, "recurrent", 0)].fill_(9.0)  # of earlier owners of the slots
    first, second, third = [1.0, 2, 3, 4, 5, 6], [7.0, 1, 1, 8], [2.0, 5, 3]
    found: list[list[float]] = [[], [], []]
    for chunks in (
        [(0, 0, first[:2]), (1, 0, second[:1]), (2, 0, third[:1])],
        [(2, 1, third[1:2]), (0, 2, first[2:5]), (1, 1, second[1:2])],  # decodes around a chunk
        [(0, 5, first[5:]), (1, 2, second[2:3]), (2, 2, third[2:])],  # decodes alone
        [(1, 3, second[3:])],
    ):
        for (slot, _, _), part in zip(chunks, compute(layer, pool, chunks), strict=True):
            found[slot] += part
    assert found == [expected(first), expected(second), expected(third)]


def test_a_snapshot_has_the_state_after_its_tokens() -> None:
    values = [1.0, 2, 3, 4, 5, 6]
    for one_by_one in (False, True):
        layer, pool = wrapped()
        compute(layer, pool, [(1, 0, [9.0]), (0, 0, values[:4])], [[1, 2, 3], [1, 4, 4]], one_by_one)
        assert compute(layer, pool, [(3, 2, values[2:])], None, one_by_one) == [expected(values)[2:]]
        assert compute(layer, pool, [(4, 4, values[4:5])], [[0, 1, 5]], one_by_one) == [expected(values)[4:5]]
        assert compute(layer, pool, [(5, 5, values[5:])], None, one_by_one) == [expected(values)[5:]]
        assert compute(layer, pool, [(1, 1, [1.0, 2.0])], None, one_by_one) == [expected([9.0, 1, 2])[1:]]


def test_modules_that_continue_single_tokens_get_single_tokens() -> None:
    pool = wrapped()[1]
    counts = []
    forward = Memory.forward

    class Counting(Memory):
        def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
            counts.append(hidden_states.shape[1])
            return forward(self, hidden_states, **rest)

    counting = Counting()
    states.wrap(counting)
    compute(counting, pool, [(0, 0, [1.0, 2, 3])], None, True)
    found = compute(counting, pool, [(0, 3, [4.0, 5, 6])], None, True)
    assert counts == [3, 1, 1, 1]
    assert found == [expected([1.0, 2, 3, 4, 5, 6])[3:]]
