"""The metrics of a worker show the figures of its engine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from quire.shared.broker import Broker
from quire.shared.telemetry.loop_lag import LoopLag
from quire.worker.inspect.metrics import WorkerMetrics
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.queue.committer import Committer
from quire.worker.queue.counts import ClaimCounts
from quire.worker.queue.engine_thread import EngineThread
from tests.worker.inspect.test_snapshot import add, make_engine


def families() -> Iterator[Metric]:
    """The metrics of a worker whose engine has taken two steps."""
    engine = make_engine(host := 64, num_host_blocks=host // 8)
    add(engine, "a", tuple(range(1, 11)), n=4, temperature=1.0)
    engine.step()
    engine.step()
    broker = Broker(Redis(), "mock")
    thread = EngineThread(engine, lambda commits, computed: None, lambda: None)
    committer = Committer(broker, "w1", on_lost=lambda: None)
    metrics = WorkerMetrics(thread, broker, ClaimCounts(), committer, LoopLag(), {"model": "mock"}, 2)
    text = metrics.render(take_snapshot(engine).usage(), engine.times.read())
    yield from (one for one in text_string_to_metric_families(text.decode()) if one.name.startswith("quire_"))


def test_metrics_show_the_figures_of_the_engine() -> None:
    found = {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families()
        for sample in family.samples
    }
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
        "quire_block_copies_total": 3,
        "quire_forks_total": 3,
        "quire_step_seconds_count decode": 1,
        "quire_worker_info mock": 1,
        "quire_replaced_kernels": 2,
    }
    assert {name: found[name] for name in expected} == expected
