"""A snapshot agrees with the bookkeeping of the engine, whatever runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from quire.shared.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.inspect.block_report import read_blocks
from quire.worker.inspect.snapshot import EngineUsage, take_snapshot
from tests.support.mock_model import EOS, MockModel
from tests.support.stateful_model import StatefulModel

SIZE = 4


def make_engine(num_blocks: int = 64, num_host_blocks: int = 0, **limits: Any) -> Engine:
    params = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128, **limits}
    return Engine(MockModel(), EngineLimits(num_blocks, SIZE, num_host_blocks=num_host_blocks, **params), (EOS,), None)


def add(engine: Engine, name: str, prompt: tuple[int, ...], priority: int = 1, **params: Any) -> None:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
    engine.add(GenerationRequest(name, "mock", prompt, SamplingParams(**params)), priority=priority)


def checked(engine: Engine) -> EngineUsage:
    """The engine's usage, which must agree with itself, with the block report and with the bookkeeping."""
    engine.check_integrity()
    now, shown = take_snapshot(engine).usage(), json.loads(json.dumps(read_blocks(engine).render()))
    assert shown["usage"] == asdict(now)
    assert now.blocks_used + now.blocks_cached + now.blocks_free == now.blocks_total
    assert now.slots_filled + now.slots_promised + now.slots_waste == now.blocks_used * SIZE
    assert min(now.slots_filled, now.slots_promised, now.slots_waste) >= 0
    assert 0 <= now.slots_waste_max < SIZE
    assert now.host_blocks_used + now.host_blocks_free == now.host_blocks_total
    used = [block for block in shown["blocks"] if block["refs"]]
    assert len(used) == now.blocks_used
    assert len(shown["blocks"]) == now.blocks_used + now.blocks_cached
    assert sum(block["filled"] for block in used) == now.slots_filled
    assert sum(block["shared"] for block in used) == now.blocks_shared
    assert sum(block["pinned"] for block in used) == now.blocks_pinned
    assert shown["num_free"] == now.blocks_free
    entries = [block for sequence in shown["sequences"] for block in sequence["blocks"]]
    assert len(entries) - len(set(entries)) == now.sharing_saved_blocks
    assert {sequence["computed"] for sequence in shown["sequences"] if sequence["state"] == "waiting"} <= {0}
    return now


def test_a_prompt_in_chunks_fills_the_slots_that_were_promised_to_it() -> None:
    engine = make_engine()
    add(engine, "a", tuple(range(1, 42)))
    seen = []
    for _ in range(3):
        engine.step()
        now = checked(engine)
        seen.append((now.blocks_used, now.slots_filled, now.slots_promised, now.slots_waste))
    assert seen == [(11, 16, 25, 3), (11, 32, 9, 3), (11, 41, 1, 2)]
    assert (now.steps, now.prefill_tokens, now.decode_tokens) == (3, 41, 0)
    engine.step()
    assert checked(engine).decode_tokens == 1
    waste = []
    for _ in range(4):
        engine.step()
        waste.append(checked(engine).slots_waste_max)
    assert waste == [0, 0, 2, 1], "the newest token gets a slot when it is computed"


def test_choices_share_the_blocks_of_their_prompt() -> None:
    engine = make_engine()
    add(engine, "a", tuple(range(1, 11)), n=4, temperature=1.0)
    engine.step()
    now = checked(engine)
    assert (now.blocks_used, now.blocks_shared, now.sharing_saved_blocks) == (3, 3, 9)
    assert now.sharing_saved_fraction == 0.75
    engine.step()  # all but one write into copies of the last block
    now = checked(engine)
    assert (now.blocks_used, now.blocks_shared, now.copies, now.forks) == (6, 2, 3, 3)
    assert now.sequences_running == 4
    [first] = [
        block for block in read_blocks(engine).render()["blocks"] if block["sequences"][-1] == "a/3" and block["shared"]
    ][:1]
    assert first["sequences"] == ["a/0", "a/1", "a/2", "a/3"]
    assert first["refs"] == 4


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_it_holds_in_every_step_of_a_crowd_that_runs_out_of_blocks(preemption: str) -> None:
    engine = make_engine(24, 24, preemption=preemption)
    engine.pin("p", (7, 7, 7, 7, 7, 7))
    for i in range(4):
        add(engine, f"n{i}", (7, 7, 7, 7, 7, 7, i + 1), n=2, temperature=1.0, max_tokens=16)
    add(engine, "beam", (5, 4, 3), beam_width=3, max_tokens=12)
    add(engine, "urgent", (9,) * 30, priority=0, max_tokens=16)
    seen, states = [], set()
    while engine.has_work:
        engine.step()
        seen.append(checked(engine))
        states |= {sequence["state"] for sequence in read_blocks(engine).render()["sequences"]}
    last = seen[-1]
    assert max(now.blocks_shared for now in seen) > 0
    assert last.blocks_used == last.blocks_pinned == 2
    assert last.preemptions_swap + last.preemptions_recompute > 0
    assert (last.preemptions_swap > 0) == (preemption == "swap")
    assert (last.swapped_out_blocks > 0) == (max(now.host_blocks_used for now in seen) > 0) == (preemption == "swap")
    assert ("swapped" in states) == (preemption == "swap")
    assert last.host_blocks_used == 0
    assert last.prefix_hit_tokens > 0


def test_what_is_only_cached_is_shown_and_counts_as_neither_used_nor_free() -> None:
    engine = make_engine()
    add(engine, "a", tuple(range(1, 11)))
    while engine.has_work:
        engine.step()
    now = checked(engine)
    assert (now.blocks_used, now.blocks_cached) == (0, 4)
    assert all(block["cached"] and not block["sequences"] for block in read_blocks(engine).render()["blocks"])
    add(engine, "b", tuple(range(1, 11)))
    engine.step()
    now = checked(engine)
    assert (now.prefix_query_tokens, now.prefix_hit_tokens) == (20, 8)


def test_evictions_are_counted_in_blocks() -> None:
    engine = make_engine(4)
    for prompt, expected in ((range(1, 9), (2, 0)), (range(20, 32), (4, 1)), (range(40, 52), (4, 4))):
        add(engine, "r", tuple(prompt), max_tokens=1)
        while engine.has_work:
            engine.step()
        now = checked(engine)
        assert (now.blocks_cached, now.evictions) == expected


def test_an_idle_engine_holds_nothing() -> None:
    now = checked(make_engine())
    assert (now.blocks_used, now.slots_filled, now.slots_waste_max, now.sharing_saved_fraction) == (0, 0, 0, 0.0)


def test_the_slots_of_states_are_counted_by_use() -> None:
    limits = EngineLimits(64, SIZE, 8, 16, 128, num_state_slots=8 + 10, snapshot_interval=8)
    engine = Engine(StatefulModel(), limits, (EOS,), None)
    for _ in range(2):
        add(engine, "a", tuple(range(1, 20)))
        while engine.has_work:
            engine.step()
            now = checked(engine)
            assert now.state_snapshots + now.state_slots_held + now.state_slots_free == 10
    assert (now.state_slots_held, now.states_restored, now.state_evictions) == (0, 1, 0)
    assert now.state_snapshots == 3, "after 8 and 16 tokens of the prompt, and 24 with the answer"
