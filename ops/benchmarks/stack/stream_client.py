"""A streaming client with minimal work per event, so that it measures the server and not itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

MODEL = "clockwork"
_ID = re.compile(rb"id: (\d+)(?:\.\d+)?\n")
_REQUEST = re.compile(rb'"id":\s*"cmpl-([0-9a-f]+)"')


class Stream(asyncio.Protocol):
    """One request, with the received data and its times. While tokens arrive it only reads the clock."""

    def __init__(self, port: int, max_tokens: int, index: int) -> None:
        body = {"model": MODEL, "prompt": [2 + index % 1000, 3, 4], "max_tokens": max_tokens, "ignore_eos": True}
        text = json.dumps(body | {"stream": True, "temperature": 0})
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(text)}\r\n\r\n{text}"
        ).encode()
        self.chunks: list[tuple[float, bytes]] = []
        self.sent_at = 0.0
        self.first = asyncio.get_running_loop().create_future()
        self.ended = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.sent_at = time.monotonic()
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.monotonic(), data))
        if not self.first.done() and b"id: " in data:
            self.first.set_result(None)
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.first, self.ended):
            if not future.done():
                future.set_result(None)

    @property
    def request_id(self) -> str:
        match = _REQUEST.search(b"".join(data for _, data in self.chunks[:4]))
        assert match, self.chunks[:2]
        return match[1].decode()

    def arrivals(self) -> dict[int, float]:
        """Return the arrival time of each token, counted from 1. An event can bring several tokens."""
        times: dict[int, float] = {}
        reached, rest = 0, b""
        for at, data in self.chunks:
            data = rest + data
            end = data.rfind(b"\n\n") + 1
            for token in _ID.findall(data, 0, end):
                times |= dict.fromkeys(range(reached + 1, int(token) + 1), at)
                reached = int(token)
            rest = data[end:]
        return times


async def open_stream(port: int, max_tokens: int, index: int = 0) -> Stream:
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(port, max_tokens, index), "127.0.0.1", port)
    return stream
