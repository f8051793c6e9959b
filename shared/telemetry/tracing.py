"""Starts tracing if an OTLP endpoint is set. Otherwise OpenTelemetry is not imported and nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.shared.process.errors import StartError
from quire.shared.process.version import install_command

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

OTLP_ENDPOINT_HELP = (
    "OTLP/HTTP base URL to which spans are sent, such as http://collector:4318. If neither this nor "
    "OTEL_EXPORTER_OTLP_ENDPOINT is set, tracing is off."
)

# Standard variables for the endpoint; the first is a complete URL.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
TRACES_PATH = "/v1/traces"


class TracingError(StartError):
    """Tracing cannot start. The text names the setting, its value and the remedy."""


def start(process: str, instance: str, endpoint: str, environ: Mapping[str, str]) -> Tracer | None:
    """Return the tracer of this process; None if tracing is off. Raise TracingError.

    process: `gateway` or `worker`. endpoint: the setting; if it is empty, the standard variables of `environ` apply.
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
            f"`{install_command('tracing')}` installs it; or leave the endpoint out"
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
