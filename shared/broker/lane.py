"""One lane at one Redis: its keys and its scripts, for whoever has verbs to say there."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from quire.shared.keys import LaneKeys

log = logging.getLogger(__name__)

# How long the hash and the output log of a finished request stay: a client may come back for what it missed.
RETENTION_S = 600


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


class Script:
    """A script that Redis keeps; it is sent to one that does not have it."""

    def __init__(self, client: Redis, source: str) -> None:
        self._execute: Any = client.execute_command
        self._source = source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[Any] = (), args: Sequence[Any] = ()) -> Any:
        try:
            return await self._execute("EVALSHA", self._sha, len(keys), *keys, *args)
        except NoScriptError:  # nothing was carried out
            return await self._execute("EVAL", self._source, len(keys), *keys, *args)


def load_script(client: Redis, name: str) -> Script:
    """One of shared/scripts for one client."""
    folder = files("quire.shared") / "scripts"
    return Script(client, (folder / "_prelude.lua").read_text() + (folder / f"{name}.lua").read_text())


def text(value: Any) -> str:
    """What Redis returned, as text."""
    # What is not UTF-8 is none of ours: it is looked up, not found, and dropped, and stops no loop.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def pairs(values: list[str]) -> tuple[tuple[str, str], ...]:
    """A flat list of names and values, two by two."""
    return tuple(zip(values[::2], values[1::2], strict=True))
