"""What an engine shows: its snapshot, report of blocks, log of steps, and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.telemetry.loop_lag import LoopLag
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.speculation import SOURCES
from quire.worker.inspect.block_report import read_blocks
from quire.worker.inspect.metrics import WorkerMetrics
from quire.worker.inspect.snapshot import EngineUsage, take_snapshot
from quire.worker.pinned_prefixes import pin
from quire.worker.queue.committer import Committer
from quire.worker.queue.counts import ClaimCounts
from quire.worker.queue.engine_thread import EngineThread
from quire.worker.queue.metrics import QueueMetrics
from tests.support.mock_model import EOS, MockModel, StatefulModel, continuation

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


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_it_holds_in_every_step_of_a_crowd_that_runs_out_of_blocks(preemption: str) -> None:
    engine = make_engine(24, 24, preemption=preemption)
    pin(engine, "p", (7, 7, 7, 7, 7, 7))
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


def expected_blocks(engine: Engine) -> dict[int, tuple[list[str], int]]:
    """Owners and filled slots of each block that is not free, from the bookkeeping of the engine."""
    blocks = engine.scheduler.blocks
    found: dict[int, tuple[list[str], int]] = {block: ([], SIZE) for block in blocks.known_blocks()}
    held = [
        (f"{group.request_id}/{one.choice}", one.block_table, max(one.num_computed, one.num_stored))
        for group in engine.groups.all_groups()
        for one in group.unfinished
    ]
    held += [("", prefix.blocks, prefix.num_tokens) for prefix in blocks.pinned]
    for block in {block for _, table, _ in held for block in table}:
        owners = [name for name, table, _ in held if block in table and name]
        slots = [tokens - SIZE * table.index(block) for _, table, tokens in held if block in table]
        found[block] = owners, max(0, min(SIZE, max(slots)))
    return found


def test_each_block_has_its_owners_and_slots_whatever_runs() -> None:
    engine = make_engine(24, 24, preemption="swap")
    pin(engine, "p", (7, 7, 7, 7, 7, 7))
    for i in range(4):
        add(engine, f"n{i}", (7, 7, 7, 7, 7, 7, i + 1), n=2, temperature=1.0, max_tokens=16)
    add(engine, "beam", (5, 4, 3), beam_width=3, max_tokens=12)
    num_shared = 0
    while engine.has_work:
        engine.step()
        report = json.loads(json.dumps(read_blocks(engine).render()))
        shown = {one["id"]: (one["sequences"], one["filled"]) for one in report["blocks"]}
        assert shown == expected_blocks(engine)
        ref_counts = engine.scheduler.blocks.ref_counts
        assert [one["refs"] for one in report["blocks"]] == [ref_counts[one["id"]] for one in report["blocks"]]
        num_shared += sum(one["shared"] for one in report["blocks"])
    assert num_shared > 0
    assert [one["id"] for one in report["blocks"] if one["pinned"]] == engine.scheduler.blocks.pinned[0].blocks


def families(engine: Engine) -> Iterator[Metric]:
    """The metrics of a worker with this engine."""
    broker = Broker(Redis(), "mock")
    thread = EngineThread(engine, lambda commits, computed: None, lambda: None)
    committer = Committer(broker, "w1", on_lost=lambda: None)
    metrics = WorkerMetrics(thread, QueueMetrics(broker, ClaimCounts(), committer, LoopLag()), {"model": "mock"}, 2)
    text = metrics.render(take_snapshot(engine).usage(), engine.times.read())
    yield from (one for one in text_string_to_metric_families(text.decode()) if one.name.startswith("quire_"))


def samples(engine: Engine) -> dict[str, float]:
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families(engine)
        for sample in family.samples
    }


def test_metrics_show_the_figures_of_the_engine() -> None:
    engine = make_engine(host := 64, num_host_blocks=host // 8)
    add(engine, "a", tuple(range(1, 11)), n=4, temperature=1.0)
    engine.step()
    engine.step()
    found = samples(engine)
    expected = {
        "quire_kv_block_size_slots": 4,
        "quire_kv_capacity_blocks": 64,
        "quire_kv_blocks used": 6,
        "quire_kv_blocks shared": 2,
        "quire_kv_slots filled": 20,
        "quire_kv_slots waste": 0,
        "quire_host_blocks free": 8,
        "quire_sequences running": 4,
        "quire_engine_steps_total": 2,
        "quire_engine_tokens_total prefill": 10,
        "quire_engine_tokens_total decode": 4,
        "quire_prefix_cache_query_tokens_total": 10,
        "quire_saved_steps_total": 0,
        "quire_block_copies_total": 3,
        "quire_forks_total": 3,
        "quire_step_seconds_count decode": 1,
        "quire_worker_info mock": 1,
        "quire_replaced_kernels": 2,
    }
    assert {name: found[name] for name in expected} == expected


def test_metrics_count_drafted_tokens_by_source() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.drafts = Drafts(engine.groups, None)
    answer = continuation((1, 2, 3), 30, ignore_eos=True)
    prediction = (*answer[:8], answer[8] + 1, *answer[9:20])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add(GenerationRequest("a", "mock", (1, 2, 3), params, prediction=prediction))
    items = []
    while engine.has_work:
        items += engine.step()
    [outcome] = [item.outcome for item in items if item.outcome]
    assert outcome.prediction is not None
    accepted, rejected = outcome.prediction
    assert accepted >= 7
    assert rejected >= 11
    found = samples(engine)
    expected = {f"quire_{kind}_tokens_total {source}": 0 for kind in ("drafted", "accepted") for source in SOURCES}
    expected |= {
        "quire_drafted_tokens_total prediction": accepted + rejected,
        "quire_accepted_tokens_total prediction": accepted,
        "quire_saved_steps_total": accepted,
        "quire_engine_steps_total": 30 - accepted,
        # All tokens but the one of the prompt's step are decoded.
        "quire_engine_tokens_total decode": 29,
        "quire_step_tokens_sum decode": 29,
        "quire_step_sequences_sum": 30 - accepted,
    }
    assert {name: found[name] for name in expected} == expected
