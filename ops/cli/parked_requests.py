"""`quire parking`: the parked requests of a Redis, by default that of a running `quire serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.gateway.admin.parked_requests import carry_out, run
from quire.ops.cli.dead_letters import DEFAULT_REDIS_URL
from quire.ops.cli.settings import ParkedSettings
from quire.ops.local.preconditions import find_redis
from quire.ops.paths import resolve_state_dir
from quire.shared.interrupts import raise_at_ctrl_c


def parking(settings: ParkedSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action; prints what it found. Raises CommandError.

    Without --redis-url it uses the Redis of the `quire serve` that runs with the state folder, else DEFAULT_REDIS_URL.
    """
    raise_at_ctrl_c()
    if settings.redis_url:
        return run(settings, environ)
    state_dir = resolve_state_dir(settings.state_dir, environ)
    if found := find_redis(state_dir):
        where = f"the Redis of the `quire serve` with the state folder {state_dir} does not answer"
        return carry_out(replace(settings, redis_url=found), where, "wait until that `quire serve` is ready")
    where = f"no `quire serve` runs with the state folder {state_dir}, and no Redis is at {DEFAULT_REDIS_URL}"
    remedy = "start `quire serve`, or pass its --state-dir (QUIRE_STATE_DIR) or --redis-url (QUIRE_REDIS_URL)"
    return carry_out(replace(settings, redis_url=DEFAULT_REDIS_URL), where, remedy)
