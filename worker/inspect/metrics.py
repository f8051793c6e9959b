"""A worker's metrics, as Prometheus reads them. docs/operations.md explains each; a test keeps it complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.shared.broker import Broker
from quire.shared.telemetry.loop_lag import LoopLag
from quire.shared.telemetry.prometheus import Exposition, counter, gauge, histogram
from quire.worker.engine.engine import Engine
from quire.worker.engine.timing import StepTimes
from quire.worker.inspect.usage import EngineUsage, usage
from quire.worker.queue.claim_counts import ClaimCounts
from quire.worker.queue.committer import Committer
from quire.worker.queue.engine_thread import EngineThread


class _Family(NamedTuple):
    """A metric: either one value, or one per value of `label`. Values are names of fields of `EngineUsage`."""

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


class EngineReading(NamedTuple):
    """The engine at one moment."""

    usage: EngineUsage
    times: StepTimes


def read_engine(engine: Engine) -> EngineReading:
    """Call it on the engine's thread."""
    return EngineReading(usage(engine), engine.times.read())


class WorkerMetrics:
    """All that one worker counts."""

    def __init__(
        self,
        loop: EngineThread,
        broker: Broker,
        claims: ClaimCounts,
        committer: Committer,
        lag: LoopLag,
        info: Mapping[str, str],
    ) -> None:
        """info: labels that say how this worker computes (`backend.arithmetic_labels`), and the model's name."""
        self._loop = loop
        self._broker = broker
        self._claims = claims
        self._committer = committer
        self._lag = lag
        labels, values = tuple(info), {tuple(info.values()): 1.0}
        self._info = gauge("quire_worker_info", "Always 1; its labels say how this worker computes", values, labels)
        self._exposition = Exposition("worker")

    def render(self, reading: EngineReading) -> bytes:
        """The exposition of one reading."""
        return self._exposition.render(
            [
                self._info,
                *_engine(reading.usage),
                *_steps(reading.times),
                *self._queue(),
                *self._commits(),
                *self._threads(),
            ]
        )

    def _queue(self) -> Iterator[Metric]:
        claims = self._claims
        yield counter("quire_attempts", "Requests that this worker took to run", claims.first + claims.migrated)
        yield counter("quire_migrations", "Of these, requests that another attempt had begun", claims.migrated)
        corrupt = self._broker.corrupt
        yield counter(
            "quire_corrupt_messages",
            "What could not be decoded, by where it was",
            {"entry": corrupt["queue entry"], "request": corrupt["request"], "notice": corrupt["notice"]},
            ("where",),
        )
        yield histogram(
            "quire_queue_wait_seconds",
            "From acceptance to the first claim, by priority class",
            claims.waited_s,
            ("class",),
        )

    def _commits(self) -> Iterator[Metric]:
        counts, committer = self._committer.counts, self._committer
        yield gauge("quire_leases", "Requests that this worker holds the lease of", committer.num_running)
        yield counter("quire_leases_lost", "Leases that were found to be another's when renewed", counts.leases_lost)
        yield counter("quire_fenced_commits", "Attempts that a commit found overtaken", counts.fenced)
        yield counter(
            "quire_worker_requests", "Requests that this worker ended, by outcome", counts.ended, ("outcome",)
        )
        yield histogram("quire_commit_seconds", "A commit to Redis, of those that were answered", counts.seconds)
        yield counter("quire_commit_requests", "Requests in these commits", counts.requests)
        yield counter("quire_commit_failures", "Commits that Redis did not answer; they are repeated", counts.failed)
        yield counter("quire_log_resends", "Requests whose log had lost its end and got it again", counts.resent)
        yield gauge(
            "quire_uncommitted_requests",
            "Requests with tokens that wait for the next commit",
            committer.num_uncommitted,
        )

    def _threads(self) -> Iterator[Metric]:
        yield histogram(
            "quire_engine_gap_seconds", "Between two steps while there is work for the engine", self._loop.gaps
        )
        yield counter("quire_engine_idle_seconds", "Time in which the engine had nothing to do", self._loop.idle_s)
        yield histogram("quire_event_loop_lag_seconds", "How late the event loop wakes up", self._lag.seconds)


def _engine(usage: EngineUsage) -> Iterator[Metric]:
    for family in FAMILIES:
        metric = family.kind(family.name, family.help, labels=[family.label] if family.label else None)
        for value, field in family.values.items():
            metric.add_metric([value] if family.label else [], getattr(usage, field))
        yield metric


def _steps(times: StepTimes) -> Iterator[Metric]:
    yield histogram("quire_step_seconds", "Steps, by what they computed", times.seconds, ("kind",))
    yield histogram("quire_step_phase_seconds", "Parts of steps", times.phases, ("phase",))
    yield histogram("quire_step_sequences", "Sequences in a step: the batch size", times.sequences)
    yield histogram(
        "quire_step_tokens", "Tokens of a step, of those that had any of the phase", times.tokens, ("phase",)
    )
