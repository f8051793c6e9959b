"""One lane at one Redis: its keys and its scripts, the base of all verbs."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from quire.shared.protocol.broker.scripts import Script, load_script
from quire.shared.protocol.keys import GROUP, LaneKeys

log = logging.getLogger(__name__)


def new_id() -> str:
    """Return 128 random bits in hexadecimal: a request id, an attempt token or an incarnation."""
    return secrets.token_hex(16)


class Lane:
    """The keys of a lane over one command client. Raises redis-py's RedisError when Redis fails."""

    def __init__(self, client: Redis, lane: str) -> None:
        self.client = client
        self.keys = LaneKeys(lane)
        # Number of corrupt values read from Redis, by kind. A corrupt value is dropped, or ends its request.
        self.corrupt: Counter[str] = Counter()

    def script(self, name: str) -> Script:
        """Return a script of shared/protocol/scripts; call it with `keys` and `args`."""
        return load_script(self.client, name)

    def note_corrupt(self, what: str, name: str, why: object) -> None:
        """Count a corrupt value; the first of each kind is logged."""
        self.corrupt[what] += 1
        if self.corrupt[what] == 1:
            log.error("%s %s is corrupt and was dropped (this is said once): %s", what, name, why)


def text(value: Any) -> str:
    """Decode a reply of Redis."""
    # Quire writes UTF-8 only. Other bytes are decoded to a name that does not exist, and so are dropped.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def pairs(values: list[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a flat list of names and values."""
    return tuple(zip(values[::2], values[1::2], strict=True))


async def create_group(client: Redis, stream: str) -> None:
    """Create a stream and the consumer group, unless they exist."""
    try:
        await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
