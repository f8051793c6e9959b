"""The format of server-sent events.

Every event has one `data:` line, and an `id:` that is its place in the stream (`EventId`). Two kinds of client
constrain the format:

- The `openai` SDK takes every blank line after an event with an id for another event, and fails on its empty data. So a
  comment ends with its line, without a blank one.
- Load generators that use aiohttp directly, such as vLLM's, split the stream at blank lines and parse everything except
  `data: ` as JSON. So events for such clients carry no ids unless they accept `text/event-stream`.
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
    # Keeps reverse proxies from buffering events.
    "X-Accel-Buffering": "no",
}
# A comment: clients ignore it, and it keeps proxies from closing an idle connection.
KEEPALIVE = b": keep-alive\n"
# The data of the last event of a complete stream (OpenAI API).
DONE = "[DONE]"

# Renders a JSON string in which everything outside ASCII is escaped, so that no line end can break an event.
quote: Any = encode_basestring_ascii
dumps = partial(json.dumps, separators=(",", ":"))


EVENT_ID = re.compile(r"(0|[1-9][0-9]{0,9})(?:\.([1-9][0-9]{0,5}))?", re.ASCII)


NO_USAGE = '"usage":null}\n\n'


def with_usage(data: str, usage: Mapping[str, Any]) -> str:
    """Return an event that ends with a usage of null with this usage; any other event as it is."""
    return f'{data.removesuffix(NO_USAGE)}"usage":{dumps(usage)}}}\n\n' if data.endswith(NO_USAGE) else data


class EventId(NamedTuple):
    """The place of an event in its stream. Ids are unique within a stream, and increase.

    `P` is the id of the text up to token P of the request. `P.k` is the id of the k-th event after that which brings no
    token: the opening of a choice (P is 0), text that was held back until a choice ended, a finish reason, the usage,
    the end of the stream. An id depends on the tokens alone, and not on how they were grouped into messages, so that
    every gateway gives the same ids.
    """

    tokens: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.tokens}.{self.step}" if self.step else str(self.tokens)

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """Return None if `text` is not the id of an event."""
        match = EVENT_ID.fullmatch(text)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


# The place before the first event.
BEGINNING = EventId(0)


def takes_ids(headers: Mapping[str, str]) -> bool:
    """Return True if the client with these request headers can parse events that have ids."""
    return "aiohttp/" not in headers.get("User-Agent", "") or "text/event-stream" in headers.get("Accept", "")


def event(data: str) -> str:
    """Render one event without its id. `data` must be JSON without line ends."""
    return f"data: {data}\n\n"
