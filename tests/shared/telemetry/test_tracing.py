"""Tracing starts only with a valid endpoint, and costs nothing without one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.shared.telemetry.tracing import TracingError, start


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_there_is_no_tracing(environ: dict[str, str]) -> None:
    assert start("gateway", "g", "", environ) is None


@pytest.mark.parametrize(
    ("endpoint", "environ", "words"),
    [
        (
            "collector:4318",
            {},
            "--otlp-endpoint (QUIRE_OTLP_ENDPOINT) is 'collector:4318'; give an http:// or https:// URL",
        ),
        ("ftp://collector", {}, "give an http:// or https:// URL"),
        ("http://", {}, "give an http:// or https:// URL"),
        ("http://collector:99999", {}, "give an http:// or https:// URL"),
        ("http://collector/?x=1", {}, "give an http:// or https:// URL"),
        ("http://me:hush@collector", {}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "nonsense"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'nonsense'"),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; Quire sends traces by http/protobuf only",
        ),
    ],
)
def test_a_wrong_endpoint_is_refused_with_its_name_and_the_remedy(
    endpoint: str, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(TracingError) as caught:
        start("gateway", "g", endpoint, environ)
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)


def test_an_endpoint_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "quire.shared.telemetry.spans"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        TracingError, match=r"opentelemetry\S* is missing: `pip install .* -e '\.\[tracing\]'` installs"
    ):
        start("gateway", "g", "http://127.0.0.1:4318", {})


def test_without_an_endpoint_nothing_to_trace_with_is_imported() -> None:
    program = (
        "import sys, quire.gateway.server.app, quire.worker.main, quire.worker.queue.attempt_spans\n"
        "from quire.shared.telemetry.tracing import start\n"
        "assert start('gateway', 'g', '', {}) is None\n"
        # redis-py imports OpenTelemetry's metrics by itself where they are installed.
        "ours = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'google.protobuf', 'requests',"
        "'quire.shared.telemetry.spans')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
