"""Loads the Lua scripts of shared/protocol/scripts for a Redis client."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from quire.shared.protocol.keys import (
    BATCH_RETENTION_S,
    DEFAULT_CLASS,
    FORGET_WORKER_S,
    GROUP,
    HANDED,
    HIDDEN_RETENTION_S,
    IDEMPOTENCY_S,
    LARGE_BYTES,
    LOG_BYTES_PER_TOKEN,
    MAX_AUDIT,
    MAX_DEAD,
    MAX_RETENTION_S,
    PRIORITY_CLASSES,
    QUEUES,
    RETENTION_S,
    STORED_BYTES,
    USAGE_S,
    WAITING,
    WORKER_TTL_S,
)
from quire.shared.protocol.messages import VERSION
from quire.shared.protocol.share import (
    COUNTER_UNITS,
    DEFAULT_WEIGHT,
    FLOOR,
    INPUT_COST,
    MAX_COUNTERS,
    OUTPUT_COST,
    USER_COUNTERS_S,
)

# Scripts about files and batches, which have the functions of `_batches.lua` besides.
BATCH_SCRIPTS = frozenset(
    (
        "add_batch",
        "begin_batch",
        "cancel_batch",
        "claim_window",
        "close_window",
        "delete_file",
        "end_window",
        "renew_window",
        "write_file",
    )
)
# Scripts that have the functions of `_affinity.lua` besides.
AFFINITY_SCRIPTS = frozenset(("claim", "read", "submit"))
# Scripts that have the functions of `_deadlines.lua` besides.
DEADLINE_SCRIPTS = frozenset(("claim", "submit"))
# Constants that Lua and Python share: local variables at the top of every script.
_CONSTANTS: dict[str, int | str | Sequence[str]] = {
    "MESSAGE_VERSION": VERSION,
    "GROUP": GROUP,
    "HANDED": HANDED,
    "QUEUES": QUEUES,
    "WAITING": WAITING,
    "PRIORITY_CLASSES": PRIORITY_CLASSES,
    "DEFAULT_CLASS": DEFAULT_CLASS,
    "FORGET_WORKER_MS": 1000 * FORGET_WORKER_S,
    "MAX_DEAD": MAX_DEAD,
    "MAX_AUDIT": MAX_AUDIT,
    "USAGE_S": USAGE_S,
    "BATCH_RETENTION_S": BATCH_RETENTION_S,
    "MAX_RETENTION_S": MAX_RETENTION_S,
    "RETENTION_S": RETENTION_S,
    "HIDDEN_RETENTION_S": HIDDEN_RETENTION_S,
    "IDEMPOTENCY_S": IDEMPOTENCY_S,
    "STORED_BYTES": STORED_BYTES,
    "LOG_BYTES_PER_TOKEN": LOG_BYTES_PER_TOKEN,
    "LARGE_BYTES": LARGE_BYTES,
    "INPUT_COST": INPUT_COST,
    "OUTPUT_COST": OUTPUT_COST,
    "COUNTER_UNITS": COUNTER_UNITS,
    "DEFAULT_WEIGHT": DEFAULT_WEIGHT,
    "MAX_COUNTERS": MAX_COUNTERS,
    "FLOOR": FLOOR,
    "USER_COUNTERS_S": USER_COUNTERS_S,
    "WORKER_TTL_S": WORKER_TTL_S,
}


class Script:
    """Runs one script by its hash; sends the source to a server that does not have it."""

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
    """Return the script `shared/protocol/scripts/<name>.lua` for a client."""
    return Script(client, script_source(name))


@cache
def script_source(name: str) -> str:
    """Return what Redis runs: the shared constants, `_limits.lua`, `_fair.lua`, `_stored.lua`,
    `_images.lua`, `_prelude.lua`, perhaps `_affinity.lua` and `_deadlines.lua`, and the script.

    A script about files and batches has `_batches.lua` in place of the five before it.
    """
    folder = files("quire.shared.protocol") / "scripts"
    shared = ["_batches"] if name in BATCH_SCRIPTS else ["_limits", "_fair", "_stored", "_images", "_prelude"]
    shared += ["_affinity"] * (name in AFFINITY_SCRIPTS) + ["_deadlines"] * (name in DEADLINE_SCRIPTS)
    return constants() + "".join((folder / f"{part}.lua").read_text() for part in (*shared, name))


def constants() -> str:
    """Return the shared constants as Lua, one line each."""
    return "".join(f"local {name} = {_lua(value)}\n" for name, value in _CONSTANTS.items())


def _lua(value: int | str | Sequence[str]) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f"'{value}'"
    return "{" + ", ".join(map(_lua, value)) + "}"
