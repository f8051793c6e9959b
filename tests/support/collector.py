"""A real OTLP/HTTP receiver: what the processes under test send is decoded and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_S = 60.0


@dataclass
class Received:
    """One span, as it came over the wire."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: list[str]
    links: list[tuple[str, str]]
    resource: dict[str, Any] = field(default_factory=dict)


class Collector:
    """The spans that came, in the order in which they came."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.bodies: list[bytes] = []
        self._changed = threading.Condition()
        self.url = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            for resource in request.resource_spans:
                about = _plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.append(
                            Received(
                                name=span.name,
                                service=about["service.name"],
                                trace_id=span.trace_id.hex(),
                                span_id=span.span_id.hex(),
                                parent_id=span.parent_span_id.hex(),
                                kind=span.kind,
                                began_ns=span.start_time_unix_nano,
                                ended_ns=span.end_time_unix_nano,
                                failed=span.status.code == 2,
                                attributes=_plain(span.attributes),
                                events=[event.name for event in span.events],
                                links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                                resource=about,
                            )
                        )
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[Received]], Any], timeout_s: float = WAIT_S) -> list[Received]:
        """Wait until the spans are such; all of them."""
        with self._changed:
            came = self._changed.wait_for(lambda: condition(self.spans), timeout_s)
            assert came, [(span.service, span.name, span.attributes) for span in self.spans]
            return list(self.spans)

    def trace(self, trace_id: str, names: set[str]) -> dict[str, Received]:
        """The spans of a trace by name, once there is one of each name."""
        found = self.wait(lambda spans: names <= {span.name for span in spans if span.trace_id == trace_id})
        return {span.name: span for span in found if span.trace_id == trace_id}


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path != "/v1/traces":
                return self.send_error(404)
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return None

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
