"""The metrics of a model host for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from quire.shared.telemetry.prometheus import WAIT_S, Exposition, Histogram, counter, gauge, histogram


class HostMetrics:
    """Counts of one host since its start."""

    def __init__(self) -> None:
        # By model.
        self.loads: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        # By the reason of `plan.Eviction`.
        self.evictions = Counter({"idle": 0, "room": 0, "slice": 0, "changed": 0, "removed": 0})
        self.load_s = Histogram(WAIT_S)
        self._exposition = Exposition("host")

    def render(self, states: Mapping[str, int]) -> bytes:
        """Return the exposition. states: models by state."""
        return self._exposition.render(
            [
                gauge("quire_host_models", "Models of --models-dir, by state", states, ("state",)),
                counter("quire_model_loads", "Models that were loaded", self.loads, ("model",)),
                counter("quire_model_load_failures", "Loads that failed", self.failures, ("model",)),
                histogram("quire_model_load_seconds", "Time from the start of a worker until it serves", self.load_s),
                counter("quire_model_evictions", "Models that were unloaded, by reason", self.evictions, ("reason",)),
            ]
        )
