"""The metrics of a worker's queue for Prometheus: claims, leases and commits, and the delay of the event loop."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from quire.shared.protocol.broker import Broker
from quire.shared.telemetry.loop_lag import LoopLag
from quire.shared.telemetry.prometheus import counter, gauge, histogram
from quire.worker.queue.committer import Committer
from quire.worker.queue.counts import ClaimCounts


class QueueMetrics:
    """The metrics that every worker has, whatever computes its answers."""

    def __init__(self, broker: Broker, claims: ClaimCounts, committer: Committer, lag: LoopLag) -> None:
        self._broker = broker
        self._claims = claims
        self._committer = committer
        self._lag = lag

    def families(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        yield from self._queue()
        yield from self._commits()
        yield histogram("quire_event_loop_lag_seconds", "Delay with which the event loop wakes up", self._lag.seconds)

    def _queue(self) -> Iterator[Metric]:
        claims, corrupt = self._claims, self._broker.corrupt
        yield counter("quire_attempts", "Requests that this worker claimed", claims.first + claims.migrated)
        yield counter("quire_migrations", "Claimed requests that continue an earlier attempt", claims.migrated)
        yield counter(
            "quire_hopeless_requests",
            "Waiting requests that ended at their claim, because they could not end before their deadlines",
            self._broker.hopeless,
        )
        yield counter("quire_prefix_claims", "First claims of known prefixes, by way", claims.placed, ("placement",))
        yield counter(
            "quire_corrupt_messages",
            "Messages that could not be decoded, by where they were found",
            {"entry": corrupt["queue entry"], "request": corrupt["request"], "notice": corrupt["notice"]},
            ("where",),
        )
        yield histogram(
            "quire_queue_wait_seconds",
            "Time from the acceptance of a request to its first claim, by priority class",
            claims.waited_s,
            ("class",),
        )

    def _commits(self) -> Iterator[Metric]:
        counts, committer = self._committer.counts, self._committer
        yield gauge("quire_leases", "Requests whose leases this worker holds", committer.num_running)
        yield counter(
            "quire_leases_lost", "Leases that belonged to another attempt when they were renewed", counts.leases_lost
        )
        yield counter("quire_fenced_commits", "Attempts that a commit found superseded", counts.fenced)
        yield counter(
            "quire_worker_requests", "Requests that this worker finished, by outcome", counts.ended, ("outcome",)
        )
        yield histogram(
            "quire_service_estimate_ratio",
            "Duration of requests from their claim to their end, over what the pace of the engine let expect",
            committer.errors.ratios,
        )
        yield histogram("quire_commit_seconds", "Duration of commits that Redis answered", counts.seconds)
        yield counter("quire_commit_requests", "Requests in commits that Redis answered", counts.requests)
        yield counter("quire_commit_failures", "Commits that Redis did not answer and that are repeated", counts.failed)
        yield counter("quire_log_resends", "Requests whose output log had lost its end and got it again", counts.resent)
        yield gauge(
            "quire_uncommitted_requests",
            "Requests with tokens that wait for the next commit",
            committer.num_uncommitted,
        )
