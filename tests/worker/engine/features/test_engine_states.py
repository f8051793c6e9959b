"""The engine with a model that keeps recurrent states: each state is that of the sequence's tokens, in every case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.runner import Runner
from quire.worker.pinned_prefixes import pin
from tests.support.mock_model import StatefulModel, continuation, make_engine, request, run, text
from tests.worker.engine.test_engine_random import EngineUnderLoad

PROMPT = tuple(1 + 5 * at % 90 for at in range(30))


def stateful(**limits: object) -> Engine:
    """An engine with blocks of 4 tokens, and room for snapshots unless `limits` say otherwise."""
    some = {"num_state_slots": 24, "snapshot_interval": 8, "prefix_caching": True}
    return make_engine(model=StatefulModel(), **(some | limits))


def computed(engine: Engine, name: str, prompt: tuple[int, ...], **params: object) -> int:
    """Run a greedy request and check its text. Returns the number of prompt tokens that were computed."""
    before = engine.num_prefill_tokens
    engine.add(request(name, prompt, **params))
    assert text(run(engine), name) == continuation(prompt, 8)
    return engine.num_prefill_tokens - before


def test_a_prompt_found_in_the_cache_is_computed_from_its_last_full_block() -> None:
    engine = stateful()
    assert computed(engine, "first", PROMPT) == 30
    assert computed(engine, "second", PROMPT) == 2
    assert computed(engine, "other", (*PROMPT[:21], 7, 8)) == 7, "from the snapshot after 16 tokens"
    assert engine.groups.states is not None
    assert engine.groups.states.counters.restored == 2


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    """A state at the end of all tokens has computed the last one already, whose logits are wanted."""
    engine = stateful()
    assert computed(engine, "first", PROMPT[:20]) == 20
    assert computed(engine, "second", PROMPT[:20]) == 4
    assert computed(engine, "longer", PROMPT[:23]) == 3


def test_a_conversation_continues_from_the_last_full_block_of_the_answer() -> None:
    engine = stateful()
    computed(engine, "first", PROMPT)
    answer = continuation(PROMPT, 8)
    assert len(answer) == 8
    assert computed(engine, "next", (*PROMPT, *answer, 9, 9)) == 4, "36 of 40 tokens are in blocks with a snapshot"


def test_snapshots_are_evicted_but_never_those_of_pinned_prefixes() -> None:
    engine = stateful(num_state_slots=8 + 3)
    pin(engine, "system", PROMPT[:9])
    for index in range(6):
        prompt = (50 + index, *PROMPT)
        assert computed(engine, f"r{index}", prompt) == 31
    assert engine.groups.states is not None
    assert engine.groups.states.counters.evictions > 0
    assert computed(engine, "pinned", (*PROMPT[:9], 3)) == 2


def test_without_slots_for_snapshots_nothing_is_found_and_pins_are_refused() -> None:
    engine = stateful(num_state_slots=8)
    assert [computed(engine, name, PROMPT) for name in "ab"] == [30, 30]
    for other in (engine, stateful(prefix_caching=False)):
        with pytest.raises(RequestRefused, match="'system': no slot is left for a snapshot"):
            pin(other, "system", PROMPT)
    with pytest.raises(RequestRefused, match="it is shorter than a block of 4 tokens"):
        pin(stateful(), "system", PROMPT[:3])


def test_too_few_slots_for_all_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"num_state_slots \(7\) must be at least max_num_seqs"):
        stateful(num_state_slots=7)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_choices_and_beams_keep_their_states(preemption: str) -> None:
    limits = {"num_blocks": 20, "num_host_blocks": 40, "preemption": preemption, "max_model_len": 60}
    engine = stateful(**limits)
    for index in range(4):
        engine.add(request(f"n{index}", (index + 1, *PROMPT[:20]), n=3, max_tokens=12, ignore_eos=True))
        engine.add(request(f"b{index}", (index + 1, *PROMPT[:9]), beam_width=3, max_tokens=12, ignore_eos=True))
    items = run(engine)
    counters = engine.groups.counters
    assert (counters.swapped if preemption == "swap" else counters.recomputed) > 0
    for index in range(4):
        expected = continuation((index + 1, *PROMPT[:20]), 12, ignore_eos=True)
        assert [text(items, f"n{index}", choice) for choice in range(3)] == [expected] * 3


class StatefulEngineUnderLoad(EngineUnderLoad):
    """Random requests to a model with states. Such a model runs no step ahead, so there is one kind of runner."""

    has_states = True

    def make_engine(self, runner: Callable[..., Runner], **limits: object) -> Engine:
        rows, block_size, blocks = (limits[name] for name in ("max_num_seqs", "block_size", "num_blocks"))
        assert isinstance(rows, int)
        assert isinstance(block_size, int)
        assert isinstance(blocks, int)
        states = {"num_state_slots": rows + blocks % 12, "snapshot_interval": 2 * block_size}
        return make_engine(True, Runner, StatefulModel(branches=True), **(limits | states))


TestStatefulEngineUnderLoad = StatefulEngineUnderLoad.TestCase
TestStatefulEngineUnderLoad.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
