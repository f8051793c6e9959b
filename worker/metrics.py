"""The engine's metrics, as Prometheus reads them. docs/operations.md explains each; a test keeps it complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.engine.usage import Usage

__all__ = ["CONTENT_TYPE_LATEST", "EngineMetrics"]


class _Family(NamedTuple):
    """A metric: either one value, or one per value of `label`. Values are names of fields of `Usage`."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    help: str
    label: str
    values: dict[str, str]


def _gauge(name: str, help: str, label: str = "", **values: str) -> _Family:
    return _Family(GaugeMetricFamily, name, help, label, values)


def _counter(name: str, help: str, label: str = "", **values: str) -> _Family:
    return _Family(CounterMetricFamily, name, help, label, values)


FAMILIES = (
    _gauge("quire_kv_block_size_slots", "Slots of a block, one token each", value="block_size"),
    _gauge("quire_kv_capacity_blocks", "Blocks of the KV cache", value="blocks_total"),
    _gauge(
        "quire_kv_blocks",
        "Blocks of the KV cache by state: used + cached + free are all; pinned and shared ones are among the used",
        "state",
        used="blocks_used",
        free="blocks_free",
        cached="blocks_cached",
        pinned="blocks_pinned",
        shared="blocks_shared",
    ),
    _gauge(
        "quire_kv_slots",
        "Slots of the used blocks: filled, promised to tokens that are yet to be computed, or waste",
        "state",
        filled="slots_filled",
        promised="slots_promised",
        waste="slots_waste",
    ),
    _gauge("quire_kv_waste_slots", "Slots of used blocks that are of no token", value="slots_waste"),
    _gauge(
        "quire_kv_sequence_waste_slots_max",
        "Slots that are of no token in the block table of one sequence, at most",
        value="slots_waste_max",
    ),
    _gauge(
        "quire_kv_sharing_saved_blocks",
        "Blocks that running sequences would need on top if they shared none",
        value="sharing_saved_blocks",
    ),
    _gauge(
        "quire_kv_sharing_saved_ratio", "The same, as a share of what they would need", value="sharing_saved_fraction"
    ),
    _gauge(
        "quire_host_blocks",
        "Blocks of host memory for swapping, by state",
        "state",
        used="host_blocks_used",
        free="host_blocks_free",
    ),
    _gauge(
        "quire_sequences",
        "Unfinished sequences in the engine",
        "state",
        running="sequences_running",
        waiting="sequences_waiting",
        swapped="sequences_swapped",
    ),
    _gauge(
        "quire_prefill_limit_tokens",
        "Prompt tokens that the next step may take beside decodes",
        value="max_prefill_tokens",
    ),
    _counter("quire_engine_steps", "Steps of the engine", value="steps"),
    _counter("quire_engine_tokens", "Tokens computed", "phase", prefill="prefill_tokens", decode="decode_tokens"),
    _counter("quire_prefix_cache_query_tokens", "Prompt tokens that were looked up", value="prefix_query_tokens"),
    _counter(
        "quire_prefix_cache_hit_tokens",
        "Prompt tokens that were found and not computed again",
        value="prefix_hit_tokens",
    ),
    _counter("quire_prefix_cache_evictions", "Cached blocks that made room", value="evictions"),
    _counter(
        "quire_preemptions",
        "Requests that gave way, by how they come back",
        "kind",
        recompute="preemptions_recompute",
        swap="preemptions_swap",
    ),
    _counter("quire_displacements", "Preemptions by a request of a higher class", value="displaced"),
    _counter(
        "quire_swapped_blocks",
        "Blocks copied to host memory and back",
        "direction",
        out="swapped_out_blocks",
        **{"in": "swapped_in_blocks"},
    ),
    _counter(
        "quire_block_copies", "Blocks copied because they were shared and written (copy on write)", value="copies"
    ),
    _counter("quire_forks", "Sequences that began with the blocks of another", value="forks"),
)


class EngineMetrics(Collector):
    """A registry of its own, filled from the latest reading of the engine."""

    def __init__(self) -> None:
        self._usage: Usage | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, usage: Usage) -> bytes:
        """The exposition of one reading."""
        self._usage = usage
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        if self._usage is None:
            return
        for family in FAMILIES:
            metric = family.kind(family.name, family.help, labels=[family.label] if family.label else None)
            for value, field in family.values.items():
                metric.add_metric([value] if family.label else [], getattr(self._usage, field))
            yield metric
