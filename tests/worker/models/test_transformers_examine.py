"""How a model of Transformers is examined when it is loaded: attention calls, states, and a trial."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.transformers import states
from quire.worker.models.transformers.attention import AttentionProbe, UnsupportedAttention, cache_of_call
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.models.transformers.examine import examine
from quire.worker.models.transformers.state_pool import StateKey, StateLayout, StatePool
from quire.worker.models.transformers.states import StateProbe, StateStep
from quire.worker.models.transformers.trial import texts
from tests.support.checkpoints import VOCAB_SIZE


def asked(**changes: Any) -> AttentionProbe:
    examination = AttentionProbe(torch.float32, 64)
    q, k, v = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16)
    call = {"q": q, "k": k, "v": v, "attention_mask": torch.zeros(1, 1, 2, 2), "module": SimpleNamespace()}
    examination.attend(**(call | changes))
    return examination


def test_what_a_call_of_attention_asks_for_is_noted() -> None:
    [one] = asked().shapes
    assert (one.num_heads, one.num_kv_heads, one.head_dim, one.value_dim) == (4, 2, 16, 16)
    assert (one.scale, one.sliding_window) == (0.25, 0)
    [one] = asked(scaling=2.0, sliding_window=5, attention_mask=torch.full((1, 1, 2, 2), 5.0)).shapes
    assert (one.scale, one.sliding_window) == (2.0, 5)
    [one] = asked(v=torch.zeros(1, 2, 2, 4)).shapes
    assert (one.value_dim, one.scale) == (4, 0.25)  # by the width of keys
    [one] = asked(softcap=30.0, s_aux=torch.zeros(4)).shapes
    assert one.softcap == 30.0
    [one] = asked(sliding_window=64).shapes  # wider than any context
    assert one.sliding_window == 0


def test_calls_with_the_same_keys_and_values_share_a_cache() -> None:
    probe = AttentionProbe(torch.float32, 64)
    keys = [torch.zeros(1, 2, 2, 16) for _ in range(3)]
    for k, v in [(0, 0), (1, 1), (0, 0), (2, 0), (1, 1)]:
        mask = torch.zeros(1, 1, 2, 2)
        probe.attend(SimpleNamespace(), torch.zeros(1, 4, 2, 16), keys[k], keys[v], attention_mask=mask)
    assert [one.shared_with for one in probe.shapes] == [None, None, 0, None, 1]
    assert cache_of_call(probe.shapes) == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"indices": torch.zeros(4)}, "takes indices"),
        ({"softcap": -1.0}, "the cap -1.0"),
        ({"softcap": float("nan")}, "the cap nan"),
        ({"s_aux": torch.zeros(2)}, "its sinks have the shape"),
        ({"s_aux": torch.zeros(1, 4)}, "its sinks have the shape"),
        ({"attention_mask": None}, "not causal"),
        ({"is_causal": False}, "not causal"),
        ({"module": SimpleNamespace(is_causal=False)}, "not causal"),
        ({"attention_mask": torch.full((1, 1, 2, 2), 5.0)}, "a mask of its own"),
        ({"sliding_window": 5}, "a mask of its own"),
        ({"attention_mask": torch.full((1, 1, 2, 2), -1.0)}, "its masks are neither"),
        ({"attention_mask": torch.tensor([[[[0.0, 1.0]]]])}, "a mask of its own"),
        ({"q": torch.zeros(1, 3, 2, 16)}, "its heads are"),
        ({"v": torch.zeros(1, 2, 2, 32)}, "its heads are"),
        ({"v": torch.zeros(1, 4, 2, 16)}, "its heads are"),
        ({"k": torch.zeros(1, 2, 3, 16), "v": torch.zeros(1, 2, 3, 16)}, "its heads are"),
        ({"k": torch.zeros(2, 2, 2, 16), "v": torch.zeros(2, 2, 2, 16)}, "its heads are"),
        ({"k": torch.zeros(1, 2, 2, 32)}, "its heads are"),
        ({"q": torch.zeros(1, 4, 2, 16).double()}, "in torch.float64"),
        ({"scaling": -1.0}, "scaled by -1.0"),
        ({"scaling": 0.0}, "scaled by 0.0"),
        ({"scaling": float("nan")}, "scaled by nan"),
    ],
)
def test_what_attention_cannot_do_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedAttention, match=why):
        asked(**changes)


def masks(kind: str) -> Any:
    from transformers import masking_utils

    return {
        "causal": masking_utils.causal_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(9),
        "wide": masking_utils.sliding_window_causal_mask_function(64),
        "chunks": masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda batch, head, q, kv: q // 16 == kv // 16
        ),
        # The first chunks have 16 tokens, later ones fewer.
        "uneven": lambda batch, head, q, kv: (kv <= q) & (kv >= torch.where(q < 40, q // 16 * 16, 40)),
        "both ways": lambda batch, head, q, kv: kv >= 0,
        "prefix": lambda batch, head, q, kv: (kv <= q) | (kv < 10),
        "none": lambda batch, head, q, kv: kv < 0,
    }[kind]


@pytest.mark.parametrize("kind", ["uneven", "both ways", "prefix", "none"])
def test_masks_that_are_neither_causal_nor_a_window_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedAttention, match="its masks are neither causal nor"):
        AttentionProbe(torch.float32, 64).width_of(masks(kind))


def examined(path: Path, max_model_len: int = 64) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    text = texts(VOCAB_SIZE, max_model_len)[0]
    return model, examine(model, read_transformers_config(path), text, torch.float32, max_model_len)


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
        seq_lens=torch.tensor([first + len(values) for _, first, values in chunks]),
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
