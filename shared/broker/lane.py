"""One lane at one Redis: its keys and its scripts, for whoever has verbs to say there."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from typing import Any

from redis.asyncio import Redis

from quire.shared.broker.scripts import Script, load_script
from quire.shared.keys import LaneKeys

log = logging.getLogger(__name__)


def new_id() -> str:
    """128 random bits, hexadecimal: request ids, attempt tokens and incarnations."""
    return secrets.token_hex(16)


class Lane:
    """The keys of a lane over one command connection pool. Raises redis-py's RedisError when Redis fails."""

    def __init__(self, client: Redis, lane: str) -> None:
        self.client = client
        self.keys = LaneKeys(lane)
        # What was found in Redis that cannot be read and was dropped, or ended its request: by what it is.
        self.corrupt: Counter[str] = Counter()

    def script(self, name: str) -> Script:
        """One of shared/scripts: call it with `keys` and `args`."""
        return load_script(self.client, name)

    def note_corrupt(self, what: str, name: str, why: object) -> None:
        """Count something that is corrupt; the first of each kind is logged."""
        self.corrupt[what] += 1
        if self.corrupt[what] == 1:
            log.error("%s %s is corrupt and was dropped (this is said once): %s", what, name, why)


def text(value: Any) -> str:
    """What Redis returned, as text."""
    # What is not UTF-8 is none of ours: it is looked up, not found, and dropped, and stops no loop.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def pairs(values: list[str]) -> tuple[tuple[str, str], ...]:
    """A flat list of names and values, two by two."""
    return tuple(zip(values[::2], values[1::2], strict=True))
