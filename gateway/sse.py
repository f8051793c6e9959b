"""Server-sent events: what is constant in a stream is built once, and only the text is escaped per token.

Every event has one `data:` line and an `id:`, the number of tokens that the client has when it has the event.
"""

from __future__ import annotations

import json
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
KEEPALIVE = b": keep-alive\n\n"

# A JSON string with everything beyond ASCII escaped: no line end of any kind can get into an event.
quote: Any = encode_basestring_ascii
dumps = partial(json.dumps, separators=(",", ":"))


def event(position: int, data: str) -> str:
    """One event. `data` must be JSON without line ends."""
    return f"id: {position}\ndata: {data}\n\n"


def done(position: int) -> str:
    return event(position, "[DONE]")
