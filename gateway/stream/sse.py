"""Server-sent events: what is constant in a stream is built once, and only the text is escaped per token.

Every event has one `data:` line and an `id:`, its place in the stream (`EventId`). Two kinds of client decide how this
is written. The `openai` SDK takes every blank line behind an event with an id for another event, and fails on its empty
data: so a comment ends with its line, without a blank one. Load generators built straight on aiohttp (vLLM's) cut the
stream at blank lines and take all of each piece but `data: ` for JSON: they get no ids, unless they say that they read
`text/event-stream`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Reverse proxies must not collect events.
    "X-Accel-Buffering": "no",
}
# A comment, which clients ignore and idle proxies do not.
KEEPALIVE = b": keep-alive\n"

# A JSON string with everything beyond ASCII escaped: no line end of any kind can get into an event.
quote: Any = encode_basestring_ascii
dumps = partial(json.dumps, separators=(",", ":"))


_ID = re.compile(r"(0|[1-9][0-9]{0,9})(?:\.([1-9][0-9]{0,5}))?", re.ASCII)


class EventId(NamedTuple):
    """The place of an event in its stream. No two events share one, and each is greater than all before it.

    Written `P`: the text up to token P of the request. Written `P.k`: the k-th event behind that, such as the opening
    of a choice (P is 0), the last text of a choice that was held back until it ended, its finish, the usage, and the
    end of the stream. It depends on the tokens alone, not on the portions in which they came, so that every gateway
    gives the same ids.
    """

    tokens: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.tokens}.{self.step}" if self.step else str(self.tokens)

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """None if `text` is not the id of an event."""
        found = _ID.fullmatch(text)
        return cls(int(found[1]), int(found[2] or 0)) if found else None


# Before the first event.
BEGINNING = EventId(0)


def takes_ids(headers: Mapping[str, str]) -> bool:
    """Whether the client that sent these headers reads ids, or stumbles over them."""
    return "aiohttp/" not in headers.get("User-Agent", "") or "text/event-stream" in headers.get("Accept", "")


def event(data: str) -> str:
    """One event, without its id. `data` must be JSON without line ends."""
    return f"data: {data}\n\n"
