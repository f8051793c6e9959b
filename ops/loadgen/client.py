"""The client that reads the clock: one streamed request at a time, with the time of every chunk that carries tokens.

The clock is read once per piece that the network hands over, before the piece is parsed. A failure of a request is
noted in its record and is never an exception.
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
# Less than servers keep an idle connection (uvicorn: 5 s), so that none is used while the server closes it.
KEEP_ALIVE_S = 4.0
MESSAGE_LENGTH = 300
BUFFER_LENGTH = 1 << 24

clock = time.perf_counter


@dataclass(slots=True)
class RequestRecord:
    """One request: what was asked, when it was due, sent and over, and when each chunk with tokens came (seconds).

    `last` is when the last token was there: it may have no text, and then only the reason for the end tells of it.
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
        """Tokens of the answer: what the server counted, else its chunks."""
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
    """Cuts a stream of bytes into the data of server-sent events; comments, ids and empty lines are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each line that `piece` completes. Raises ValueError for a line without end."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > BUFFER_LENGTH:
            raise ValueError("an event is longer than 16 MiB")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def new_session(timeout_s: float | None, api_key: str = "") -> aiohttp.ClientSession:
    """A session without a limit on connections; `timeout_s` None waits for ever."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


def encode(body: dict[str, Any]) -> bytes:
    """The bytes of a request, made before the clock runs."""
    return json.dumps(body, separators=(",", ":")).encode()


async def stream(session: aiohttp.ClientSession, url: str, body: bytes, record: RequestRecord) -> None:
    """Post `body` to `url` and fill `record`. Raises nothing but CancelledError."""
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
                    record.chunks.append(record.last)  # tokens without text: their end is the first that is seen
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
    """Whether the event stands for tokens: also one whose text is empty (half a character, a special token), but
    neither the one that only names the role nor the one that only says why the answer ended."""
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
    """What the body of an error says."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:MESSAGE_LENGTH] or "no message"
