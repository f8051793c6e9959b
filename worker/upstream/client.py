"""HTTP to one upstream: bounded in bytes and time, without redirects. Its key is in no log and in no error."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError

# Largest size of a line of a stream, and of a whole answer. A line has a token or a few, with their log-probabilities.
MAX_LINE_BYTES = 1 << 20
MAX_BODY_BYTES = 4 << 20
CONNECT_S = 5.0
# Longest time of an answer that is no stream.
ANSWER_S = 30.0
MAX_REASON = 500
# Statuses with which a server says that the request is wrong, and those of a server that is busy.
_REFUSALS, _BUSY = (400, 413, 422), (408, 425, 429, 503)


class UpstreamRefused(Exception):
    """The upstream refuses a request, and would refuse it again. The text is its reason."""


class UpstreamDown(Exception):
    """The upstream cannot be used now, and has computed nothing of a request."""


class UpstreamBusy(UpstreamDown):
    """The upstream answers, and takes no request now."""


class StreamBroken(Exception):
    """An answer has ended before its end."""


class UpstreamClient:
    """The connections to one upstream. idle_s, total_s: longest silence and duration of a stream."""

    def __init__(self, url: str, key: str, idle_s: float, total_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._idle_s = idle_s
        self._stream_timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S, sock_read=idle_s)
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                # A connection for each request: a server may close one that is kept just when a request uses it.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                headers={**headers, "Accept-Encoding": "identity"},
                # aiohttp refuses a line of more than twice this size.
                read_bufsize=MAX_LINE_BYTES // 2,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections. The next call opens new ones, perhaps on another event loop."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises UpstreamRefused, UpstreamDown, StreamBroken."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON that answers a body. Raises UpstreamRefused, UpstreamDown, StreamBroken."""
        return await self._whole("POST", path, body)

    async def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        limits = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        async with aclosing(self._chunks(method, path, body, limits)) as chunks:
            data = b""
            async for chunk in chunks:
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise StreamBroken(f"its answer has more than {MAX_BODY_BYTES} bytes")
        return _parse(data)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects of a stream of server-sent events until `[DONE]` or the end of the connection.

        Raises UpstreamRefused, UpstreamDown, StreamBroken.
        """
        heard_at = time.monotonic()
        async with aclosing(self._chunks("POST", path, body, self._stream_timeout, by_line=True)) as lines:
            async for line in lines:
                name, _, data = line.partition(b":")
                if name != b"data":  # a comment, an empty line, or another field of an event
                    if time.monotonic() - heard_at > self._idle_s:
                        raise StreamBroken("it sent comments for too long, and no token")
                    continue
                heard_at = time.monotonic()
                if data.strip() == b"[DONE]":
                    return
                event = _parse(data)
                if not isinstance(event, dict):
                    raise StreamBroken("an event of its stream is no JSON object")
                if error := event.get("error"):
                    self._raise_error(error)
                yield event

    async def _chunks(
        self, method: str, path: str, body: dict[str, Any] | None, limits: aiohttp.ClientTimeout, by_line: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body of an answer, in lines or in pieces of any size."""
        try:
            async with self._open().request(
                method, self.url + path, json=body, timeout=limits, allow_redirects=False
            ) as response:
                if response.status != 200:
                    self._raise_status(response.status, await response.content.read(MAX_LINE_BYTES))
                async for chunk in response.content if by_line else response.content.iter_any():
                    yield chunk
        except aiohttp.ClientConnectorError as error:
            raise UpstreamDown(f"no connection: {error.os_error.strerror or error.os_error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamDown(f"no connection within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise StreamBroken("it was silent, or its answer went on, for too long") from error
        except (aiohttp.ClientError, OSError) as error:
            raise StreamBroken(f"the connection broke: {self._told(str(error) or type(error).__name__)}") from error
        except (ValueError, HttpProcessingError) as error:  # the former of older versions of aiohttp
            raise StreamBroken(f"a line of its stream has more than {MAX_LINE_BYTES} bytes") from error

    def _raise_status(self, status: int, data: bytes) -> None:
        try:
            parsed = json.loads(data)
        except ValueError:
            parsed = data.decode(errors="replace")
        if isinstance(parsed, dict):
            parsed = parsed.get("error", parsed)
        why = self._told(_message(parsed))
        if status in _REFUSALS:
            raise UpstreamRefused(why or f"status {status}")
        if 300 <= status < 400:
            raise UpstreamDown(f"status {status}: it points to another address, and redirects are not followed")
        if status in (401, 403):
            raise UpstreamDown(f"status {status}: it refuses the key of --upstream-key-file, or wants one")
        if status in _BUSY:
            raise UpstreamBusy(f"status {status}: {why}")
        if status == 404:
            raise UpstreamDown(f"status {status}: {why}")
        raise StreamBroken(f"status {status}: {why}")

    def _raise_error(self, error: Any) -> None:
        """Raise the error of an event in a stream."""
        code = error.get("code") if isinstance(error, dict) else None
        why = self._told(_message(error))
        if code in _REFUSALS:
            raise UpstreamRefused(why)
        raise StreamBroken(f"it ended its stream with an error: {why}")

    def _told(self, text: str) -> str:
        """Return a text of the upstream as one short line, without the key, which some servers repeat."""
        line = " ".join(text.split())
        return (line.replace(self._key, "***") if self._key else line)[:MAX_REASON]


def _message(error: Any) -> str:
    """Return the message of an error object of OpenAI's API, or of a similar one."""
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StreamBroken("its answer is no JSON") from error
