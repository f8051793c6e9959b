"""The metrics of a worker for Prometheus. docs/metrics.md explains each metric; a test keeps that list complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from prometheus_client.metrics_core import Metric

from quire.shared.telemetry.prometheus import Exposition, counter, gauge, histogram
from quire.worker.engine.timing import StepTimes
from quire.worker.inspect.snapshot import EngineUsage
from quire.worker.queue.engine_thread import EngineThread
from quire.worker.queue.metrics import QueueMetrics


class WorkerMetrics:
    """All metrics of one worker."""

    def __init__(
        self,
        thread: EngineThread,
        queue: QueueMetrics,
        info: Mapping[str, str],
        num_replaced_kernels: int = 0,
    ) -> None:
        """info: labels that say how this worker computes (`backend.arithmetic_labels`), and the model's name.

        num_replaced_kernels: by the self-test at start.
        """
        self._thread = thread
        self._queue = queue
        labels, values = tuple(info), {tuple(info.values()): 1.0}
        self._constant = [
            gauge("quire_worker_info", "Always 1; the labels say how this worker computes", values, labels),
            gauge(
                "quire_replaced_kernels",
                "Kernels that gave wrong results in the self-test at start and are replaced by slower ones",
                num_replaced_kernels,
            ),
        ]
        self._exposition = Exposition("worker")

    def render(self, usage: EngineUsage, times: StepTimes) -> bytes:
        """Return the exposition of one reading of the engine."""
        return self._exposition.render(
            [*self._constant, *_engine(usage), *_steps(times), *self._queue.families(), *self._threads()]
        )

    def _threads(self) -> Iterator[Metric]:
        yield histogram(
            "quire_engine_gap_seconds", "Time between two engine steps while there is work", self._thread.gaps
        )
        yield counter(
            "quire_engine_idle_seconds", "Time during which the engine had nothing to do", self._thread.idle_s
        )


def _engine(usage: EngineUsage) -> Iterator[Metric]:
    yield gauge("quire_kv_block_size_slots", "Token slots of a KV cache block", usage.block_size)
    yield gauge("quire_kv_capacity_blocks", "Blocks of the KV cache", usage.blocks_total)
    yield gauge(
        "quire_kv_blocks",
        "Blocks of the KV cache by state: used + cached + free are all; pinned and shared ones are among the used",
        {
            "used": usage.blocks_used,
            "free": usage.blocks_free,
            "cached": usage.blocks_cached,
            "pinned": usage.blocks_pinned,
            "shared": usage.blocks_shared,
        },
        ("state",),
    )
    yield gauge(
        "quire_kv_slots",
        "Slots of the used KV blocks: filled, promised to tokens that are not computed yet, or waste",
        {"filled": usage.slots_filled, "promised": usage.slots_promised, "waste": usage.slots_waste},
        ("state",),
    )
    yield gauge("quire_kv_waste_slots", "Allocated KV slots that hold no token", usage.slots_waste)
    yield gauge(
        "quire_kv_sequence_waste_slots_max",
        "Largest number of KV slots without a token in the block table of one sequence",
        usage.slots_waste_max,
    )
    yield gauge(
        "quire_kv_sharing_saved_blocks",
        "KV blocks that running sequences would need in addition if they shared none",
        usage.sharing_saved_blocks,
    )
    yield gauge(
        "quire_kv_sharing_saved_ratio",
        "Fraction of block table entries that sharing saves",
        usage.sharing_saved_fraction,
    )
    yield gauge(
        "quire_host_blocks",
        "Blocks of host memory for swapping, by state",
        {"used": usage.host_blocks_used, "free": usage.host_blocks_free},
        ("state",),
    )
    yield gauge(
        "quire_sequences",
        "Unfinished sequences in the engine, by state",
        {
            "running": usage.sequences_running,
            "waiting": usage.sequences_waiting,
            "swapped": usage.sequences_swapped,
        },
        ("state",),
    )
    yield gauge(
        "quire_prefill_limit_tokens",
        "Prompt tokens that the next step may compute besides decodes",
        usage.max_prefill_tokens,
    )
    yield counter("quire_engine_steps", "Steps of the engine", usage.steps)
    yield counter(
        "quire_interrupted_steps",
        "Steps of batch lines that ended early and are computed again, because a request of a higher class had arrived",
        usage.interrupted_steps,
    )
    yield counter(
        "quire_engine_tokens",
        "Tokens that the engine computed, by phase",
        {"prefill": usage.prefill_tokens, "decode": usage.decode_tokens},
        ("phase",),
    )
    yield counter(
        "quire_drafted_tokens",
        "Drafted tokens that steps computed, by the source of the draft",
        usage.drafted_tokens,
        ("source",),
    )
    yield counter(
        "quire_accepted_tokens",
        "Drafted tokens that the model chose too, by the source of the draft",
        usage.accepted_tokens,
        ("source",),
    )
    yield counter(
        "quire_saved_steps",
        "Steps that sequences took part in less, because drafted tokens were accepted",
        sum(usage.accepted_tokens.values()),
    )
    yield counter(
        "quire_prefix_cache_query_tokens",
        "Prompt tokens that were looked up in the prefix cache",
        usage.prefix_query_tokens,
    )
    yield counter(
        "quire_prefix_cache_hit_tokens", "Prompt tokens that the prefix cache supplied", usage.prefix_hit_tokens
    )
    yield gauge("quire_cache_pin_blocks", "Blocks of the prefix cache that calls have pinned", usage.cache_pin_blocks)
    yield counter(
        "quire_cache_pins",
        "Blocks that calls have pinned, and pins that ended: by their time, at a bound, or because memory was needed",
        asdict(usage.cache_pins),
        ("event",),
    )
    yield counter("quire_prefix_cache_evictions", "Cached blocks that were evicted to free memory", usage.evictions)
    spill = usage.spill
    yield counter(
        "quire_spilled_blocks",
        "Evicted blocks that went to host memory or to the disk, by tier",
        spill.kept,
        ("tier",),
    )
    yield counter(
        "quire_spill_read_blocks", "Evicted blocks that came back to the prefix cache, by tier", spill.read, ("tier",)
    )
    yield counter(
        "quire_spill_dropped_blocks",
        "Evicted blocks that were not kept, or not used again, by reason",
        spill.dropped,
        ("reason",),
    )
    yield counter(
        "quire_spill_slower_prefixes", "Prefixes that were computed because reading them is slower", spill.slower
    )
    yield gauge("quire_spill_blocks", "Evicted blocks that are kept now, by tier", spill.blocks, ("tier",))
    yield gauge("quire_spill_bytes", "Bytes of evicted blocks that are kept now, by tier", spill.num_bytes, ("tier",))
    yield gauge(
        "quire_state_slots",
        "Slots of recurrent states besides those of running sequences, by use",
        {"snapshot": usage.state_snapshots, "held": usage.state_slots_held, "free": usage.state_slots_free},
        ("state",),
    )
    yield counter("quire_state_restores", "Sequences that began with a snapshot of a state", usage.states_restored)
    yield counter("quire_state_evictions", "Snapshots of states evicted to free their slots", usage.state_evictions)
    images = usage.images
    yield counter(
        "quire_images",
        "Images of prompts, by whether the vision tower computed them or their embeddings were kept",
        {"tower": images.computed, "cache": images.found},
        ("source",),
    )
    yield counter("quire_image_tower_seconds", "Time of the vision tower", images.tower_s)
    yield gauge("quire_image_cache_bytes", "Bytes of embeddings of images that are kept", images.cached_bytes)
    yield counter(
        "quire_preemptions",
        "Preempted requests, by how they resume",
        {"recompute": usage.preemptions_recompute, "swap": usage.preemptions_swap},
        ("kind",),
    )
    yield counter("quire_displacements", "Requests preempted by a request of a higher priority class", usage.displaced)
    yield counter(
        "quire_swapped_blocks",
        "Blocks copied to host memory (out) and back (in)",
        {"out": usage.swapped_out_blocks, "in": usage.swapped_in_blocks},
        ("direction",),
    )
    yield counter("quire_block_copies", "Shared blocks copied before a write (copy on write)", usage.copies)
    yield counter("quire_forks", "Sequences that were forked from another one and share its blocks", usage.forks)


def _steps(times: StepTimes) -> Iterator[Metric]:
    yield histogram("quire_step_seconds", "Duration of engine steps, by what they computed", times.seconds, ("kind",))
    yield histogram("quire_step_phase_seconds", "Duration of the phases of engine steps", times.phases, ("phase",))
    yield histogram("quire_step_sequences", "Sequences in an engine step: the batch size", times.sequences)
    yield histogram(
        "quire_step_tokens", "Tokens of a phase in an engine step, if there were any", times.tokens, ("phase",)
    )
