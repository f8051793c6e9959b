"""Keeps redis-py from importing what Quire does not use."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

_METRICS = "opentelemetry.sdk.metrics"


def skip_metrics() -> None:
    """Let redis-py be imported without OpenTelemetry's metrics, which it imports where they are installed.

    They take 3 MiB and 60 ms of a process. Traces do not need them. In this process they cannot be imported any more.
    """
    if _METRICS not in sys.modules:
        sys.modules[_METRICS] = cast(ModuleType, None)
