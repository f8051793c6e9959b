"""Server-sent events: what is constant in a stream is built once, and only the text is escaped per token.

Every event has one `data:` line and an `id:`, the number of tokens that the client has when it has the event. Two kinds
of client decide how this is written. The `openai` SDK takes every blank line behind an event with an id for another
event, and fails on its empty data: so a comment ends with its line, without a blank one. Load generators built
straight on aiohttp (vLLM's) cut the stream at blank lines and take all of each piece but `data: ` for JSON: they get
no ids, unless they say that they read `text/event-stream`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Reverse proxies must not collect events.
    "X-Accel-Buffering": "no",
}
# A comment, which clients ignore and idle proxies do not.
KEEPALIVE = b": keep-alive\n"

# Writes the `id:` line of an event, or nothing for clients that stumble over it.
Mark = Callable[[int], str]

# A JSON string with everything beyond ASCII escaped: no line end of any kind can get into an event.
quote: Any = encode_basestring_ascii
dumps = partial(json.dumps, separators=(",", ":"))


def mark_for(headers: Mapping[str, str]) -> Mark:
    """How to mark events for the client that sent these headers."""
    stumbles = "aiohttp/" in headers.get("User-Agent", "") and "text/event-stream" not in headers.get("Accept", "")
    return _no_id if stumbles else _id


def _id(position: int) -> str:
    return f"id: {position}\n"


def _no_id(position: int) -> str:
    return ""


def event(mark: str, data: str) -> str:
    """One event. `data` must be JSON without line ends."""
    return f"{mark}data: {data}\n\n"
