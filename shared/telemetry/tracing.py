"""Tracing: on where there is an OTLP endpoint. Without one nothing of OpenTelemetry is imported, and nothing is timed.

A trace goes from the gateway through the queue to the worker as a W3C `traceparent`, read strictly at both ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

OTLP_ENDPOINT_HELP = (
    "Where spans are sent, an OTLP/HTTP base URL such as http://collector:4318; without it, and without "
    "OTEL_EXPORTER_OTLP_ENDPOINT, there is no tracing."
)

# The standard variables that say the same; the first is a complete URL.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
TRACES_PATH = "/v1/traces"

# https://www.w3.org/TR/trace-context/#traceparent-header: version 00 has nothing behind the flags, later ones may.
MAX_TRACEPARENT = 55
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)


class TracingError(RuntimeError):
    """Tracing cannot start: which setting, which value, and the remedy."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span that another process made, or will make."""

    trace_id: int
    span_id: int
    flags: int

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    @classmethod
    def parse(cls, text: str) -> TraceContext | None:
        """What a `traceparent` says; None if it is none. Of a later version it is what version 00 has too."""
        match = _TRACEPARENT.match(text)
        if match is None or match[1] == "ff":
            return None
        rest = text[MAX_TRACEPARENT:]
        if rest and (match[1] == "00" or not rest.startswith("-")):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        return cls(trace_id, span_id, int(match[4], 16)) if trace_id and span_id else None


def start(process: str, instance: str, endpoint: str, environ: Mapping[str, str]) -> Tracer | None:
    """The tracer of this process; None where tracing is off. Raises TracingError.

    process: `gateway` or `worker`. endpoint: the setting; where it is empty the standard variables of `environ` count.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    source = "--otlp-endpoint (QUIRE_OTLP_ENDPOINT)"
    url = endpoint and endpoint.rstrip("/") + TRACES_PATH
    if not endpoint:
        source = next((name for name in ENDPOINT_VARIABLES if environ.get(name)), "")
        if not source:
            return None
        endpoint = environ[source]
        url = endpoint if source == ENDPOINT_VARIABLES[0] else endpoint.rstrip("/") + TRACES_PATH
        for name in PROTOCOL_VARIABLES:
            if (said := environ.get(name, PROTOCOL)) != PROTOCOL:
                raise TracingError(f"{name} is {said!r}; Quire sends traces by {PROTOCOL} only: set it so, or unset it")
    _check(endpoint, source)
    try:
        from quire.shared.telemetry.spans import Tracer
    except ImportError as error:
        raise TracingError(
            f"{source} asks for tracing, but the Python package {error.name} is missing: "
            "`pip install -c constraints.txt -e '.[tracing]'` in the checkout, or leave the endpoint out"
        ) from error
    return Tracer(process, instance, url, environ)


def _check(endpoint: str, source: str) -> None:
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
        parts = urlsplit("")
    if parts.username is not None or parts.password is not None:
        raise TracingError(
            f"{source} has a user or a password; give what the collector needs in OTEL_EXPORTER_OTLP_HEADERS"
        )
    if not is_url or parts.query or parts.fragment:
        raise TracingError(f"{source} is {endpoint!r}; give an http:// or https:// URL, such as http://127.0.0.1:4318")
