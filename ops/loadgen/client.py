"""The measuring client: sends one streamed request and records the time of every chunk with tokens.

The clock is read once per piece of data from the network, before the piece is parsed. A failed request is noted in its
record and never raises an exception.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CONNECT_TIMEOUT_S = 10.0
# Shorter than servers keep idle connections (uvicorn: 5 s), so that no request meets a connection that is closing.
KEEP_ALIVE_S = 4.0
MESSAGE_LENGTH = 300
BUFFER_LENGTH = 1 << 24

clock = time.perf_counter


@dataclass(slots=True)
class RequestRecord:
    """One request: the requested lengths, and its times in seconds of `clock`.

    due, sent, ended: when the request was planned, sent and finished. chunks: arrival of each chunk with tokens. last:
    arrival of the last token, which can have no text and then comes with the finish reason. error: the kind of failure;
    empty for a completed request.
    """

    index: int
    input_tokens: int
    output_tokens: int
    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    last: float = 0.0
    chunks: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as counted by the server, or else the number of chunks."""
        return len(self.chunks) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def e2e_s(self) -> float:
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.last - self.chunks[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    def fail(self, kind: str, message: str) -> None:
        self.error, self.message = kind, " ".join(message.split())[:MESSAGE_LENGTH]


class EventParser:
    """Splits a stream of bytes into the data of server-sent events. Comments, ids and empty lines are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each line that `piece` completes. Raise ValueError for an endless line."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > BUFFER_LENGTH:
            raise ValueError("an event is longer than 16 MiB")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def new_session(timeout_s: float | None, api_key: str = "", keep_alive: bool = True) -> aiohttp.ClientSession:
    """Return a session with any number of connections.

    timeout_s: limit of a whole request; None for no limit. keep_alive: False opens a connection for each request.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        if keep_alive
        else aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


def encode(body: dict[str, Any]) -> bytes:
    """Encode the body of a request. Call this before the clock of the request starts."""
    return json.dumps(body, separators=(",", ":")).encode()


async def stream(session: aiohttp.ClientSession, url: str, body: bytes, record: RequestRecord) -> None:
    """Post `body` to `url` and fill `record`. The only exception is CancelledError."""
    record.sent = clock()
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                text = (await response.content.read(65536)).decode(errors="replace")
                record.fail(f"status {response.status}", refusal(text))
                return
            await _read(response.content, record)
    except TimeoutError:
        record.fail("timeout", f"no end after {clock() - record.sent:.1f} s")
    except aiohttp.ClientConnectorError as error:
        record.fail("no connection", str(error))
    except (aiohttp.ClientError, OSError) as error:
        record.fail("broken off", str(error) or type(error).__name__)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        record.fail("not understood", f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        record.fail("cut short", "the run was stopped")
        raise
    finally:
        record.ended = clock()


async def _read(content: aiohttp.StreamReader, record: RequestRecord) -> None:
    parser = EventParser()
    async for piece in content.iter_any():
        now = clock()
        for data in parser.feed(piece):
            if data == b"[DONE]":
                if not record.chunks and record.completion_tokens and record.last:
                    record.chunks.append(record.last)  # tokens without text: only the finish reason showed them
                if not record.chunks:
                    record.fail("empty answer", "the stream ended without a token")
                return
            event = json.loads(data)
            if error := event.get("error"):
                record.fail("error event", str(error.get("message", error) if isinstance(error, dict) else error))
                return
            if event.get("choices"):
                record.last = now
            if _has_token(event):
                record.chunks.append(now)
            if usage := event.get("usage"):
                record.prompt_tokens = int(usage["prompt_tokens"])
                record.completion_tokens = int(usage["completion_tokens"])
    record.fail("broken off", "the stream ended before its end was said")


def _has_token(event: dict[str, Any]) -> bool:
    """Return whether the event stands for tokens.

    An event with an empty text counts (a part of a character, a special token). An event that only names the role or
    the finish reason does not.
    """
    choices = event.get("choices")
    if not choices:
        return False
    choice = choices[0]
    goes_on = choice.get("finish_reason") is None
    if "text" in choice:
        return bool(choice["text"]) or goes_on
    delta = choice.get("delta") or {}
    if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
        return True
    return goes_on and "content" in delta and "role" not in delta


def refusal(text: str) -> str:
    """Return the message in the body of an error response."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:MESSAGE_LENGTH] or "no message"
