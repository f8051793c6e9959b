"""An HTTP relay between a client and the server under test: it keeps each request, and may change one on its way.

The demo model calls no tool by itself, and agents leave the choice to the model: a test forces a call by a change.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

# Headers that belong to one connection, or to the length of a body that may change.
OWN = {"connection", "content-length", "host", "transfer-encoding"}
PIECE = 65_536


@dataclass
class Exchange:
    """A request as the client sent it, and the answer. body: None without JSON."""

    path: str
    body: Any
    status: int = 0
    answer: str = ""


class Relay:
    """Relays to one server while it is entered.

    change: called with each request whose body is a JSON object; changes the body in place.
    """

    def __init__(self, target: str, change: Callable[[Exchange], None] = lambda exchange: None) -> None:
        self.exchanges: list[Exchange] = []
        self.change = change
        address = urlsplit(target).netloc
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):  # the client left before the end of its answer
                    self._relay()

            do_POST = do_HEAD = do_GET

            def _relay(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                data = relay._take(self.path, self.rfile.read(length))
                exchange = relay.exchanges[-1]
                headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
                connection = http.client.HTTPConnection(address, timeout=300)
                connection.request(self.command, self.path, data, headers)
                reply = connection.getresponse()
                exchange.status = reply.status
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in OWN:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                answer = b""
                while piece := reply.read1(PIECE):
                    answer += piece
                    self.wfile.write(piece)
                exchange.answer = answer.decode()
                connection.close()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, path: str, data: bytes) -> bytes:
        body = json.loads(data) if data else None
        exchange = Exchange(path, json.loads(data) if data else None)
        self.exchanges.append(exchange)
        if not isinstance(body, dict):
            return data
        sent = Exchange(path, body)
        self.change(sent)
        return json.dumps(sent.body).encode()

    def calls(self, path: str) -> list[Exchange]:
        """The requests of a path, without its query."""
        return [one for one in self.exchanges if one.path.partition("?")[0] == path]

    def __enter__(self) -> Relay:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
