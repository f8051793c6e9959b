"""A client that does not read."""

from __future__ import annotations

import json
import socket
import urllib.parse
from typing import Any


class Stalling:
    """A client that requests a long answer and reads only when the test tells it to."""

    def __init__(self, url: str, asks: dict[str, Any]) -> None:
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.socket = socket.socket()
        # Small segments and buffers keep the kernel from buffering the whole answer.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        self.socket.connect((parts.hostname, parts.port))
        self.socket.settimeout(30)
        data = json.dumps(asks).encode()
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: "
        self.socket.sendall(f"{head}{len(data)}\r\n\r\n".encode() + data)
        self.received = b""

    def read(self, count: int) -> bool:
        """Read up to `count` bytes; return False at the end of the connection, orderly or not."""
        try:
            data = self.socket.recv(count)
        except ConnectionResetError:
            return False
        self.received += data
        return bool(data)

    def events(self) -> list[str]:
        assert b" 200 " in self.received[:20], self.received
        return [line[6:] for line in self.received.decode().split("\n") if line.startswith("data: ")]

    def text(self) -> str:
        choices = [json.loads(data).get("choices", ()) for data in self.events() if not data.startswith("[DONE]")]
        return "".join(choice["text"] for found in choices for choice in found)

    def close(self) -> None:
        self.socket.close()
