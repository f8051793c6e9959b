"""A minimal streaming server in one process for `pair.py`, without gateway, Redis and worker.

python -m quire.ops.benchmarks.stack.bare --port 8000 --step-ms 20 --log steps.msgpack

At each tick it writes one event to each open stream. Any additional delay at a client is caused by the machine and the
client itself. `quire.ops.benchmarks.stack.pair` compares it with the delay of gateway, Redis and worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgpack
import uvloop

_LENGTH = re.compile(rb"content-length: (\d+)\r\n", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


class BareCall(asyncio.Protocol):
    """One request of `quire.ops.benchmarks.stack.stream_client`; a GET is answered with 200 and no more."""

    def __init__(self, calls: dict[str, BareCall]) -> None:
        self._calls = calls
        self._data = b""
        self.request_id = ""
        self.left = self.tokens = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET "):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
            return
        length = _LENGTH.search(head + b"\r\n")
        if length is None or len(body) < int(length[1]):
            return
        self.left = json.loads(body)["max_tokens"]
        self.request_id = f"{id(self):032x}"
        self._calls[self.request_id] = self
        self.transport.write(_HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        self._calls.pop(self.request_id, None)

    def step(self) -> None:
        """Write the next token, and after the last one the end."""
        self.tokens += 1
        self.left -= 1
        choice = {"index": 0, "text": " word", "finish_reason": None, "logprobs": None}
        data = {"id": f"cmpl-{self.request_id}", "object": "text_completion", "model": "clockwork", "choices": [choice]}
        self.transport.write(chunk(f"id: {self.tokens}\ndata: {json.dumps(data)}\n\n"))
        if not self.left:
            self.transport.write(b"0\r\n\r\n")
            del self._calls[self.request_id]


async def serve(port: int, step_s: float) -> list[tuple[float, float, dict[str, int]]]:
    """Serve until SIGTERM. Returns the streams that each step wrote to."""
    loop = asyncio.get_running_loop()
    calls: dict[str, BareCall] = {}
    steps = []
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await loop.create_server(lambda: BareCall(calls), "127.0.0.1", port, backlog=1024)
    due = time.monotonic()
    while not over.is_set():
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        start = time.monotonic()
        due = max(start, due + step_s)
        streams = list(calls.values())
        for call in streams:
            call.step()
        if streams:
            steps.append((start, start, {call.request_id: call.tokens for call in streams}))
    server.close()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        steps = runner.run(serve(args.port, args.step_ms / 1000))
    if args.log:
        args.log.write_bytes(msgpack.packb(steps))


if __name__ == "__main__":
    main()
