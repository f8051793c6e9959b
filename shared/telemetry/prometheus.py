"""Histograms that are cheap enough for every step and every token, and the text format of Prometheus.

An observation costs one search in a short tuple and two additions, without a lock: one thread writes. All other work is
done per scrape: `counter`, `gauge` and `histogram` make the metric families. No label may have values that grow with
users or requests.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.shared.process.version import installed_version

__all__ = ["CONTENT_TYPE_LATEST", "Exposition", "Fading", "Histogram", "build_info", "counter", "gauge", "histogram"]

# Upper bounds of buckets, in seconds. For phases of a step and similar times: fine around a millisecond.
STEP_S = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.04, 0.06),
    *(0.1, 0.25, 1.0, 4.0),
)
# For the time between two tokens of a stream.
TOKEN_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0),
)
# For the times that users wait.
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
    *(5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0),
)
COUNTS = tuple(float(2**power) for power in range(15))

# Names of labels, or the values of a sample in the same order.
Labels = tuple[str, ...]
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


class Histogram:
    """Counts of observations by bucket. `bounds` are the rising upper bounds; one more bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        """Return a copy of the observations until now."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = self.counts.copy(), self.sum
        return copied


class Fading:
    """A decaying maximum: each value seen counts half after `half_life_s` seconds, a quarter after twice that."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._value = self._seen_at = 0.0

    def see(self, value: float, now: float) -> None:
        """Take a value into account. now: seconds of a monotonic clock."""
        if value >= self.at(now):
            self._value, self._seen_at = value, now

    def at(self, now: float) -> float:
        return self._value * math.exp2((self._seen_at - now) / self._half_life_s)


def counter(name: str, help: str, values: float | Mapping[Any, float], labels: Labels = ()) -> Metric:
    """Return a counter; `_total` is added to its name. `values`: one number, or numbers by the values of `labels`."""
    return _filled(CounterMetricFamily(name, help, labels=labels), values)


def gauge(name: str, help: str, values: float | Mapping[Any, float], labels: Labels = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, help, labels=labels), values)


def histogram(name: str, help: str, values: Histogram | Mapping[Any, Histogram], labels: Labels = ()) -> Metric:
    family = HistogramMetricFamily(name, help, labels=labels)
    for key, observed in _items(values):
        # Another thread may observe meanwhile: the copy of the counts is consistent in itself.
        buckets, at = [], 0
        for bound, count in zip((*map(_number, observed.bounds), "+Inf"), observed.counts.copy(), strict=True):
            at += count
            buckets.append((bound, at))
        family.add_metric(key, buckets, observed.sum)
    return family


def _filled(family: Family, values: float | Mapping[Any, float]) -> Family:
    for key, value in _items(values):
        family.add_metric(key, value)
    return family


def _items(values: Any) -> Iterable[tuple[list[str], Any]]:
    if not isinstance(values, Mapping):
        return [([], values)]
    return [([key] if isinstance(key, str) else list(key), value) for key, value in values.items()]


def _number(bound: float) -> str:
    return repr(float(bound))


def build_info(process: str) -> Metric:
    """Return the metric whose labels name process, version and Python."""
    values = {(process, installed_version("unknown"), platform.python_version()): 1.0}
    return gauge(
        "quire_build_info",
        "Constant 1; the labels give process, version and Python",
        values,
        ("process", "version", "python"),
    )


class Exposition(Collector):
    """A registry with the families of the latest scrape and those of the process (`process_...`)."""

    def __init__(self, process: str) -> None:
        self._families: list[Metric] = []
        self._build = build_info(process)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, families: Iterable[Metric]) -> bytes:
        """Return the text of one scrape, in CONTENT_TYPE_LATEST."""
        self._families = [self._build, *families]
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._families
