"""`quire parking`: the parked requests of a Redis, by default that of a running `quire serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.gateway.features.parking.parked_requests import carry_out, run
from quire.ops.cli.settings import ParkedSettings
from quire.ops.local.preconditions import redis_of
from quire.ops.paths import resolve_state_dir
from quire.shared.process.interrupts import raise_at_ctrl_c


def parking(settings: ParkedSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action; prints what it found. Raises CommandError.

    Without --redis-url it uses the Redis of the `quire serve` that runs with the state folder, else DEFAULT_REDIS_URL.
    """
    raise_at_ctrl_c()
    if settings.redis_url:
        return run(settings, environ)
    found = redis_of(resolve_state_dir(settings.state_dir, environ))
    return carry_out(replace(settings, redis_url=found.url), found.where, found.remedy)
